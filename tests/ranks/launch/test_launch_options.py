"""The options of `mpiddp launch`, end to end with real ranks.

Tests mpiddp/launch/options.py.
python -m pytest tests/ranks/launch/test_launch_options.py
"""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path

import pytest

from tests.support.ranks import ROOT, launch, own_lines, script

HOST = socket.gethostname()
PRINT_GREETING = (
    "import os; print('rank', os.environ['RANK'], os.environ.get('GREETING'), flush=True)"
)


def test_report_prints_a_line_for_each_rank(tmp_path: Path) -> None:
    done = launch("--report", "-H", "localhost:2", script(tmp_path, ""))
    assert done.returncode == 0, done.stderr
    cells = [re.split(r"  +", line) for line in done.stdout.splitlines()]
    assert cells == [
        ["rank", "host", "local rank", "device"],
        ["0", HOST, "0", cells[1][3]],
        ["1", HOST, "1", cells[2][3]],
    ]
    assert all(re.fullmatch(r"cpu|cuda:\d", device) for *_, device in cells[1:])
    assert done.stderr == ""


def test_verbose_prints_the_choices_and_their_reasons() -> None:
    """Even for an env:// script that does not import mpiddp."""
    done = launch("-v", "-H", "localhost:2", str(ROOT / "tests" / "jobs" / "ddp_script.py"))
    assert done.returncode == 0, done.stderr
    mpi, placement = own_lines(done.stderr)
    assert re.fullmatch(r"mpiddp: Open MPI \d[\d.]+, /\S+/mpirun", mpi)
    assert placement == f"mpiddp: {HOST}: ranks 0-1"

    address = r"master address (\S+) port \d+: (.+)"
    (found,) = filter(None, (re.fullmatch(address, line) for line in done.stdout.splitlines()))
    assert found[2]  # the reason
    uses = [line for line in done.stdout.splitlines() if " uses " in line]
    assert sorted(re.sub(r"\S+$", "…", line) for line in uses) == [
        f"rank {rank} on {HOST} uses …" for rank in (0, 1)
    ]
    own = [line for line in done.stdout.splitlines() if re.match(r"rank \d of 2 local", line)]
    assert (len(own), len(uses) + 3) == (2, len(done.stdout.splitlines()))


def test_exclude_and_npernode_choose_hosts_and_ranks(tmp_path: Path) -> None:
    """far.invalid is never contacted: it does not exist."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("far.invalid slots=2\nlocalhost slots=3\n")
    done = launch(
        *("--hostfile", str(hostfile), "--exclude", "far.invalid", "--npernode", "2"),
        script(tmp_path, PRINT_GREETING),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 None", "rank 1 None"]


@pytest.mark.parametrize(
    ("export", "value"), [("GREETING", "from here"), ("GREETING=a b", "a b"), ("GREETING=", "")]
)
def test_an_exported_variable_reaches_the_ranks(tmp_path: Path, export: str, value: str) -> None:
    done = launch("-x", export, "-n", "1", script(tmp_path, PRINT_GREETING), GREETING="from here")
    assert done.stdout == f"rank 0 {value}\n", done.stderr


def test_timeout_limits_the_wait_for_a_rank_that_never_joins(tmp_path: Path) -> None:
    """Rank 1 hangs before it can join, in a sitecustomize that Python imports first."""
    late = "import os, time\nif os.environ.get('OMPI_COMM_WORLD_RANK') == '1': time.sleep(600)\n"
    (tmp_path / "sitecustomize.py").write_text(late)
    start = time.monotonic()
    done = launch(
        *("--timeout", "3", "-H", "localhost:2", script(tmp_path, PRINT_GREETING)),
        PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]),
    )
    assert time.monotonic() - start < 100  # rank 1 would sleep for 600 s
    assert (done.returncode, done.stdout) == (1, "")
    # If the launcher is slow, rank 0 also prints that its join has timed out, without "mpiddp:".
    late = f"mpiddp: the last output of rank 0 on {HOST} has not arrived; it may be missing here."
    # On a slow machine, `late` may stand before it.
    assert [line for line in re.findall("mpiddp: .*", done.stderr) if line != late] == [
        f"mpiddp: only 1 of 2 ranks joined in 3 s. Missing: rank 1 on {HOST}. "
        "Its last words: none; its Python has not started."
    ]
