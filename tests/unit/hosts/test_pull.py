"""What a pull does with what has arrived. rsync brings it from another folder of this machine, without ssh.

Tests mpiddp/hosts/{pull,push}.py. tests/promises/test_hosts.py has real hosts.
python -m pytest tests/unit/hosts/test_pull.py
"""

import json
import os
import resource
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts import main, pull, push
from mpiddp.hosts.hostfile import Host
from tests.support.errors import error
from tests.support.patience import PATIENCE_S

HOST, HERE = Host("n1"), Host("localhost")
Pull = Callable[[], list[str]]


@pytest.fixture
def there(tmp_path, monkeypatch):
    """The run's folder on the other host. That of this one is `run` in the working folder."""
    (tmp_path / "here" / "run").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


@pytest.fixture
def bring(there):
    def bring():
        run = Path("run").absolute()
        arrived = run / ".mpiddp-pull" / HOST.name
        arrived.mkdir(parents=True)
        command = [*push.RSYNC, *pull._options(run), f"{there}/", f"{arrived}/"]
        subprocess.run(command, check=True, timeout=PATIENCE_S)
        text, problems = pull._place(run, HOST)
        arrived.parent.rmdir()
        return [text, *problems]

    return bring


@pytest.fixture
def ssh(tmp_path, monkeypatch):
    """It runs the other end of rsync on this machine, in the other folder."""
    path = tmp_path / "bin" / "ssh"
    skip = f'while [ "$1" != {HOST.name} ]; do shift; done; shift'
    write(path.parent, ssh=f'#!/bin/sh\n{skip}; eval "$(echo "$*" | sed "s,/here/,/there/,g")"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(push, "RSYNC", ("rsync", "-a"))  # the names are on ssh's command line
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


def test_a_pull_brings_what_is_not_here_and_overwrites_nothing(there, bring):
    write(there, log="step 1\nstep 2\n", ranks__rank1="x", same="s", differs="theirs", cut="12")
    write(there, **{"eval.n1000.json": "{}", ".hidden": "?"})
    write(Path("run"), log="step 1\n", same="s", differs="mine!!", cut="12345", own="o")
    assert bring() == ["4 files, 23 B; kept beside what differs here: differs.n1"]
    expected = {
        "log": "step 1\nstep 2\n", "ranks/rank1": "x", "same": "s", "own": "o", "cut": "12345",
        "differs": "mine!!", "differs.n1": "theirs", "eval.n1000.json": "{}",
    }  # fmt: skip
    assert files_of(Path("run")) == dict(sorted(expected.items()))
    assert bring() == ["nothing new"]
    assert files_of(Path("run")) == dict(sorted(expected.items()))


def test_a_file_called_complete_alone_is_no_sign_of_a_checkpoint(there, bring):
    write(there, COMPLETE="", part__COMPLETE="", web__manifest="{}")
    assert bring() == ["3 files, 2 B"]
    assert sorted(files_of(Path("run"))) == ["COMPLETE", "part/COMPLETE", "web/manifest"]


def test_a_complete_checkpoint_comes_whole(there, bring):
    checkpoint(there / "step1", model="weights")
    checkpoint(there / "step2", model="theirs")
    checkpoint(Path("run") / "step2", model="mine")
    (line,) = bring()
    assert line.startswith("6 files, ")
    assert line.endswith("differs here: step2.n1")
    assert (Path("run") / "step1" / "model").read_text() == "weights"
    assert (Path("run") / "step2" / "model").read_text() == "mine"
    assert (Path("run") / "step2.n1" / "model").read_text() == "theirs"
    assert bring() == ["nothing new"]


def no_folder(path, **options):
    raise PermissionError(13, "Permission denied", str(path))


def no_links(path, to):
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("has_links", [True, False])
def test_the_shards_of_two_hosts_become_one_checkpoint(there, bring, monkeypatch, has_links):
    """Also on a file system without hard links. A pull that was killed between two renames is mended."""
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    checkpoint(there / "step1", index="of both", shard1="1", shard2="22")
    checkpoint(Path("run") / "step1", index="of both", shard0="0", shard2="22")
    (Path("run") / "step1").rename(Path("run") / "step1.replaced")
    bring()
    here = Path("run") / "step1"
    manifest = (here / "manifest.json").read_text()
    assert sorted(json.loads(manifest)) == ["shard0", "shard1", "shard2", "shards.json"]
    assert (here / "COMPLETE").read_text() == sha256(manifest.encode()).hexdigest()
    assert [(here / f"shard{each}").read_text() for each in range(3)] == ["0", "1", "22"]
    assert sorted(path.name for path in Path("run").iterdir()) == ["step1"]
    assert bring() == ["nothing new"]


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("model", "damaged", "model does not match its SHA-256"),
        ("COMPLETE", "0" * 64, "manifest.json does not match its SHA-256"),
        ("model", None, "model is missing"),
    ],
)
def test_a_damaged_checkpoint_is_not_taken(there, bring, file, text, problem):
    checkpoint(there / "step1", model="weights")
    (there / "step1" / file).unlink()
    if text is not None:
        (there / "step1" / file).write_text(text)
    assert bring() == ["nothing new", f"step1 is no complete checkpoint there: {problem}."]
    assert not (Path("run") / "step1").exists()


