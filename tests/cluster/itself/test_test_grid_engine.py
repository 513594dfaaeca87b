"""The test cluster's Grid Engine runs job scripts over several hosts, and ends with its block.

Tests tests/support/cluster/grid_engine.py.
python -m pytest tests/cluster/itself/test_test_grid_engine.py
"""

from __future__ import annotations

import pytest

from tests.support import cluster
from tests.support.cluster import USER, grid_engine, needs


@pytest.mark.parametrize("user", ["root", USER])
def test_a_job_script_and_its_hosts(user: str) -> None:
    if reason := needs.why_no_grid_engine():
        pytest.skip(reason)
    with cluster.up(2) as hosts:
        with grid_engine.up(hosts) as batch:
            script = 'cut -d" " -f1,2 $PE_HOSTFILE | sort\necho "$GREETING"\nexit 3\n'
            job = batch.qsub(script, "-pe", "fill", "6", env={"GREETING": "hello"}, user=user)
            assert job.returncode == 3
            *slots, greeting = job.stdout.splitlines()
            assert sorted(line.split()[1] for line in slots) == ["2", "4"]
            assert greeting == "hello"
        assert [host.processes() for host in hosts.hosts] == [[], []]
