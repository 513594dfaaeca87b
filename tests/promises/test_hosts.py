"""Hosts: ssh keys, commands and files on all machines of a hostfile.

The hosts share no file, but in the last two tests: node0 has this repository, the others the system alone.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import venv
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from mpiddp.checkpoints import folders
from mpiddp.hosts.names import expand_nodelist
from mpiddp.text import FIX
from tests.support import cluster as test_cluster
from tests.support.cluster import Cluster, Layout, faults, links
from tests.support.doctor_faults import shelled
from tests.support.machine import executable
from tests.support.place import Hosts, Job, eventually
from tests.support.ranks import ROOT, find_mpirun
from tests.support.terminal import in_a_terminal

PASSWORD = "a password"
# Names that mean something to a shell or to rsync, or that no encoding has.
ODD = ("-rf", "#a", ";b", "*", "e\\nf", "new\nline", "\udcff")
ALL = [f"node{number}" for number in range(3)]
# `mpiddp hosts`, which shows all lines at the end.
TOGETHER = """
import sys
from mpiddp.cli import main
from mpiddp.hosts import ssh
ssh._TOGETHER_S = 600.0
sys.exit(main(["hosts", *sys.argv[1:]]))
"""
# Its stdin and stdout become those of a terminal, from which ssh reads a password.
TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with test_cluster.up_or_skip(3, layout=Layout(apart=True)) as up:
        yield up


@pytest.fixture
def file(hosts: Hosts) -> str:
    """The hostfile of all three."""
    return hosts.where(3)[1]


@pytest.fixture
def project(hosts: Hosts) -> Path:
    """The folder of a project on node0, whose name means something to a shell."""
    folder = hosts.folder / "a project; $HOME"
    files = {"train.py": "print(1)\n", "src/deep/table.bin": "0123" * 9999}
    files |= {f"src/{name}": "odd\n" for name in ODD}
    write(folder, {**files, "runs/log": "mine", ".git/HEAD": "mine", "src/old.py": "old\n"})
    (folder / "train.py").chmod(0o755)
    (folder / "src/link").symlink_to("deep/table.bin")
    return folder


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and bytes of every file but those of mpiddp and rsync, and those that no push takes along."""
    private = re.compile(r"(^|/)\.(mpiddp|~tmp~)|^(runs|\.git)/|/__pycache__/")
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: (path.lstat().st_mode, path.read_bytes())
        for name, path in paths.items()
        if not private.search(name)
    }


def by_host(text: str) -> dict[str, list[str]]:
    """The lines that each host has printed. How many hosts share a line depends on their speed."""
    lines = defaultdict(list)
    for line in text.splitlines():
        hosts, _, printed = line.partition(": ")
        for host in expand_nodelist(hosts):
            lines[host].append(printed)
    return dict(lines)


def checkpoint(run: Path, step: int, files: dict[str, str]) -> Path:
    folder = run / f"checkpoints/step_{step:08d}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = folders.NewFolder(folder)
    new.path.mkdir()
    write(new.path, files)
    new.seal({})
    new.publish()
    return folder


@pytest.fixture
def strangers(hosts: Hosts) -> Iterator[Hosts]:
    """node0 has no key and knows no host. The others accept the password of root."""
    settings = "PermitRootLogin yes\nPasswordAuthentication yes\n"
    away = shelled(hosts["node0"], "mv ~/.ssh ~/.away", "rm -r ~/.ssh; mv ~/.away ~/.ssh")
    with away, ExitStack() as stack:
        for name in ("node1", "node2"):
            password = f"root:{PASSWORD}\n"
            hosts[name].run(["chpasswd", "-c", "SHA512"], stdin=password, check=True)
            stack.enter_context(faults.sshd_with(hosts[name], settings))
        yield hosts


