"""What a push and a pull bring. rsync takes it from another folder of this machine, without ssh.

Tests mpiddp/hosts/{pull,push}.py. tests/promises/test_hosts.py has real hosts.
python -m pytest tests/unit/hosts/test_pull.py
"""

import json
import os
import random
import re
import resource
from hashlib import sha256
from pathlib import Path

import pytest

from mpiddp.checkpoints import folder as directory
from mpiddp.errors import UserError
from mpiddp.hosts import main, pull, push
from mpiddp.hosts.hostfile import Host
from tests.support.cluster import needs
from tests.support.errors import error

HOST, HERE = Host("n1"), Host("localhost")


@pytest.fixture
def there(tmp_path, monkeypatch):
    """The run's folder on the other host. That of this one is `run` in the working folder."""
    (tmp_path / "here" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


@pytest.fixture
def bring(there, ssh, monkeypatch, capsys):
    """Pull the folder from the other host; returns what is said of it."""
    Path("hosts").write_text("localhost\nn1\n", encoding="utf-8")
    monkeypatch.setattr(pull, "other_hosts", lambda hosts: [HOST])

    def bring(code=0):
        assert main.main(["pull", "hosts", "run"]) == code
        return capsys.readouterr().out.splitlines()

    return bring


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """It runs the other end of rsync on this machine, in the other folder."""
    needs.need("rsync")
    path = tmp_path / "bin" / "ssh"
    skip = f'echo noise; while [ "$1" != {HOST.name} ]; do shift; done; shift'
    there = 'eval "$(echo "$*" | sed "s,/here/,/there/,g")"'
    write(path.parent, ssh=f"#!/bin/sh\n{skip}; {there}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    # The names are on ssh's command line.
    monkeypatch.setattr(push, "RSYNC", tuple(each for each in push.RSYNC if each != "-s"))
    return path


def write(folder, **files):
    """`lib__a=...` is the file lib/a."""
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def files_of(folder):
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def checkpoint(folder, *, index=None, **files):
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


def test_a_checkpoint_is_complete_when_all_of_it_is_here(there, bring, ssh):
    weights = "".join(map(chr, random.Random(1).choices(range(32, 127), k=1 << 20)))
    checkpoint(there / "run" / "step_00000001", model=weights)
    checkpoint(there / "run" / "step_00000002", model="theirs")
    checkpoint(Path("run") / "step_00000002", model="mine")
    text = ssh.read_text()
    ssh.write_text(text.rstrip() + " | { dd bs=64k count=12; kill -9 $$; }\n")
    bring(code=1)
    folder = Path("run") / "step_00000001"
    assert not (folder / "COMPLETE").exists()
    ssh.write_text(text)
    bring()
    assert directory.is_verified(folder)
    assert (Path("run") / "step_00000002" / "model").read_text() == "mine"
    assert directory.is_verified(Path("run") / "step_00000002")


def shards(folder, own):
    """A part of a checkpoint with the shards 0 and 1, as the host of one saves it."""
    names = ("shard_00000.pt", "shard_00001.pt")
    facts = {
        name: {"bytes": len(name), "sha256": sha256(name.encode()).hexdigest()} for name in names
    }
    checkpoint(folder, index=json.dumps({"files": facts}), **{names[own]: names[own]})
    return names


def no_folder(path, **options):
    raise PermissionError(13, "Permission denied", str(path))


def test_bad_input_is_one_sentence(there, bring, ssh, monkeypatch, capsys):
    def verb(*arguments):
        return main.main(["pull", "hosts", *arguments])

    with pytest.raises(UserError, match=error("is on no", "/here/none/at/all ")):
        verb("none/at/all")
    assert not Path("none").exists()
    with monkeypatch.context() as here:
        here.setattr(Path, "mkdir", no_folder)
        with pytest.raises(UserError, match=error("Permission denied", "/none: ")):
            verb("none")
    with monkeypatch.context() as here:
        here.setenv("PATH", "")
        with pytest.raises(UserError, match=error("apt-get install rsync", "rsync ")):
            verb("none")
    assert not Path("none").exists()
    ssh.write_text("#!/bin/sh\necho 'u@n1: Permission denied (publickey).' >&2; exit 255\n")
    assert verb("run") == 1
    assert re.match(error("ssh-copy-id n1", "n1: ssh n1: "), capsys.readouterr().err)
    ssh.write_text("#!/bin/sh\necho 'sh: 1: rsync: not found' >&2; exit 127\n")
    assert verb("run") == 1
    assert re.match(error("install rsync", "n1: rsync ", " there"), capsys.readouterr().err)


# --- what a push says and takes along ---


def test_a_push_keeps_what_it_replaces_and_what_is_there_alone(there, ssh, monkeypatch):
    """Only in the environment, here within the folder, it removes what is gone here."""
    run = Path("run").absolute()
    monkeypatch.setattr(push.sys, "prefix", str(run / "env"))
    write(there / "run", a="old", src__mine="1", mine="2", env__lib__old="3")
    write(run, a="12345", src__b="b", env__lib__new="n")
    monkeypatch.setattr(push, "other_hosts", lambda hosts: [HOST])
    monkeypatch.setattr(push, "ask_hosts", lambda hosts, *_, **__: ({HOST: ""}, {}, {}))
    for size, how in ((7, {"dry_run": True}), (7, {}), (0, {})):
        assert push.push([HERE, HOST], [str(run)], **how) == ({HOST: size}, {})
    kept = {".mpiddp-replaced/a": "old", ".mpiddp-replaced/env/lib/old": "3"}
    own = {"mine": "2", "src/mine": "1"}
    sent = {"a": "12345", "src/b": "b", "env/lib/new": "n"}
    assert files_of(there / "run") == {**sent, **own, **kept}


# None of them is an option, a pattern or a comment.
ODD = ["-rf", "#a", ";b", "c d", "*", "e\\nf", "new\nline", os.fsdecode(b"\xff")]


def test_a_folder_of_very_many_files_is_pushed(there, ssh, request):
    """Their names would not fit on a command line, of which the stack's limit is four times as much."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_STACK, (soft, hard)))
    resource.setrlimit(resource.RLIMIT_STACK, (1 << 19, hard))
    names = [*ODD, *(f"{number:05}{'x' * 230}" for number in range(700))]
    run = Path("run").absolute()
    for name in names:
        (run / name).touch()
    (there / "run").mkdir()
    assert push._send(HOST, str(run), names, "/dev/null") == 1
    assert {*names} == {path.name for path in (there / "run").iterdir()}
