"""`mpiddp hosts push`, to hosts whose file systems are apart: what is sent, what is refused, what breaks off.

Tests mpiddp/hosts/cluster/: push.py, fan_out.py, transfer.py, receive.py, stands_on.py, tree.py.
python -m pytest tests/cluster/launch/test_hosts_push.py
"""

from __future__ import annotations

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

from mpiddp.hosts.cluster.tree import PRIVATE
from tests.support import cluster
from tests.support.cluster import USER, Cluster, Layout, links
from tests.support.cluster.host import Host
from tests.support.errors import error
from tests.support.hosts_verb import HOSTS, on_node0
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(4, layout=Layout(apart=True)) as standing:
        for count in (2, 3, 4):
            names = "".join(f"node{number}\n" for number in range(count))
            (standing.shared / f"{count}hosts").write_text(names)
        yield standing


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with a module, an executable, a link, an empty folder, and what no push takes along."""
    made = tmp_path / "a project; $HOME"
    for path in ("src/deep", "empty", "runs", ".git", "src/__pycache__"):
        (made / path).mkdir(parents=True)
    (made / "train.py").write_text("print(1)\n")
    (made / "train.py").chmod(0o755)
    (made / "src" / "deep" / "table.bin").write_bytes(bytes(range(256)) * 1000)
    (made / "src" / "-rf").write_text("a name that begins with a dash\n")
    (made / "src" / "link").symlink_to("deep/table.bin")
    (made / "src" / os.fsdecode(b"n\xe9")).write_text("")
    for left_out in ("runs/log", ".git/HEAD", "src/__pycache__/x.pyc"):
        (made / left_out).write_text("left out")
    return made


def push(hosts: Cluster, *arguments: object, file: str = "2hosts") -> CompletedProcess[str]:
    return on_node0(hosts, "push", *arguments, file=file)


def contents(folder: Path) -> dict[str, tuple[object, ...]]:
    """All in a folder but the private part: mode, and contents or target; the time of files."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        status = path.lstat()
        if name.startswith(PRIVATE):
            continue
        if path.is_symlink():
            found[name] = (os.readlink(path),)  # noqa: PTH115 - bytes as they are
        elif path.is_dir():
            found[name] = (status.st_mode,)
        else:
            found[name] = (status.st_mode, status.st_mtime_ns, path.read_bytes())
    return found


def expected(folder: Path) -> dict[str, tuple[object, ...]]:
    left_out = ("runs", ".git", "src/__pycache__")
    every = contents(folder).items()
    return {name: value for name, value in every if not name.startswith(left_out)}


def refusal(done: CompletedProcess[str]) -> str:
    """The one sentence of a refused push."""
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr.strip()


def test_the_folder_arrives_and_changes(hosts: Cluster, folder: Path) -> None:
    there = [hosts[f"node{number}"].path(folder) for number in (1, 2)]
    done = push(hosts, folder, "--dry-run", file="3hosts")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "node[1-2]: 256.0 kB would be sent\n"
    assert not any(path.exists() for path in there)

    done = push(hosts, folder, file="3hosts")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("node[1-2]: 256.0 kB sent\n")
    assert [contents(path) for path in there] == [expected(folder)] * 2

    done = push(hosts, folder, file="3hosts")
    assert (done.returncode, done.stdout) == (0, "node[1-2]: nothing has changed\n")

    # What a host has of its own stays; what was pushed once goes with its origin.
    for path in there:
        (path / "runs").mkdir()
        (path / "runs" / "log").write_text("the host's own")
        (path / "core.123").write_text("the host's own")
        (path / "src" / "__pycache__").mkdir()
        (path / "src" / "__pycache__" / "x.pyc").write_text("compiled there")
    (folder / "train.py").write_text("print(22)\n")
    (folder / "src" / "-rf").unlink()
    (folder / "src" / "deep" / "new").write_text("new")
    shutil.rmtree(folder / "empty")
    done = push(hosts, folder, file="3hosts")
    assert done.stdout.startswith("node[1-2]: 13 B sent\n")
    for path in there:
        found = contents(path)
        for own in ("runs/log", "core.123", "src/__pycache__/x.pyc"):
            assert found.pop(own)
        del found["runs"], found["src/__pycache__"]
        assert found == expected(folder)
    assert push(hosts, folder, file="3hosts").stdout == "node[1-2]: nothing has changed\n"


