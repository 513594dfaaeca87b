"""A rank on another host fails while the others sleep: one line names it, and all processes end soon.

Each MPI ends a job differently, and two do not end it at all: see mpiddp/runtime/job/failure.py.

Tests mpiddp/runtime/job/failure.py, mpiddp/launch/streams/output.py.
python -m pytest tests/cluster/launch/test_failing_rank.py
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster
from tests.support.mpis import PACKAGES, mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

LAUNCH = (sys.executable, "-m", "mpiddp", "launch", "-H", "node0:1,node1:1")
FAILING = """
import os, sys, time
if os.environ["RANK"] == "0":
    time.sleep(600)
time.sleep(1)  # rank 0 sleeps by now
print("failing at", time.time(), flush=True)
{}
"""
ENDS = {
    'raise RuntimeError("on purpose")': "failed first: RuntimeError: on purpose",
    "sys.exit(3)": "ended first, with exit code 3",
}

BANNER = re.compile(
    "one or more processes exited|Primary job|BAD TERMINATION|^[-=]{60}", re.MULTILINE
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


# The traceback of an exception does not depend on the MPI, so it is tested with one only.
@pytest.mark.parametrize(
    ("mpi", "end"),
    [("openmpi5", end) for end in ENDS] + [(mpi, "sys.exit(3)") for mpi in PACKAGES],
)
def test_the_job_ends_with_the_rank_that_fails(hosts: Cluster, mpi: str, end: str) -> None:
    mpirun = mpirun_of(mpi)
    script = hosts.shared / "failing.py"
    script.write_text(FAILING.format(end))

    done = hosts["node0"].run([*LAUNCH, "--mpirun", mpirun, str(script)], cwd=ROOT)
    ended_at = time.time()
    (failed_at,) = (line for line in done.stdout.splitlines() if line.startswith("failing at"))

    assert done.returncode == 1, done.stderr
    assert ended_at - float(failed_at.split()[-1]) < 100  # rank 0 would sleep for 600 s
    # mpirun's own last line may lack a newline.
    named = re.findall("(?:mpiddp: )?rank 1 on node1.*", done.stderr)
    sentence = f"mpiddp: rank 1 on node1 {ENDS[end]}. The other ranks were stopped."
    assert named == [sentence], done.stderr
    assert not BANNER.search(done.stdout + done.stderr), done.stderr  # the sentence says it
    assert ("Traceback" in done.stderr) == end.startswith("raise")
    deadline = time.time() + PATIENCE_S  # the daemons notice that mpirun has ended
    while left := [process for host in hosts.hosts for process in host.processes()]:
        assert time.time() < deadline, left
        time.sleep(0.1)
