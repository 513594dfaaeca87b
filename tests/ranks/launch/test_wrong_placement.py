"""Real ranks that are not where the hostfile says print the table once.

Tests mpiddp/runtime/rendezvous/placement.py.
python -m pytest tests/ranks/launch/test_wrong_placement.py
"""

from __future__ import annotations

import re

from tests.support.errors import error
from tests.support.ranks import mpirun, own_lines

EXAMPLE = "examples/message_passing.py"


def test_real_ranks_on_wrong_hosts_print_the_table_once() -> None:
    done = mpirun(2, EXAMPLE, env={"MPIDDP_PLACEMENT": "nodeA:1,nodeB:1"})
    assert (done.returncode, done.stdout) == (2, "")
    sentence, head, *rows = own_lines(done.stderr)
    assert re.fullmatch(error("environment, mca-params.conf", "(nodeA:1,nodeB:1)"), sentence), (
        sentence
    )
    assert head.split() == ["rank", "host", "local", "rank", "device", "expected", "host"]
    assert [row.split()[0] + row.split()[-1] for row in rows] == ["0nodeA", "1nodeB"]
