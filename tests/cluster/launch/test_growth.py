"""Hosts that come back, or are added to the hostfile, join a running job: at a restart, or with --grow.

Tests mpiddp/launch/grow.py, job.py, supervise/attempt.py.
python -m pytest tests/cluster/launch/test_growth.py
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.cluster.launch.test_restarts_on_hosts import TRAIN, last_step, wait_for_step
from tests.jobs import elastic
from tests.jobs.elastic import GLOBAL_BATCH, Step
from tests.support import cluster
from tests.support.cluster import Cluster, Program
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT

SCRIPT = str(ROOT / "tests" / "jobs" / "elastic.py")
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
STOPPING = ": stopping to restart.\n"
UNUSABLE = "the list of hosts cannot be used now, so the one of before stays in force: "


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(3) as standing:
        yield standing


@dataclass
class Run:
    """A job on the hosts of its own hostfile, launched on node0."""

    hosts: Cluster
    folder: Path
    launcher: Program

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    @property
    def steps(self) -> list[Step]:
        return elastic.read_steps(self.folder)

    def list_hosts(self, text: str) -> None:
        """Replace the hostfile, as most editors do."""
        new = self.folder / "hosts.new"
        new.write_text(text)
        new.rename(self.folder / "hosts.txt")

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_reached():
            assert time.monotonic() < deadline, self.stderr
            assert self.launcher.poll() is None or is_reached(), self.stderr
            time.sleep(0.05)

    def wait_for(self, sentence: str, times: int = 1) -> None:
        self.wait_until(lambda: self.stderr.count(sentence) >= times)

    def wait_for_ranks(self, ranks: int, restarts: int) -> None:
        """Wait until the attempt after so many restarts has made five steps, with so many ranks."""

        def found() -> list[int]:
            return [step.ranks for step in self.steps if step.restarts == restarts]

        self.wait_until(lambda: len(found()) >= 5)
        assert set(found()) == {ranks}, self.stderr

    def finish(self, *, grown: Collection[int] = ()) -> None:
        """End the training, which must succeed, and check its result. `grown`: restarts without a failure."""
        (self.folder / "finish").touch()
        assert self.launcher.wait(PATIENCE_S) == 0, self.stderr
        check(self, grown)


def check(run: Run, grown: Collection[int]) -> None:
    """Every step counts once, with the global batch, and the weights are those of a single process."""
    steps = run.steps
    last, weights = json.loads((run.folder / "weights.json").read_text())
    assert {step.samples for step in steps} == {GLOBAL_BATCH}
    # An attempt that failed may have come further than the last one.
    assert {step.number for step in steps} == set(range(1, max(step.number for step in steps) + 1))
    assert steps[-1].number == last
    for before, after in itertools.pairwise(steps):
        loses_steps = after.restarts != before.restarts and after.restarts not in grown
        assert after.number <= before.number + 1, (before, after)
        assert loses_steps or after.number == before.number + 1, (before, after)
    expected = torch.zeros(elastic.SIZE)
    for number in range(1, last + 1):
        expected = elastic.updated(expected, elastic.sums_of(expected, number, 0, 1))
    assert torch.allclose(torch.tensor(weights), expected, atol=1e-4), (weights, expected)
    assert steps[-1].loss < steps[0].loss / 10


@contextmanager
def job(
    hosts: Cluster, tmp_path: Path, listed: str, *options: str, script: str = SCRIPT, most: int = 0
) -> Iterator[Run]:
    folder = hosts.shared / tmp_path.name
    folder.mkdir()
    (folder / "hosts.txt").write_text(listed)
    command = [*LAUNCH, "--hostfile", str(folder / "hosts.txt"), *options, script]
    command += [str(folder), *([str(most)] if most else [])]
    with (folder / "stderr").open("w") as stderr:
        launcher = hosts["node0"].popen(
            command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=stderr.fileno()
        )
    try:
        yield Run(hosts, folder, launcher)
    finally:
        launcher.end()
        for host in hosts.hosts:
            host.kill_processes()


def test_a_host_is_added_lost_and_back(hosts: Cluster, tmp_path: Path) -> None:
    """2 ranks, 3, 2, 3: hosts with different numbers of slots."""
    options = ("--grow", "1", "--min-hosts", "1", "--max-restarts", "3")
    with job(hosts, tmp_path, "node0 slots=2\n", *options) as run:
        run.wait_for_ranks(2, restarts=0)
        run.list_hosts("node0 slots=2\nnode1 slots=1\n")
        run.wait_for_ranks(3, restarts=1)
        hosts["node1"].link("down")
        try:
            run.wait_for_ranks(2, restarts=2)
        finally:
            hosts["node1"].link("up")
        run.wait_for_ranks(3, restarts=3)
        run.finish(grown=(1, 3))
        for sentence, times in (
            (f"mpiddp: node1 can join{STOPPING}", 2),
            ("mpiddp: restarting on node0 (restart 1 of 3).\n", 1),
            ("mpiddp: restarting on node0 and node1.\n", 2),
            ("mpiddp: 3 ranks instead of 2; the global batch stays at 12.\n", 2),
        ):
            assert run.stderr.count(sentence) == times, run.stderr


def test_a_training_grows_again_after_a_cut(hosts: Cluster, tmp_path: Path) -> None:
    """`mpiddp train` with --grow and one restart: every step is recorded once."""
    out, steps = hosts.shared / "grown", 300
    command = [*LAUNCH, "--grow", "1", "--max-restarts", "1", "--min-hosts", "2"]
    command += ["-H", "node0:1,node1:1,node2:1", *TRAIN, "--batch-size", "5", "--log-every", "1"]
    command += ["--steps-per-epoch", str(steps), "--save-every", "10", "--out", str(out)]
    with hosts["node0"].popen(command, cwd=ROOT, env=ENV) as launcher:
        records = out / "metrics.jsonl"
        wait_for_step(records, 20)
        hosts["node1"].link("down")
        try:
            wait_for_step(records, last_step(records) + 20)
        finally:
            hosts["node1"].link("up")
        stdout, stderr = launcher.communicate(timeout=PATIENCE_S)
    assert launcher.returncode == 0, stderr
    assert "mpiddp: 2 ranks instead of 3; the global batch stays at 15.\n" in stderr
    assert f"mpiddp: node1 can join{STOPPING}" in stderr, stderr
    assert "mpiddp: restarting on node0, node1 and node2.\n" in stderr
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["global_batch_size"], summary["steps"], summary["world_size"]) == (15, steps, 3)
    written = [json.loads(line) for line in records.read_text().splitlines()]
    numbers = [record["step"] for record in written if "train_loss" in record]
    assert numbers == list(range(1, steps + 1))
    assert all(record["train_loss"] < 10 for record in written if "train_loss" in record)
    assert stdout.count("resuming from") == 2


def test_without_grow_the_list_counts_at_the_next_restart(hosts: Cluster, tmp_path: Path) -> None:
    """It is broken, gets another host, and loses one."""
    two = "node0 slots=1\nnode1 slots=1\n"
    with job(hosts, tmp_path, two, "--max-restarts", "3") as run:
        for restarts, (text, ranks) in enumerate(
            [
                (two, 2),
                ("node0 slots=1\nnode1 slots=", 2),
                (f"{two}node2 slots=1\n", 3),
                ("node0 slots=1\nnode2 slots=1\n", 2),
            ]
        ):
            if restarts:
                run.list_hosts(text)
                (run.folder / "fail").touch()
            run.wait_for_ranks(ranks, restarts)
        run.finish()
        own = [line for line in run.stderr.splitlines() if "mpiddp: " in line]
        # On a slow machine the launcher may find ranks that were ending.
        others = ("ended first", "leftover process")
        broken, *rest = [line for line in own if not any(other in line for other in others)]
        where = f"mpiddp: {UNUSABLE}{run.folder}/hosts.txt:2: "
        assert re.fullmatch(error("a positive", where, '"slots="', "node1 slots=4"), broken)
        assert rest == [
            "mpiddp: restarting on node0 and node1 (restart 1 of 3).",
            "mpiddp: restarting on node0, node1 and node2 (restart 2 of 3).",
            "mpiddp: 3 ranks instead of 2; the global batch stays at 12.",
            "mpiddp: restarting on node0 and node2 (restart 3 of 3).",
        ]


def test_an_added_host_that_cannot_be_used_prevents_no_restart(
    hosts: Cluster, tmp_path: Path
) -> None:
    """Even without --min-hosts: the job has as many hosts as at its start."""
    with job(hosts, tmp_path, "node0 slots=1\n", "--max-restarts", "1") as run:
        run.wait_for_ranks(1, restarts=0)
        run.list_hosts("node0 slots=1\nnowhere slots=1\nnode1 slots=1\n")
        (run.folder / "fail").touch()
        run.wait_for_ranks(2, restarts=1)
        left_out = error("be resolved", "mpiddp: leaving out a host: nowhere: ")
        assert re.search(left_out, run.stderr), run.stderr
        run.finish()


def test_a_broken_list_is_one_warning_and_max_ranks_is_a_limit(
    hosts: Cluster, tmp_path: Path
) -> None:
    with job(hosts, tmp_path, "node0 slots=1\n", "--grow", "1", most=3) as run:
        run.wait_for_ranks(1, restarts=0)
        run.list_hosts("")
        run.wait_for(f"mpiddp: {UNUSABLE}{run.folder}/hosts.txt ")
        run.list_hosts("node0 slots=2\n")
        run.wait_for_ranks(2, restarts=1)
        run.list_hosts("node0 slots=2\nnode1 slots=4\nnode2 slots=4\n")
        run.wait_for_ranks(3, restarts=2)
        run.finish(grown=(1, 2))
        assert run.stderr.count(UNUSABLE) == 1
        unusable = error("lists no", f"mpiddp: {UNUSABLE}{run.folder}/hosts.txt ")
        assert re.search(unusable, run.stderr), run.stderr
        assert f"mpiddp: node0 has more slots{STOPPING}" in run.stderr
        assert f"mpiddp: node1 and node2 can join{STOPPING}" in run.stderr
        assert run.stderr.count(STOPPING) == 2


@pytest.mark.parametrize("moment", ["slow_save", "slow_start"])
def test_a_stop_of_the_user_takes_precedence(hosts: Cluster, tmp_path: Path, moment: str) -> None:
    """While the ranks save to grow, and before the first step on more hosts."""
    with job(hosts, tmp_path, "node0 slots=1\n", "--grow", "1") as run:
        run.wait_for_ranks(1, restarts=0)
        (run.folder / moment).touch()
        run.list_hosts("node0 slots=1\nnode1 slots=1\n")
        run.wait_for(STOPPING if moment == "slow_save" else "restarting on node0 and node1.")
        run.launcher.send_signal(signal.SIGTERM)
        if moment == "slow_save":
            run.wait_for("mpiddp: SIGTERM: the ranks are saving and stopping")
            (run.folder / moment).unlink()
        assert run.launcher.wait(PATIENCE_S) == 75, run.stderr
        assert ("restarting" in run.stderr) == (moment == "slow_start")
        assert "mpiddp: stopped on request.\nmpiddp: to resume: mpiddp launch" in run.stderr


WAITS = """
import sys, time
from pathlib import Path
import mpiddp
Path(sys.argv[1], "started").touch()
while not Path(sys.argv[1], "finish").exists():
    {step}
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("pass", "not every rank has called mpiddp.should_stop()"),
        (
            "mpiddp.should_stop()",
            "the script has announced nothing that resumes it (mpiddp.announce)",
        ),
    ],
)
def test_a_job_that_cannot_resume_is_not_stopped(
    hosts: Cluster, tmp_path: Path, step: str, reason: str
) -> None:
    script = hosts.shared / f"{tmp_path.name}.py"
    script.write_text(WAITS.format(step=step))
    with job(hosts, tmp_path, "node0 slots=1\n", "--grow", "1", script=str(script)) as run:
        run.wait_until((run.folder / "started").exists)
        run.list_hosts("node0 slots=1\nnode1 slots=1\n")
        sentence = (
            f"mpiddp: node1 can join, but {reason}, so the job continues without a restart.\n"
        )
        run.wait_for(sentence)
        (run.folder / "finish").touch()
        assert run.launcher.wait(PATIENCE_S) == 0, run.stderr
        assert run.stderr == sentence


def test_a_job_that_does_not_start_with_a_new_host_goes_back(
    hosts: Cluster, tmp_path: Path
) -> None:
    """Without --max-restarts. It does not try again, even when the line of the host has changed."""
    with job(hosts, tmp_path, "node0 slots=1\n", "--grow", "1") as run:
        run.wait_for_ranks(1, restarts=0)
        (run.folder / "broken_node1").touch()
        run.list_hosts("node0 slots=1\nnode1 slots=1\n")
        run.wait_for_ranks(1, restarts=2)
        (run.folder / "broken_node1").unlink()
        assert run.stderr.count(STOPPING) == 1
        assert (
            "mpiddp: rank 1 on node1 ended first, with exit code 3. The other ranks were stopped. From now "
            "on, hosts join only at a restart.\n" in run.stderr
        )
        run.list_hosts("node0 slots=1\nnode1 slots=1 max_slots=1\n")
        last = run.steps[-1].number
        run.wait_until(lambda: run.steps[-1].number > last + 20)
        assert run.stderr.count(STOPPING) == 1
        run.finish(grown=(1, 2))
