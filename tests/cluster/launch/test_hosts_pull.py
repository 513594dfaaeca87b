"""`mpiddp hosts pull`, from hosts whose file systems are apart: what comes home, and what stays.

Tests mpiddp/hosts/cluster/pull.py, and its end on the hosts in transfer.py.
python -m pytest tests/cluster/launch/test_hosts_pull.py
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from mpiddp.checkpoints import folder as directory
from tests.support.cluster import Cluster, faults, links
from tests.support.errors import error
from tests.support.hosts_verb import HOSTS, on_node0, three_hosts_apart
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with three_hosts_apart() as standing:
        yield standing


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run on node0, with rank 0's log."""
    made = tmp_path / "a run; $HOME"
    write(made, {"logs/rank_00000.log": "rank 0\n", "metrics.jsonl": "{}\n"})
    return made


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def pull(hosts: Cluster, *arguments: object, file: str = "hosts") -> CompletedProcess[str]:
    return on_node0(hosts, "pull", *arguments, file=file)


def texts(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


def checkpoint(run: Path, step: int, files: dict[str, str]) -> None:
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    directory.write_folder(run / f"checkpoints/step_{step:08d}", lambda new: write(new, files))


def test_what_only_other_hosts_have_comes_home(hosts: Cluster, run: Path) -> None:
    before = texts(run)
    for number in (1, 2):
        there = hosts[f"node{number}"].path(run)
        own = {f"logs/rank_{number:05d}.log": f"rank {number}\n", ".hidden": "", "logs/.x.part": ""}
        write(there, {**before, **own})
        checkpoint(there, 2, {"model.pt": "weights"})
    checkpoint(hosts["node2"].path(run), 4, {"model.pt": "later"})
    (hosts["node2"].path(run) / "checkpoints" / ".unfinished-1").mkdir()
    done = pull(hosts, run)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "node1: 4 files, 192 B\nnode2: 4 files, 190 B\n"
    found = texts(run)
    assert {name for name in found if "checkpoints" not in name} == {
        *before,
        "logs/rank_00001.log",
        "logs/rank_00002.log",
    }
    for step in (2, 4):
        directory.verify(run / f"checkpoints/step_{step:08d}")
    assert (run / "checkpoints/step_00000004/model.pt").read_text() == "later"
    done = pull(hosts, run)
    assert (done.returncode, done.stdout) == (0, "node1: nothing new\nnode2: nothing new\n")
    assert texts(run) == found


def test_nothing_is_overwritten(hosts: Cluster, run: Path) -> None:
    """A file that differs is kept beside; one that has grown there is continued; one that has here stays."""
    there = hosts["node1"].path(run)
    write(run, {"grown": "line 1\n", "shorter": "line 1\nline 2\n", "dir": "a file here"})
    write(there, {"metrics.jsonl": "[]\n", "grown": "line 1\nline 2\n", "shorter": "line 1\n"})
    checkpoint(run, 2, {"model.pt": "ours"})
    checkpoint(there, 2, {"model.pt": "theirs"})
    done = pull(hosts, run)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("node1: 5 files, ")
    assert (
        "kept beside what differs here: checkpoints/step_00000002.node1/COMPLETE, " in done.stdout
    )
    found = texts(run)
    assert found["metrics.jsonl"] == "{}\n"
    assert found["metrics.jsonl.node1"] == "[]\n"
    assert found["grown"] == found["shorter"] == "line 1\nline 2\n"
    assert found["checkpoints/step_00000002/model.pt"] == "ours"
    assert found["checkpoints/step_00000002.node1/model.pt"] == "theirs"
    assert pull(hosts, run).stdout == "node1: nothing new\nnode2: nothing new\n"
    write(there, {"metrics.jsonl": "[]\n[]\n"})
    assert pull(hosts, run).stdout.startswith("node1: 1 file, 6 B; kept beside")
    assert (run / "metrics.jsonl.node1").read_text() == "[]\n[]\n"
    write(there, {"dir/file": "below"})
    done = pull(hosts, run)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.splitlines()[0].startswith(f"node1: {run}/dir")
    assert (run / "dir").read_text() == "a file here"


def test_shards_of_all_hosts_become_one_checkpoint(hosts: Cluster, run: Path) -> None:
    shards = {f"shard_{rank:05d}.pt": f"shard {rank}" for rank in range(3)}
    index = json.dumps(
        {
            "files": {
                name: {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
                for name, text in shards.items()
            }
        }
    )
    for number, host in enumerate(hosts.hosts):
        folder = run if number == 0 else host.path(run)
        name = f"shard_{number:05d}.pt"
        checkpoint(folder, 2, {"shards.json": index, "state.json": "{}", name: shards[name]})
    folder = run / "checkpoints/step_00000002"
    assert directory.missing_shards(folder) == list(shards)[1:]
    done = pull(hosts, run)
    assert (done.returncode, done.stderr) == (0, "")
    directory.verify(folder)
    assert directory.missing_shards(folder) == []
    assert {name: (folder / name).read_text() for name in shards} == shards
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "logs", "metrics.jsonl"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert pull(hosts, run).stdout == "node1: nothing new\nnode2: nothing new\n"


def test_broken_checkpoints_are_left_there(hosts: Cluster, run: Path) -> None:
    there = hosts["node1"].path(run)
    for step in (2, 3):
        checkpoint(there, step, {"model.pt": "weights"})
        write(there, {f"checkpoints/step_0000000{step}/model.pt": "weighty"})
    write(there, {"logs/new.log": "new"})
    done = pull(hosts, run)
    assert (done.returncode, done.stderr) == (1, "")
    broken = [
        error("no complete", f"node1: checkpoints/step_0000000{step} ", ": model.pt ", "SHA-256")
        for step in (2, 3)
    ]
    assert re.fullmatch("\n".join([*broken, "node2: nothing new\n"]), done.stdout), done.stdout
    assert not (run / "checkpoints").exists()
    assert (run / "logs/new.log").read_text() == "new"


def test_a_pull_that_breaks_off_continues(hosts: Cluster, run: Path) -> None:
    there = hosts["node1"].path(run)
    write(there, {"logs/small": "small"})
    for number in range(20):
        (there / f"{number:02}.bin").write_bytes(os.urandom(250_000))
    command = [*HOSTS, "pull", str(hosts.shared / "hosts"), str(run)]
    arrived = run / ".mpiddp-pull/node1"
    with links.limited(hosts.hosts, mbit=20), hosts["node0"].popen(command, cwd=ROOT) as running:
        deadline = time.monotonic() + PATIENCE_S
        while not (arrived / "10.bin").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate(timeout=PATIENCE_S)
    assert (running.returncode, stderr) == (130, "interrupted\n")
    assert not (run / "00.bin").exists()
    before = links.sent_bytes(hosts["node1"])
    assert pull(hosts, run).returncode == 0
    assert links.sent_bytes(hosts["node1"]) - before < 3_000_000
    for number in range(20):
        name = f"{number:02}.bin"
        assert (run / name).read_bytes() == (there / name).read_bytes()
    assert not (run / ".mpiddp-pull").exists()


def test_bad_input(hosts: Cluster, run: Path) -> None:
    (hosts.shared / "dash").write_text("-oProxyCommand=x\n")
    log = run / "logs/rank_00000.log"
    for arguments, file, sentence in (
        ((run,), "dash", error("and would", "dash:1: ", '"-oProxyCommand=x"')),
        ((log,), "hosts", error("file; expected", f"{log} ")),
        ((log / "x",), "hosts", error("file; expected", f"{log} ")),
        ((run / "none",), "hosts", error("is on no", f"{run}/none ")),
        (("--", "-x"), "hosts", error("is on no", f"{ROOT}/-x ")),
        ((run, "--min-hosts", "0"), "hosts", error("--help", "--min-hosts", "'0'")),
        ((run, "--min-hosts", "4"), "hosts", error("--min-hosts", "--min-hosts 4: ", "3 hosts")),
    ):
        done = pull(hosts, *arguments, file=file)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done
        assert re.fullmatch(sentence + r"\n", done.stderr), done.stderr
    write(hosts["node1"].path(run), {"new.log": "new"})
    with faults.no_sshd(hosts["node2"]):
        done = pull(hosts, run)
        assert (done.returncode, done.stdout) == (2, "")
        refused = error("connection refused", "node2: ssh node2: ")
        assert re.match(refused, done.stderr), done.stderr
        assert not (run / "new.log").exists()
        done = pull(hosts, run, "--min-hosts", "2")
        assert done.returncode == 1
        assert re.match(rf"node1: 1 file, 3 B\n{refused}", done.stdout), done.stdout
    shutil.rmtree(hosts["node2"].path(run), ignore_errors=True)
    hosts["node2"].path(run).parent.mkdir(parents=True, exist_ok=True)
    hosts["node2"].path(run).write_text("a file")
    done = pull(hosts, run)
    assert done.returncode == 2
    sentence = error(".", f"node2: {run}: Not a directory")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr
