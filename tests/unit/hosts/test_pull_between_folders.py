"""A pull between two folders of this machine, through the real program of the other host, without ssh.

Tests mpiddp/hosts/cluster/pull.py. tests/cluster/launch/test_hosts_pull.py has real hosts.
python -m pytest tests/unit/hosts/test_pull_between_folders.py
"""

from __future__ import annotations

import json
import re
import resource
import shlex
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.cluster import fan_out
from mpiddp.hosts.cluster.pull import Source
from mpiddp.hosts.hostfile import Host
from tests.support import folders_as_hosts
from tests.support.errors import error
from tests.support.folders_as_hosts import files_of, modes_count, verb, write


@pytest.fixture(name="hosts", autouse=True)
def folders_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return folders_as_hosts.stand(tmp_path, monkeypatch)


def test_the_verb_pull(hosts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=error("is on no", "/here/run ")):
        verb("pull", "run")
    write(Path("run"), log="1")
    assert verb("pull", "run") == 0
    assert capfd.readouterr() == ("node1: nothing new\n", "")
    with pytest.raises(UserError, match=error("file; expected", "/run/log ")):
        verb("pull", "run/log/deep")
    with pytest.raises(UserError, match=error("--min-hosts", "--min-hosts 3: ", " 2 hosts ")):
        verb("pull", "run", "--min-hosts", "3")
    checkpoint(Path("run") / "step1", model="weights")
    above = f": {Path.cwd()}/run."
    with pytest.raises(UserError, match=error("checkpoint. Pull", "/run/step1 ", above)):
        verb("pull", "run/step1")


@pytest.fixture(name="pull")
def a_pull(hosts: Path) -> Callable[..., str]:
    """Bring ./run from a host, and say what was brought."""

    def bring(name: str = "node1") -> str:
        source = Source(Host(name), Path("./run"), fan_out.connect(Host(name)))
        try:
            source.ask()
            return source.failure or source.bring()
        finally:
            source.peer.close()

    return bring


def checkpoint(folder: Path, *, index: str | None = None, **files: str) -> None:
    """A complete checkpoint, or one part of a sharded one."""
    all_files = files if index is None else {**files, "shards.json": index}
    folder.mkdir(parents=True)
    entries = {}
    for name, text in all_files.items():
        (folder / name).write_text(text)
        entries[name] = {"bytes": len(text), "sha256": sha256(text.encode()).hexdigest()}
    manifest = json.dumps(entries)
    (folder / "manifest.json").write_text(manifest)
    (folder / "COMPLETE").write_text(sha256(manifest.encode()).hexdigest())


def test_a_pull_brings_what_is_not_here(hosts: Path, pull: Callable[..., str]) -> None:
    there = hosts / "node1" / "run"
    write(there, log="step 1\nstep 2\n", ranks__rank1="x", same="s", differs="theirs", cut="12")
    (there / ".partial").write_text("not complete")
    write(Path("run"), log="step 1\n", same="s", differs="mine!!", cut="12345", own="o")
    assert pull() == "3 files, 21 B; kept beside what differs here: differs.node1"
    assert files_of(Path("run")) == {
        "log": "step 1\nstep 2\n", "ranks/rank1": "x", "same": "s", "own": "o",
        "differs": "mine!!", "differs.node1": "theirs", "cut": "12345",
    }  # fmt: skip
    assert pull() == "nothing new"
    assert not Path("run", ".mpiddp-pull").exists()


def test_a_pull_of_nothing(hosts: Path, pull: Callable[..., str]) -> None:
    assert pull() == "nothing new"


def test_what_cannot_be_read_there_is_named_and_the_rest_comes(
    hosts: Path, pull: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    modes_count(hosts, monkeypatch)
    there = hosts / "node1" / "run"
    write(there, a="1", closed="2", same="3", z="4")
    checkpoint(there / "step1", model="weights")
    checkpoint(there / "step2", model="later")
    write(Path("run"), same="?")
    for name in ("closed", "same", "step1/model"):
        (there / name).chmod(0)
    for _ in range(2):
        sentences = sorted(pull().splitlines())
        assert len(sentences) == 3
        for name, sentence in zip(("closed", "same", "step1/model"), sentences, strict=True):
            closed = error("cannot be read", f"run/{name} ", ": Permission denied")
            assert re.fullmatch(closed, sentence)
        assert sorted(files_of(Path("run"))) == [
            "a", "same", "step2/COMPLETE", "step2/manifest.json", "step2/model", "z"
        ]  # fmt: skip
    for name in ("closed", "same", "step1/model"):
        (there / name).chmod(0o600)
    assert pull().startswith("5 files, ")
    assert Path("run", "step1", "model").read_text() == "weights"
    assert Path("run", "same.node1").read_text() == "3"
    assert not Path("run", ".mpiddp-pull").exists()


def test_a_manifest_alone_is_a_file_like_others(hosts: Path, pull: Callable[..., str]) -> None:
    write(hosts / "node1" / "run", web__app="1", **{"web__manifest.json": "{}"})
    assert pull() == "2 files, 3 B"
    assert files_of(Path("run")) == {"web/app": "1", "web/manifest.json": "{}"}


def test_a_file_called_complete_alone_is_no_sign_of_a_checkpoint(
    hosts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script may mark the end of its work so."""
    write(Path("run"), COMPLETE="")
    assert verb("pull", "run") == 0
    assert capfd.readouterr() == ("node1: nothing new\n", "")


def test_a_folder_with_a_file_called_complete_comes_as_others(
    hosts: Path, pull: Callable[..., str]
) -> None:
    write(hosts / "node1" / "run", COMPLETE="", part__COMPLETE="", part__a="1")
    assert pull() == "3 files, 1 B"
    assert files_of(Path("run")) == {"COMPLETE": "", "part/COMPLETE": "", "part/a": "1"}


@pytest.mark.parametrize("path", ["../secret", "logs/../../secret", "/secret"])
def test_a_host_that_names_files_outside_of_the_folder_is_not_asked_for_them(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """None of our programs does. This one answers at once, and reads whatever comes."""
    rows = [[each, "f", 0o644, 0, 0, ""] for each in ("log", path)]
    answer = shlex.quote(json.dumps({"rows": rows}))
    command = ["sh", "-c", f"echo mpiddp-push; echo {answer}; exec cat > /dev/null"]
    monkeypatch.setattr(fan_out, "shell_command", lambda host, line: command)
    with pytest.raises(UserError, match=rf"^{error('it names', 'node1: ')}$"):
        verb("pull", "run")
    assert verb("pull", "run", "--min-hosts", "1") == 1
    assert not Path("run").exists()


def test_a_pull_without_room(hosts: Path, pull: Callable[..., str]) -> None:
    """A limit for the size of a file ends a write as a full disk does: the error names no path."""
    write(hosts / "node1" / "run", log="1" * 2_000_000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        assert re.fullmatch(error(".", "File too large."), pull())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_complete_checkpoint_comes_whole(hosts: Path, pull: Callable[..., str]) -> None:
    there = hosts / "node1" / "run"
    checkpoint(there / "step1", model="weights")
    checkpoint(there / "step2", model="theirs")
    checkpoint(Path("run") / "step2", model="mine")
    text = pull()
    assert text.startswith("6 files, ")
    assert text.count("step2.node1/") == 3
    assert (Path("run") / "step1" / "model").read_text() == "weights"
    assert (Path("run") / "step2" / "model").read_text() == "mine"
    assert (Path("run") / "step2.node1" / "model").read_text() == "theirs"
    assert pull() == "nothing new"


def test_the_shards_of_two_hosts_become_one_checkpoint(
    hosts: Path, pull: Callable[..., str]
) -> None:
    checkpoint(hosts / "node1" / "run" / "step1", index="of both", shard1="1", shard2="22")
    checkpoint(Path("run") / "step1", index="of both", shard0="0", shard2="22")
    assert pull().startswith("2 files, ")  # shard1 and the manifest
    here = Path("run") / "step1"
    manifest = (here / "manifest.json").read_text()
    assert sorted(json.loads(manifest)) == ["shard0", "shard1", "shard2", "shards.json"]
    assert (here / "COMPLETE").read_text() == sha256(manifest.encode()).hexdigest()
    assert [(here / f"shard{each}").read_text() for each in range(3)] == ["0", "1", "22"]
    assert sorted(path.name for path in Path("run").iterdir()) == ["step1"]


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("model", "damaged", "model does not match its SHA-256"),
        ("COMPLETE", "0" * 64, "manifest.json does not match its SHA-256"),
        ("model", None, "model is missing"),
    ],
)
def test_a_damaged_checkpoint_is_not_taken(
    hosts: Path, pull: Callable[..., str], file: str, text: str | None, problem: str
) -> None:
    there = hosts / "node1" / "run" / "step1"
    checkpoint(there, model="weights")
    (there / file).unlink()
    if text is not None:
        (there / file).write_text(text)
    assert re.fullmatch(error("no complete", "step1 ", f": {problem}."), pull())
    assert not (Path("run") / "step1").exists()
