"""The time that a job takes to grow by a host, from the request to the first step on more hosts.

    python -m benchmarks.growth --rounds 5

A job runs on node0 of the test cluster, while the sshd of node1 is stopped. Then it starts, a look finds the
host, and the job stops, saves and restarts on both. The times are medians, with the longest in brackets.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import astuple, dataclass
from statistics import median

from benchmarks.faults.job import Job, launch
from benchmarks.harness import OPENMPI5, start
from mpiddp.arguments import DefaultsShown, OneSentenceParser, whole
from mpiddp.bench.report import markdown
from tests.programs.elastic import Step, read_steps
from tests.support import cluster
from tests.support.cluster import Cluster, faults
from tests.support.ranks import ROOT

SCRIPT = str(ROOT / "tests" / "programs" / "elastic.py")
OPTIONS = ("--min-hosts", "1", "--grow", "1")
HEAD = ("last step after s", "restart begins after s", "next step after s", "load")


@dataclass(frozen=True)
class Growth:
    """Seconds after the line that says that the job stops, and the load average of the machine."""

    last_step_s: float
    planned_s: float
    next_step_s: float
    load: float


def main() -> None:
    parser = OneSentenceParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=DefaultsShown
    )
    parser.add_argument("--rounds", type=whole(1), default=5, help="number of jobs")
    rounds = parser.parse_args().rounds
    with cluster.up(2) as hosts:
        found = [_measure(hosts) for _ in range(rounds)]
    columns = zip(*map(astuple, found), strict=True)
    print(markdown(HEAD, [[f"{median(each):.1f} ({max(each):.1f})" for each in columns]]))


def _measure(hosts: Cluster) -> Growth:
    folder = hosts.shared / f"job-{os.urandom(4).hex()}"
    with faults.no_sshd(hosts["node1"]):
        job = launch(hosts, folder, OPENMPI5, "node0:1,node1:1", OPTIONS, [SCRIPT, str(folder)])
        _wait_for_step(job, 0)
    _wait_for_step(job, 1)
    (folder / "finish").touch()
    code = job.end()
    assert code == 0, job.output()
    since = _time_of(job, "stopping to restart")
    growth = Growth(
        _steps(job, 0)[-1].at - since,
        _time_of(job, "restarting on") - since,
        _steps(job, 1)[0].at - since,
        os.getloadavg()[0],
    )
    shutil.rmtree(folder)
    return growth


def _wait_for_step(job: Job, restarts: int) -> None:
    """Wait for the first step after so many restarts. Raises TimeoutError if there is none."""
    job.wait_until(lambda: bool(_steps(job, restarts)), f"a step after {restarts} restarts")


def _steps(job: Job, restarts: int) -> list[Step]:
    return [step for step in read_steps(job.folder) if step.restarts == restarts]


def _time_of(job: Job, sentence: str) -> float:
    return next(line.at for line in job.lines if sentence in line.text)


if __name__ == "__main__":
    start(main)