def test_keys(strangers, file):
    """`mpiddp hosts keys` asks before it makes a key, and for each host. Then, ssh reaches them all."""
    node0 = strangers["node0"]
    assert strangers.run("hosts", "run", file, "--", "true").code == 1
    keys = [sys.executable, "-m", "mpiddp", "hosts", "keys", file]
    command = node0.enter([sys.executable, "-c", TERMINAL, *keys], cwd=ROOT)
    refused = strangers.run("hosts", "keys", file).assert_code(2)  # nobody can say yes
    assert "there is no ssh key." in refused.stderr
    with in_a_terminal("/usr/bin/env", *command, cwd=ROOT) as job:
        job.until(r"without a passphrase\? \[y/N\] ").types("y\n")
        for name in ("node1", "node2"):
            job.until(rf"authenticity of host '{name} [^?]*\(yes/no").types("yes\n")
            job.until(f"root@{name}'s password: ").types(f"{PASSWORD}\n")
        assert job.wait() == 0, job.shown
    after = strangers.run("hosts", "run", file, "--", "echo", "here").assert_ok()
    assert by_host(after.stdout) == {host: ["here"] for host in ALL}
    key = node0.path("/root/.ssh/id_ed25519").stat()
    assert key.st_mode & 0o077 == 0
    strangers.run("hosts", "keys", file).assert_ok()  # there is nothing to ask
    authorized = strangers["node1"].path("/root/.ssh/authorized_keys").read_text()
    assert authorized.count(node0.path("/root/.ssh/id_ed25519.pub").read_text().split()[1]) == 1


def test_check(hosts, file):
    """`mpiddp hosts check` reads a hostfile, in Open MPI's and in MPICH's syntax."""
    other = hosts.folder / "other"
    other.write_text("node0:1\nnode1:1 # MPICH's syntax\nnode2:1\n")
    for path in (file, other):
        done = hosts.run("hosts", "check", path).assert_ok()
        table = [line.split()[:2] for line in done.lines[1:4]]
        assert table == [[f"node{number}", "1"] for number in range(3)]


def test_run_prints_equal_outputs_once(hosts, file):
    """`mpiddp hosts run` runs a command on every host, and prints equal outputs once."""
    done = hosts.run(
        "python", "-c", TOGETHER, "run", file, "--", "sh", "-c", "echo same; uname -n; echo why >&2"
    )
    assert done.lines[0::2] == [f"node{n}: same" for n in range(3)]
    assert done.lines[1::2] == [f"node{n}: node{n}" for n in range(3)]
    assert (done.code, done.stderr) == (0, "node[0-2]: why\n")
    done = hosts.run("hosts", "run", file, "--", "printf", "%s\n", "$HOME; *", "--", "\033[31mred")
    assert by_host(done.stdout) == {host: ["$HOME; *", "--", "\\x1b[31mred"] for host in ALL}


def test_run_names_the_hosts_that_fail(hosts, file):
    """`mpiddp hosts run` names the hosts on which the command fails, and those that ssh cannot reach."""
    code = "test $(uname -n) = node1 && exit 0; exit 7"
    done = hosts.run("hosts", "run", file, "--", "sh", "-c", code)
    assert (done.code, done.stdout, done.stderr) == (1, "", "mpiddp: node[0,2]: exit code 7\n")
    with faults.no_sshd(hosts["node2"]):
        done = hosts.run("hosts", "run", file, "--", "echo", "here")
    assert (done.code, by_host(done.stdout)) == (1, {host: ["here"] for host in ALL[:2]})
    assert "node2: ssh node2: connection refused" in done.stderr
    done = hosts.run("hosts", "run", file, "--", "uname -n | tail -1")
    first, *_ = done.stderr.splitlines()
    missing = "node[0-2]: uname -n | tail -1: No such file or directory"
    assert first == f"{missing}. For what a shell reads: sh -c 'uname -n | tail -1'"


def test_run_shows_lines_as_they_come(hosts, file):
    """`mpiddp hosts run` shows each line as it comes, however many there are, in little memory."""
    code = "echo begun; echo why >&2; test $(uname -n) = node1 && exec yes {}; sleep 600"
    job = hosts.start("hosts", "run", file, "--", "sh", "-c", code.format("y" * 9999))
    job.until(": begun\n").until(": why\n")
    eventually(lambda: job.out.stat().st_size > 20_000_000)
    used = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{job.pid}/status").read_text("utf-8"))
    job.signal(signal.SIGINT)
    assert job.wait().code == 130
    assert int(used[1]) < 64_000
    eventually(lambda: not hosts.processes("yyyy"))


# A shell, its child, and a child that SIGTERM does not end.
SLEEP = "echo begun; (trap '' TERM; exec sleep 1000) & sleep 1000; wait"


@pytest.mark.parametrize("stream", [1, 2])
def test_run_ends_no_command_for_what_it_prints(hosts, stream):
    """A command may print any amount on stdout and on stderr. `mpiddp hosts run` ends it for neither."""
    lines = (
        f"head -c 40000000 /dev/zero | tr '\\0' x | fold -w 9999 >&{stream}; echo; echo finished"
    )
    done = hosts.run("hosts", "run", "-H", "node0,node1", "--", "sh", "-c", lines).assert_ok()
    hosts_done = re.findall(r"^(\S+): finished$", done.stdout, re.M)
    assert hosts_done in (["node[0-1]"], ["node0", "node1"], ["node1", "node0"])


def test_run_says_once_why_a_host_does_not_answer(hosts):
    """A host that is off, or whose Python does not start, is named in one line, with the reason."""
    node1, folder = hosts["node1"], Path("/usr/local/bin")
    with faults.mounted(node1, folder):  # the hosts of other tests have it, too
        executable(
            node1.path(folder) / "python3", "echo python3: cannot load libz.so.1 >&2; exit 127"
        )
        done = hosts.run("hosts", "run", "-H", "node1,10.77.0.99", "--", "true").assert_code(1)
    off, broken = sorted(done.said)
    assert off.startswith("10.77.0.99: ssh 10.77.0.99: no route (")
    assert broken == "node1: python3 does not run there: python3: cannot load libz.so.1."


@pytest.mark.parametrize("end", ["Ctrl-C", "--timeout"])
def test_run_leaves_nothing(hosts, file, end):
    """Ctrl-C and --timeout end all that `mpiddp hosts run` has started, and show what it has printed."""
    options = ("--timeout", "5s", "--login-timeout", "1h") if end == "--timeout" else ()
    job = hosts.start("hosts", "run", *options, file, "--", "sh", "-c", SLEEP)
    if end == "Ctrl-C":
        job.until(": begun\n")
        eventually(lambda: len(hosts.processes("sleep 1000")) >= 6)
        job.signal(signal.SIGINT)
    done = job.wait()
    assert done.code == (130 if end == "Ctrl-C" else 1)
    assert ": begun\n" in done.stdout
    assert ": no end yet; stopped\n" in done.stderr
    eventually(lambda: not hosts.processes("sleep 1000"))


def test_push_makes_a_folder_the_same(hosts, file, project):
    """`mpiddp hosts push` sends a folder to every host, and keeps what only a host has."""
    there = [hosts[name].path(project) for name in ("node1", "node2")]
    hosts.run("hosts", "push", file, project).assert_ok()
    assert [contents(path) for path in there] == [contents(project)] * 2
    assert (there[0] / "src/link").is_symlink()
    assert not (there[0] / "runs").exists()

    theirs = {"runs/log": "theirs", "out/step_2/shard_1.pt": "theirs", "src/own.py": "theirs"}
    for path in there:
        write(path, {**theirs, "src/__pycache__/x.pyc": "theirs"})
    (project / "train.py").write_text("print(2)\n")
    write(project, {"src/deep/new": "new"})
    sent = links.sent_bytes(hosts["node0"])
    done = hosts.run("hosts", "push", file, project).assert_ok()
    assert re.fullmatch(
        rf"pushing {re.escape(str(project))} \(\d+ files, [\d.]+ .?B\)", done.said[0]
    )
    assert links.sent_bytes(hosts["node0"]) - sent < 10_000_000
    for path in there:
        kept = {name: text for name, text in theirs.items() if (path / name).read_text() == text}
        assert kept == theirs
        assert contents(project).items() <= contents(path).items()
        assert (path / "src/__pycache__/x.pyc").exists()


def test_push_removes_what_it_has_sent(hosts, file, project):
    """A push removes what an earlier push has sent and is gone here, under any name, and nothing else."""
    new = ["pkg/a.py", "pkg/sub/b.py", "whole/c.py", "left/d.py", "src/gone/e.py", "src/new\\[x]"]
    gone = ["src/old.py", *(f"src/{name}" for name in ODD), *new]
    write(project, {**dict.fromkeys(new, "new"), "src/newx": "x"})
    hosts.run("hosts", "push", file, project).assert_ok()
    there = [hosts[name].path(project) for name in ("node1", "node2")]
    theirs = dict.fromkeys(("src/own.py", "pkg/sub/theirs.pt", "srcs"), "theirs")
    caches = [f"{folder}/__pycache__/e.pyc" for folder in ("src", "src/gone", "whole")]
    for path in there:
        write(path, {**theirs, **dict.fromkeys(caches, "theirs")})
    sent = {name: contents(project).get(name) for name in gone}
    for name in (*gone, "src/link"):
        (project / name).unlink()
    for folder in ("src/gone", "pkg/sub", "pkg", "whole"):
        (project / folder).rmdir()
    (project / "whole").write_text("now a file\n")
    hosts.run("hosts", "push", "--leave-out", "left", file, project).assert_ok()
    assert all((path / "left/d.py").exists() for path in there)
    hosts.run("hosts", "push", file, project).assert_ok()
    for path in there:
        assert not (path / "src/gone").exists()
        assert (path / "src/__pycache__/e.pyc").exists()
        kept = contents(path)
        assert {name: kept.pop(name)[1].decode() for name in theirs} == theirs
        assert kept == contents(project)
        pushes = [contents(push) for push in sorted((path / ".mpiddp-replaced").iterdir())]
        replaced = {name: fact for push in pushes for name, fact in push.items()}
        assert {name: replaced.get(name) for name in gone} == sent
    done = hosts.run("hosts", "push", file, project).assert_ok()
    assert done.stdout == "node[1-2]: nothing has changed\n"


def test_push_and_pull_need_rsync(hosts, file, project):
    """A push and a pull name a host without rsync, with the command that installs it, and send nothing."""
    node1, rsync = hosts["node1"], shutil.which("rsync")
    with faults.mounted(node1, rsync, what="/dev/null"):
        for verb in ("push", "pull"):
            done = hosts.run("hosts", verb, file, project)
            assert done.code != 0
            said = done.stdout + done.stderr
            assert (
                "node1: rsync is not installed there.\n  fix: sudo apt-get install rsync\n" in said
            )
    assert not node1.path(project).exists()


@pytest.mark.parametrize("does", ["read -p 'Which module? ' module", "OTHER=1 exec bash -l"])
def test_a_start_up_file(hosts, file, project, does):
    """A start-up file that prints, asks a question or starts another shell disturbs no push and no pull."""
    run = hosts["node1"].path(hosts.folder / "run")
    write(run, {"log": "1"})
    text = f"echo Welcome; echo warning >&2; printf 'to node1'\n[ \"$OTHER\" ] || {does}\n"
    with faults.begins_with(hosts["node1"], "/root/.bashrc", text):
        hosts.run("hosts", "push", file, project).assert_ok()
        assert contents(hosts["node1"].path(project)) == contents(project)
        hosts.run("hosts", "pull", file, hosts.folder / "run").assert_ok()
    assert (hosts.folder / "run/log").read_text() == "1"