def test_names_can_be_included_and_left_out(hosts: Cluster, folder: Path) -> None:
    data = folder.parent / "images"
    data.mkdir()
    (data / "1").write_text("image")
    arguments = ("--include", "runs", "--leave-out", "src", "--with-data", data, folder)
    assert push(hosts, *arguments).returncode == 0
    found = contents(hosts["node1"].path(folder))
    assert set(found) == {"empty", "runs", "runs/log", "train.py"}
    assert list(contents(hosts["node1"].path(data))) == ["1"]


def test_a_push_that_breaks_off_leaves_the_old_folder_and_continues(
    hosts: Cluster, folder: Path
) -> None:
    assert push(hosts, folder).returncode == 0
    before = expected(folder)
    (folder / "src" / "deep" / "small").write_text("small")
    for number in range(40):
        (folder / "src" / "deep" / f"{number:02}.bin").write_bytes(os.urandom(500_000))
    there = hosts["node1"].path(folder)
    arrived = there / PRIVATE / "new" / "src" / "deep"
    command = [*HOSTS, "push", str(hosts.shared / "2hosts"), str(folder)]
    with links.limited(hosts.hosts, mbit=40), hosts["node0"].popen(command, cwd=ROOT) as running:
        deadline = time.monotonic() + PATIENCE_S
        while not (arrived / "10.bin").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
    while [each for each in hosts["node1"].processes() if "python3" in each.command]:
        time.sleep(0.01)
    assert contents(there) == before
    assert (arrived / "09.bin").stat().st_size == 500_000

    done = push(hosts, folder, "--dry-run")
    lacked = float(done.stdout.split()[1])
    assert 10 < lacked < 15.6, done.stdout  # of 20 MB; 10 files or more have arrived
    assert push(hosts, folder).returncode == 0
    assert contents(there) == expected(folder)
    assert sorted(path.name for path in (there / PRIVATE).iterdir()) == ["copy.json"]


def test_ctrl_c(hosts: Cluster, folder: Path) -> None:
    for number in range(20):
        (folder / f"{number:02}.bin").write_bytes(os.urandom(500_000))
    command = [*HOSTS, "push", str(hosts.shared / "4hosts"), str(folder)]
    with links.limited(hosts.hosts, mbit=20), hosts["node0"].popen(command, cwd=ROOT) as running:
        begun = hosts["node3"].path(folder) / PRIVATE / "new" / "01.bin"
        deadline = time.monotonic() + PATIENCE_S
        while not begun.exists():
            assert time.monotonic() < deadline
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        _, stderr = running.communicate(timeout=PATIENCE_S)
    assert (running.returncode, stderr) == (130, "interrupted\n")
    for name in ("node1", "node2", "node3"):
        assert [path.name for path in hosts[name].path(folder).iterdir()] == [PRIVATE]


@pytest.mark.parametrize("blocked", [False, True])
def test_hosts_pass_the_folder_on(blocked: bool, tmp_path: Path) -> None:
    """From four hosts on; where they cannot log in to each other, all comes from the first host."""
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "bin").write_bytes(os.urandom(20_000_000))
    with cluster.up_or_skip(6, layout=Layout(apart=True)) as hosts:
        file = hosts.shared / "hosts"
        file.write_text("".join(f"{host.name}\n" for host in hosts.hosts))
        for host in hosts.hosts[1:] if blocked else ():
            host.path("/root/.ssh/known_hosts").unlink()
        before = links.sent_bytes(hosts["node0"])
        done = hosts["node0"].run([*HOSTS, "push", str(file), str(folder)], cwd=ROOT)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("node[1-5]: 20.0 MB sent\n100.0 MB in ")
        for host in hosts.hosts[1:]:
            assert contents(host.path(folder)) == contents(folder)
        times = (links.sent_bytes(hosts["node0"]) - before) / 20e6
        assert 5 < times < 5.5 if blocked else 1 < times < 3.5


