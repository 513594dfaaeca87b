"""The launcher remembers which host ended a job, says it, and does without that host where it may.

Tests mpiddp/launch/usable.py.
python -m pytest tests/cluster/launch/test_memory_of_hosts.py
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, cpus
from tests.support.ranks import LAUNCH, ROOT

# A broken machine: whatever rank is on node1 is killed.
SCRIPT = """
import os, socket, time
if socket.gethostname() == "node1":
    os.kill(os.getpid(), 9)
elif os.environ["WORLD_SIZE"] != "1":
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        yield standing


def test_a_host_that_ends_jobs_is_left_out(hosts: Cluster, tmp_path: Path) -> None:
    """At a restart after two failures in a row, and by later launches that may do without it."""
    file, script = hosts.shared / "hosts.txt", hosts.shared / "script.py"
    file.write_text("node1 slots=1\nnode0 slots=1\n")
    script.write_text(SCRIPT)
    history = hosts.shared / "hosts.txt.history.jsonl"

    def launch(*options: str) -> subprocess.CompletedProcess[str]:
        command = [*LAUNCH, "--hostfile", str(file), *options, str(script)]
        return hosts["node0"].run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})

    def records() -> list[dict[str, object]]:
        return [json.loads(line) for line in history.read_text().splitlines()]

    done = launch("--max-restarts", "2", "--min-hosts", "1")
    assert done.returncode == 0, done.stderr
    sentences = (
        "mpiddp: restarting on node1 and node0 (restart 1 of 2).",
        "mpiddp: leaving out a host: node1 has ended two attempts in a row.",
        "mpiddp: restarting on node0 (restart 2 of 2).",
    )
    assert all(sentence in done.stderr for sentence in sentences), done.stderr
    assert [(each["hosts"], list(each.get("failed", {}))) for each in records()] == [  # type: ignore[call-overload]
        (["node1", "node0"], ["node1"]),
        (["node1", "node0"], ["node1"]),
        (["node0"], []),
    ]
    assert len({str(each["job"]) for each in records()}) == 1

    done = launch()
    assert done.returncode == 1
    assert "node1 ended" not in done.stderr  # one job may be bad luck
    known = "node1 ended 2 of its last 2 jobs"
    done = launch()
    assert done.returncode == 1
    assert f"mpiddp: {known}: --avoid-flaky does without it where it can.\n" in done.stderr
    done = launch("--avoid-flaky", "--min-hosts", "1")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        0,
        "mpiddp: leaving out a host: node1 ended 3 of its last 3 jobs.",
    )
    done = launch("--avoid-flaky", "-n", "1")  # the slots of the others are enough
    assert done.returncode == 0, done.stderr
    assert "mpiddp: node1 ended 3 of its last 3 jobs: placed last.\n" in done.stderr

    hosts["node1"].link("down")
    try:
        done = launch()
    finally:
        hosts["node1"].link("up")
    assert done.returncode == 2
    assert records()[-1]["failed"] == {"node1": done.stderr.strip()}
    done = hosts["node0"].run(
        [*LAUNCH[:3], "hosts", "history", str(file)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    )
    assert "ended 3 of its last 4 jobs, and did not answer in 1" in done.stdout


def test_a_kill_for_lack_of_memory_is_no_fault_of_its_host(hosts: Cluster) -> None:
    """The host of the rank that is killed is not the launcher's: its control group is asked over ssh."""
    memory = Path("/sys/fs/cgroup/memory")
    if not (memory / "memory.limit_in_bytes").exists():
        pytest.skip("needs the memory controller of cgroup v1")
    file, script = hosts.shared / "small.txt", hosts.shared / "large.py"
    file.write_text("node0 slots=1\nnode1 slots=1\n")
    script.write_text("import os\nif os.environ['RANK'] == '1': bytearray(1 << 30)")
    with cpus.grouped(hosts["node1"], memory) as group:
        (group / "memory.limit_in_bytes").write_text(str(1 << 28))
        command = [*LAUNCH, "--hostfile", str(file), str(script)]
        done = hosts["node0"].run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "mpiddp: the kernel has killed a process on node1 since the start, because its control group's "
        "limit of 268.4 MB was reached (oom_kill). Mend it: "
    )
    (record,) = (hosts.shared / "small.txt.history.jsonl").read_text().splitlines()
    assert "failed" not in json.loads(record)


def test_a_script_that_fails_is_no_fault_of_its_host(hosts: Cluster, tmp_path: Path) -> None:
    file, script = hosts.shared / "good.txt", hosts.shared / "raises.py"
    file.write_text("node0 slots=1\nnode1 slots=1\n")
    script.write_text("raise ValueError('3 channels')")
    command = [*LAUNCH, "--hostfile", str(file), str(script)]
    done = hosts["node0"].run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 1
    (record,) = (hosts.shared / "good.txt.history.jsonl").read_text().splitlines()
    assert json.loads(record)["hosts"] == ["node0", "node1"]
    assert "failed" not in json.loads(record)