def break_off(hosts: Hosts, job: Job) -> None:
    """Kill a push or a pull, with all that it has started on node0."""
    job.signal(signal.SIGKILL)
    for process in hosts.processes("rsync") + hosts.processes("ssh"):
        if process.host == "node0":
            hosts.kill(process)


def test_push_that_breaks_off(hosts, file, project):
    """A push that is killed leaves the old files on the hosts. The next push sends only what is missing."""
    hosts.run("hosts", "push", file, project).assert_ok()
    there = hosts["node1"].path(project)
    before = contents(there)
    for number in range(40):
        (project / "src/deep" / f"{number:02}.bin").write_bytes(os.urandom(500_000))
    node0 = hosts["node0"]
    with links.limited(hosts.cluster.hosts, mbit=20):
        began = links.sent_bytes(node0)
        job = hosts.start("hosts", "push", file, project)
        eventually(lambda: links.sent_bytes(node0) - began > 14_000_000)  # of 20 MB for each
        break_off(hosts, job)
    eventually(lambda: not hosts.processes("rsync") and not hosts.processes("python3"))
    assert contents(there) == before
    began = links.sent_bytes(node0)
    hosts.run("hosts", "push", file, project).assert_ok()
    assert links.sent_bytes(node0) - began < 33_000_000
    assert contents(there) == contents(project)


# mpiddp in an environment whose folder, and that of its interpreter, are the first two arguments.
IN_ENVIRONMENT = """
import sys
sys.prefix, sys.base_prefix = sys.argv[1:3]
from mpiddp.cli import main
sys.exit(main(sys.argv[3:]))
"""


def test_push_leaves_other_environments_alone(hosts, file, project):
    """A push touches no other environment, in conda's base or beside the interpreter of this one."""
    base = project / "miniconda3"
    write(base, {"conda-meta/history": "x", "lib/a.so": "new", "envs/own/lib/b.so": "new"})
    write(base, {"envs/other/lib/c.so": "x", "pkgs/torch.tar": "x"})
    there = hosts["node1"].path(base)
    write(there, {"lib/gone.so": "x", "envs/llama/lib/torch.so": "theirs"})
    push, home = (sys.executable, "-c", IN_ENVIRONMENT), {"HOME": str(project)}
    # Of this checkout, the default folders, its package is enough.
    others = (f"--leave-out={name}" for name in (".venv", ".mpi", ".frameworks", "build"))
    verb = ("hosts", "push", *others, file)
    refused = hosts.run(*push, base, base, *verb, cwd=project, env=home).assert_code(2)
    assert f"{base} holds other environments (envs, pkgs)." in refused.stderr
    (project / "train").mkdir()
    (project / "train/a.py").touch()
    own = base / "envs/own"  # of pyenv, or a virtual environment above conda's Python
    hosts.run(*push, own, base, *verb, cwd=project / "train", env=home).assert_ok()
    sent = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    kept = {"conda-meta/history", "lib/a.so", "envs/own/lib/b.so", "envs/llama/lib/torch.so"}
    assert {path for path in sent if ".mpiddp" not in path} == kept


def test_a_host_that_is_off_is_no_bad_input(hosts, project):
    """If a host is off, each command of `mpiddp hosts` ends with 1, as for every failure of a machine."""
    where = ("-H", "node0,10.77.0.99")
    for verb in (("push", *where, project), ("pull", *where, "runs/x"), ("keys", *where)):
        assert "no route (" in hosts.run("hosts", *verb).assert_code(1).stderr