def test_hosts_that_cannot_take_it(hosts: Cluster, folder: Path) -> None:
    """Each is refused with a sentence, and no other host gets anything, unless enough remain."""
    node1 = hosts["node1"]
    there = node1.path(folder)
    there.parent.mkdir(parents=True)
    there.write_text("a file")
    sentence = error("file there", f"node1: {folder} ")
    assert re.fullmatch(sentence, refusal(push(hosts, folder, file="3hosts")))
    assert not hosts["node2"].path(folder).exists()
    done = push(hosts, folder, "--min-hosts", "2", file="3hosts")
    assert done.returncode == 0
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr
    assert done.stdout.startswith("node2: 256.0 kB sent\n")
    too_many = error("--min-hosts", "--min-hosts 9: ", "3 hosts")
    done = push(hosts, folder, "--min-hosts", "9", file="3hosts")
    assert re.fullmatch(too_many, refusal(done))

    there.unlink()
    there.mkdir()
    (there / "other.py").write_text("another project")
    foreign = error("To overwrite", f"node1: {folder} ", "other.py", ": --force")
    assert re.fullmatch(foreign, refusal(push(hosts, folder)))
    (there / "other.py").unlink()
    (there / PRIVATE).mkdir()
    (there / PRIVATE / "copy.json").write_text(json.dumps({"origin": "node7:/x", "names": ["y"]}))
    (there / "y").write_text("")
    foreign = error("To overwrite", f"node1: {folder} ", "node7:/x", ": --force")
    assert re.fullmatch(foreign, refusal(push(hosts, folder)))
    assert push(hosts, folder, "--force").returncode == 0
    assert contents(there) == expected(folder)


def test_a_host_without_space(hosts: Cluster, folder: Path) -> None:
    node1 = hosts["node1"]
    node1.path(folder).mkdir(parents=True)
    node1.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)], check=True)
    sentence = refusal(push(hosts, folder))
    assert re.fullmatch(error("MB there", f"node1: {folder} ", "0.3 MB", "0.2 MB"), sentence)
    assert list(node1.path(folder).iterdir()) == []
    node1.run(["umount", str(folder)], check=True)


def test_a_host_without_python(hosts: Cluster, folder: Path) -> None:
    hosts["node1"].run(["mount", "--bind", "/dev/null", "/usr/bin/python3"], check=True)
    try:
        sentence = refusal(push(hosts, folder))
    finally:
        hosts["node1"].run(["umount", "/usr/bin/python3"], check=True)
    assert re.fullmatch(error("there. Install", "node1: python3 "), sentence), sentence


def claim(host: Host, source: str) -> None:
    """Put these lines in front of all that the host's python3 runs, until it is unmounted."""
    real = host.path("/run/real-python3")
    shutil.copy("/usr/bin/python3", real)
    begin = f"{source}; exec(__import__('sys').argv[1])"
    host.path("/run/python3").write_text(
        f'#!/bin/sh\nfor last; do :; done\nexec /run/real-python3 -I -c "{begin}" "$last"\n'
    )
    host.path("/run/python3").chmod(0o755)
    host.run(["mount", "--bind", "/run/python3", "/usr/bin/python3"], check=True)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            "import os, types; os.uname = lambda: types.SimpleNamespace(machine='aarch64')",
            error("the programs", "node1: ", "aarch64", "x86_64"),
        ),
        (
            "import os; os.confstr = lambda name: 'glibc 2.17'",
            error("its glibc", "node1: ", "2.17", "2.36"),
        ),
        (
            "import sys; sys.version_info = (3, 6)",
            error("python-too-old", "node1: python3 ", "3.6", "3.8"),
        ),
    ],
)
def test_another_machine(hosts: Cluster, folder: Path, source: str, sentence: str) -> None:
    (folder / "native.so").write_text("")
    claim(hosts["node1"], source)
    try:
        assert re.fullmatch(sentence, refusal(push(hosts, folder)))
    finally:
        hosts["node1"].run(["umount", "/usr/bin/python3"], check=True)
    assert not hosts["node1"].path(folder).exists()