def test_bad_input_is_one_sentence(there, monkeypatch):
    Path("hosts").write_text("localhost\n", encoding="utf-8")

    def verb(*arguments):
        return main.main(["pull", "hosts", *arguments])

    with pytest.raises(UserError, match=error("is on no", "/here/none ")):
        verb("none")
    Path("hosts").write_text("localhost\nn1.invalid\n", encoding="utf-8")
    with monkeypatch.context() as here:
        here.setattr(Path, "mkdir", no_folder)
        with pytest.raises(UserError, match=error("Permission denied", "/n1.invalid: ")):
            verb("none")
        here.setenv("PATH", "")
        with pytest.raises(UserError, match=error("apt-get install rsync", "rsync ")):
            verb("none")
    Path("hosts").write_text("localhost\n", encoding="utf-8")
    checkpoint(Path("run") / "step1", model="weights")
    above = f": {Path.cwd()}/run."
    with pytest.raises(UserError, match=error("checkpoint. Pull", "/run/step1 ", above)):
        verb("run/step1")


def test_what_a_host_answers_to_a_pull(there, ssh):
    run = Path("run").absolute()
    assert pull._fetch(HOST, run) is None
    write(there / "run", a="1")
    assert pull._fetch(HOST, run) == []
    assert files_of(run) == {f".mpiddp-pull/{HOST.name}/a": "1"}
    ssh.write_text("#!/bin/sh\necho 'n1: Permission denied (publickey).' >&2; exit 255\n")
    assert "ssh-copy-id" in pull._fetch(HOST, run)


# --- what a push says and takes along; its archive for a host without rsync, here for this machine ---


def test_what_a_push_says():
    sent = {Host("n0"): 0, Host("n1"): 12, Host("n2"): 12}
    pushed = push.Pushed(sent, {}, [], 1.25, 0)
    said = ["n0: nothing has changed", "n[1-2]: 12 B sent in 1.2 s"]
    assert push.summary(pushed, dry_run=False) == said
    assert push.summary(pushed, dry_run=True)[1] == "n[1-2]: 12 B would be sent"
    nobody = push.Pushed({}, {}, [], 0.0, 0)
    assert push.summary(nobody, dry_run=False) == ["there is no other host"]


def test_a_push_keeps_what_it_replaces(there, ssh):
    write(there / "run", a="old", src__gone="1", mine="2")
    run = Path("run").absolute()
    write(run, a="12345", src__b="b")
    for size, how in ((6, {"dry_run": True}), (6, {}), (0, {})):
        pushed = push.push([HERE, HOST], [str(run)], **how)
        assert (pushed.sent, pushed.failures, pushed.exit_code) == ({HOST: size}, {}, 0)
    replaced = {
        f".mpiddp-replaced/{name}": text for name, text in (("a", "old"), ("src/gone", "1"))
    }
    assert files_of(there / "run") == {"a": "12345", "src/b": "b", "mine": "2", **replaced}


def test_an_archive_replaces_what_is_pushed_alone(tmp_path):
    write(tmp_path, a="12345", src__b="b", runs__log="mine", rest="mine")
    write(tmp_path, **{"src/h.history.jsonl": "x"})
    names = push._names(str(tmp_path), (*push.LEFT_OUT, "rest"))
    assert names == ["a", "src"]
    size = push._tar(HERE, str(tmp_path), names, dry_run=True)
    assert size >= 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "rest", "runs", "src"]
    assert push._tar(HERE, str(tmp_path), names, dry_run=False) == size
    assert files_of(tmp_path / "src") == {"b": "b"}
    assert files_of(tmp_path / ".mpiddp-replaced").keys() == {"a", "src/b", "src/h.history.jsonl"}
    incomplete = error("(tar's exit code 2)", f"not all of {tmp_path} ")
    with pytest.raises(JobFailed, match=incomplete):
        push._tar(HERE, str(tmp_path), [*names, "gone"], dry_run=False)


def test_an_archive_that_cannot_be_unpacked_is_no_success(tmp_path, monkeypatch):
    """The tar there fails before it writes. Its reason is said, in its own words."""
    write(tmp_path / "run", a="12345")
    write(
        tmp_path / "bin",
        tar='#!/bin/sh\n[ "$1" = -c ] && exec /bin/tar "$@"\n'
        "echo 'tar: no space' >&2; echo 'tar: exiting' >&2; exit 2\n",
    )
    (tmp_path / "bin" / "tar").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(JobFailed, match=error("(tar's exit code 2)", "no space ")):
        push._tar(HERE, str(tmp_path / "run"), ["a"], dry_run=False)
    assert (tmp_path / "run" / "a").read_text() == "12345"


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
    assert push._rsync(HOST, str(run), names, dry_run=False) == 1
    assert {*names} == {path.name for path in (there / "run").iterdir()}


def test_an_archive_has_files_of_any_name(tmp_path):
    for name in ODD:
        (tmp_path / name).touch()
    assert push._tar(HERE, str(tmp_path), ODD, dry_run=False) == 1
    assert {*ODD} == {path.name for path in (tmp_path / ".mpiddp-replaced").iterdir()}
    assert {*ODD, ".mpiddp-replaced"} == {path.name for path in tmp_path.iterdir()}


def test_a_push_without_rsync_here_sends_archives(there, monkeypatch, capsys):
    """It says so, and what it leaves out of a folder that was named."""
    run = Path("run").absolute()
    write(run, a="12345", data__train="6")
    Path("hosts").write_text("localhost\nn1.invalid\n", encoding="utf-8")
    monkeypatch.setattr(push, "ask_hosts", lambda hosts, *_, **__: ({hosts[0]: [True, ""]}, {}, {}))
    monkeypatch.setattr(push.shutil, "which", lambda name: None)
    monkeypatch.setattr(push, "_tar", lambda host, folder, names, dry_run: len(names))
    assert main.main(["push", "hosts", str(run)]) == 0
    out, err = capsys.readouterr()
    said = err.splitlines()
    assert out.startswith("n1.invalid: 1 B sent")
    assert said[0] == f"{run}/data is left out. To push it: mpiddp hosts push FILE {run}/data"
    assert said[1].startswith("this machine has no rsync: all was sent. ")