def test_push_names_the_host_that_cannot_take_it(hosts, file, project):
    """A host that cannot take a push is named in one line. With --min-hosts, the push goes on without it."""
    there = hosts["node1"].path(project)
    name = "a folder whose name is as long/as those of paths often are/file"
    write(project, {name: "0123" * 99999})
    there.mkdir(parents=True)
    no_space = f'/{name}": No space left on device'
    for option, why in (("size=64k", no_space), ("ro", ": Read-only file system")):
        with faults.mounted(hosts["node1"], project, "-o", option):
            done = hosts.run("hosts", "push", file, project)
        assert done.code == 1
        assert why in done.stderr, done.stderr
    there.rmdir()
    write(there.parent, {there.name: "a file"})
    done = hosts.run("hosts", "push", file, project)
    assert done.code == 2
    assert re.search(r"^mpiddp: node1: .*", done.stderr, re.MULTILINE), done.stderr
    done = hosts.run("hosts", "push", "--min-hosts", "2", file, project)
    assert done.code == 0, done.stderr
    assert contents(hosts["node2"].path(project)) == contents(project)


def test_a_launch_names_another_python(hosts, file):
    """A launch names the hosts on which the environment's Python is another, or has no interpreter."""
    env, base = hosts.folder / "env", hosts.folder / "base"
    venv.create(env)
    base.symlink_to(Path(sys.executable).resolve())  # on node2 it is missing
    for name in ("python", "python3"):
        (env / "bin" / name).unlink(missing_ok=True)
        (env / "bin" / name).symlink_to(base)
    other = "exec python3 -c \"import sys; sys.version = '3.99.1 (main)'; $2\""
    executable(hosts["node1"].path(base), other)
    mpiddp = (env / "bin/python", "-m", "mpiddp")
    left = hosts["node1"].path(env)
    write(left, {"lib/gone/__pycache__/a.pyc": "theirs", "bin/__pycache__/a.pyc": "theirs"})
    hosts.run(*mpiddp, "hosts", "push", file, env, cwd=ROOT).assert_ok()
    assert not (left / "lib/gone").exists()
    assert (left / "bin/__pycache__/a.pyc").exists()
    launch = ("launch", "--hostfile", file, "--mpirun", find_mpirun(), "--", "true")
    done = hosts.run(*mpiddp, *launch, cwd=ROOT)
    here = "{}.{}".format(*sys.version_info[:2])
    assert f"node1: {env}/bin/python is Python 3.99 there, {here} here." in done.stderr
    assert f"node2: {env}/bin/python is missing.\n{FIX}mpiddp hosts push" in done.stderr


@pytest.mark.slow  # two gigabytes: torch, its interpreter and Open MPI
def test_from_bare_hosts_to_a_training(hosts):
    """The commands of get-started make two bare hosts ready. `launch --push` sends each later change."""
    project = hosts.folder / "project"
    write(project, {"train.py": "import os\nprint('first', os.environ['RANK'])\n"})
    file = project / "hosts.txt"
    file.write_text("node0 slots=1\nnode1 slots=1\n")
    train = ["-m", "mpiddp", "train", "--use-syn", "--arch=resnet20", "--batch-size=4"]
    train += ["--epochs=1", "--steps-per-epoch=2", "--save-every=1", "--out=runs/x"]
    done = hosts.run("launch", "--hostfile", file, *train, cwd=project)
    assert done.code == 2
    assert "mpiddp hosts push" in done.stderr

    if not hosts["node1"].path(Path(sys.executable).resolve()).exists():
        hosts.run("hosts", "push", file, sys.base_prefix).assert_ok()
    page = (ROOT / "docs/get-started.md").read_text().partition("## Prepare two machines")[2]
    commands = re.findall(r"^mpiddp ((?:hosts|doctor) .*)$", page.partition("\n## ")[0], re.M)
    commands.append("launch --hostfile hosts.txt train.py")
    assert len(commands) == 4
    left_out = ["--leave-out=.frameworks", "--leave-out=.mpi"]  # the tests' own, of 1 GB
    for verb, *rest in map(shlex.split, commands):
        if rest[0] == "push":
            rest[1:1] = left_out
        hosts.run(verb, *rest, cwd=project).assert_ok()
    hosts.run("launch", "--hostfile", file, *train, cwd=project).assert_ok()
    for name in ("node0", "node1"):
        assert (hosts[name].path(project) / "runs/x/checkpoints/step_00000002/COMPLETE").exists()

    write(project, {"train.py": "import os\nprint('second', os.environ['RANK'])\n"})
    launch = ("launch", "--hostfile", file, "--push", "--log-ranks", "all")
    done = hosts.run(*launch, "train.py", cwd=project).assert_ok()
    assert "second 1" in done.stdout
    assert (hosts["node1"].path(project) / "runs/x").is_dir()