def test_links_out_of_an_environment(hosts: Cluster, folder: Path, tmp_path: Path) -> None:
    """As uv and pyenv make them: the interpreter is elsewhere, and a push says so before it sends."""
    python = tmp_path / "versions" / "3.11" / "bin" / "python3.11"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho python\n")
    python.chmod(0o755)
    environment = folder / ".venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(python)
    (environment / "pyvenv.cfg").write_text(f"home = {python.parent}\nexecutable = {python}\n")
    sentence = refusal(push(hosts, folder))
    link = f"{environment}/bin/python "
    assert re.fullmatch(error("there, push", f"node1: {python} ", link, "--with-python"), sentence)
    assert not hosts["node1"].path(folder).exists()
    assert push(hosts, folder, "--with-python").returncode == 0
    done = hosts["node1"].run([environment / "bin" / "python"])
    assert (done.returncode, done.stdout) == (0, "python\n")
    assert push(hosts, folder).stdout == "node1: nothing has changed\n"

    elsewhere = tmp_path / "library"
    elsewhere.mkdir()
    (elsewhere / "module.py").write_text("")
    site = environment / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (site / "borrowed.pth").write_text(f"{elsewhere}\n")
    missing = error("there, push", f"node1: {elsewhere} ", f"{site}/borrowed.pth ")
    assert re.fullmatch(missing, refusal(push(hosts, folder)))
    assert push(hosts, folder, elsewhere).returncode == 0
    (environment / "bin" / "python3").symlink_to("/usr/bin/python3")  # which is there
    assert push(hosts, folder).returncode == 0


def test_an_interpreter_of_the_system(hosts: Cluster, folder: Path) -> None:
    (folder / "python").symlink_to("/usr/bin/python3.11")
    sentence = refusal(push(hosts, folder, "--with-python"))
    values = ("--with-python: ", f"{folder}/python ", "/usr/bin/python3.11")
    assert re.fullmatch(error("which belongs", *values), sentence), sentence


def test_bad_input(hosts: Cluster, folder: Path) -> None:
    for arguments, sentence in (
        ((folder / "none",), error("this host", f"{folder}/none ")),
        ((folder / "train.py",), error("this host", f"{folder}/train.py ")),
        (("/",), error("or holds", "/ ")),
        (("/root",), error("or holds", "/root ")),
        ((folder / "empty",), error("nothing to push", f"{folder}/empty ")),
        (("--min-hosts", "0"), error("--help", "--min-hosts", "'0'")),
        (("--", "-x"), error("this host", f"{ROOT}/-x ")),
    ):
        assert re.fullmatch(sentence, refusal(push(hosts, *arguments))), sentence
    (hosts.shared / "none").write_text("node9\n")
    unresolved = error("be resolved", "node9: node9: ")
    assert re.fullmatch(unresolved, refusal(push(hosts, folder, file="none")))
    (hosts.shared / "alone").write_text("node0\n")
    done = push(hosts, folder, file="alone")
    assert (done.returncode, done.stdout) == (0, "there is no other host\n")


def test_a_folder_that_may_not_be_written(hosts: Cluster, folder: Path) -> None:
    closed = hosts["node0"].path("/run/closed")
    closed.mkdir()
    hosts["node1"].path("/run/closed").mkdir()
    (closed / "project").mkdir()
    (closed / "project" / "x").write_text("x")
    for path in (closed, closed / "project"):
        path.chmod(0o755)
    (hosts.shared / "other_user").write_text(f"{USER}@node1\n")
    authorized = hosts["node1"].path(f"/run/home/{USER}/.ssh/authorized_keys")
    own = hosts["node1"].path("/root/.ssh/authorized_keys").read_text()
    authorized.write_text(authorized.read_text() + own)
    done = push(hosts, "/run/closed/project", file="other_user")
    assert re.fullmatch(error("written there", "node1: /run/closed ", "chown"), refusal(done))


def test_a_push_while_another_runs(hosts: Cluster, folder: Path) -> None:
    assert push(hosts, folder).returncode == 0
    (folder / "large").write_bytes(os.urandom(4_000_000))
    command = [*HOSTS, "push", str(hosts.shared / "2hosts"), str(folder)]
    with links.limited(hosts.hosts, mbit=10), hosts["node0"].popen(command, cwd=ROOT) as first:
        while not (hosts["node1"].path(folder) / PRIVATE / "new" / "large").exists():
            time.sleep(0.01)
        done = push(hosts, folder)
        first.wait(PATIENCE_S)
    assert (done.returncode, done.stdout) == (1, "")
    busy = error("another push", "node1: ", f"{folder} ")
    assert re.fullmatch(f"{busy}\n", done.stderr), done.stderr
    assert first.returncode == 0
    assert contents(hosts["node1"].path(folder)) == expected(folder)