def test_pull_brings_a_run_home(hosts, file):
    """`mpiddp hosts pull` brings home the logs and checkpoints that only other hosts have."""
    run = hosts.folder / "a run; $HOME"
    write(run, {"logs/rank_00000.log": "rank 0\n"})
    for number in (1, 2):
        write(hosts[f"node{number}"].path(run), {f"logs/rank_{number:05d}.log": f"rank {number}\n"})
    checkpoint(hosts["node2"].path(run), 4, {"model.pt": "weights"})
    hosts.run("hosts", "pull", file, run).assert_ok()
    logs = sorted(path.name for path in (run / "logs").iterdir())
    assert logs == [f"rank_{number:05d}.log" for number in range(3)]
    folders.verify(run / "checkpoints/step_00000004")


def test_pull_overwrites_nothing(hosts, file):
    """A pull continues files that have grown, such as logs. It overwrites no other file, and names it."""
    run = hosts.folder / "run"
    write(run, {"metrics.jsonl": "{}\n", "grown": "line 1\n", "own": "mine\n"})
    there = hosts["node1"].path(run)
    write(
        there,
        {"metrics.jsonl": "{}\n", "grown": "line 1\nline 2\n", "new": "new", "own": "theirs\n"},
    )
    for came in ("1 file, 3 B, 1 file went on", "nothing new"):
        done = hosts.run("hosts", "pull", file, run).assert_ok()
        assert done.lines[0] == f"node1: {came}; not taken, because it differs here: own"
        texts = [(run / name).read_text() for name in ("grown", "own")]
        assert texts == ["line 1\nline 2\n", "mine\n"]


def test_pull_that_breaks_off(hosts, file):
    """A pull that is killed leaves no checkpoint that seems complete. The next pull completes it."""
    run, node1 = hosts.folder / "run", hosts["node1"]
    checkpoint(node1.path(run), 4, {"model.pt": os.urandom(20_000_000).hex()})
    with links.limited(hosts.cluster.hosts, mbit=20):
        began = links.sent_bytes(node1)
        job = hosts.start("hosts", "pull", file, run)
        eventually(lambda: links.sent_bytes(node1) - began > 3_000_000)
        break_off(hosts, job)
    eventually(lambda: not hosts.processes("rsync"))
    folder = run / "checkpoints/step_00000004"
    assert not (folder / "COMPLETE").exists()
    hosts.run("hosts", "pull", file, run).assert_ok()
    folders.verify(folder)


def test_pull_joins_shards(hosts, file):
    """A pull joins the shards of all hosts' disks into one verified checkpoint."""
    run = hosts.folder / "run"
    names = [f"shard_{rank:05d}.pt" for rank in range(3)]
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    facts = {name: {"bytes": len(name), "sha256": digests[name]} for name in names}
    index = json.dumps({"files": facts})
    for number, name in enumerate(names):
        own = {"shards.json": index, "state.json": "{}", name: name}
        checkpoint(run if number == 0 else hosts[f"node{number}"].path(run), 2, own)
    folder = run / "checkpoints/step_00000002"
    assert folders.list_files(folder).lacking == names[1:]
    hosts.run("hosts", "pull", file, run).assert_ok()
    folders.verify(folder)
    assert folders.list_files(folder).lacking == []
