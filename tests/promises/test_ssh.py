"""Any ssh, any network: settings of users, logins that fail, IPv6, sets of names."""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import NamedTuple

import pytest

from mpiddp.checkpoints import folders
from mpiddp.errors import MORE_PROCESSES
from mpiddp.text import FIX
from tests.support.cluster import Cluster, faults
from tests.support.cluster.faults import begins_with, sshd_with
from tests.support.cluster.host import TMPDIR, USER
from tests.support.cluster.needs import need, tool
from tests.support.doctor_faults import shelled
from tests.support.machine import executable, python_that_needs
from tests.support.place import Hosts, eventually, every_mpi, program

CONFIG, BASHRC, KEY = "/root/.ssh/config", "/root/.bashrc", "/root/.ssh/id_ed25519"
SIX = "fd77::{}"


ALIAS = "Host gpu2\n  HostName 10.77.0.2\n"
SETTINGS = {
    "alias": "",
    "command": "  RemoteCommand tmux\n  RequestTTY force\n",
    "forward": "  LocalForward 22 localhost:22\n  ExitOnForwardFailure yes\n",
    "master": "  ControlMaster auto\n  ControlPath ~/.ssh/master\n",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_settings_of_a_user(hosts, setting):
    """A job takes a user's ssh settings, as aliases, but no command, forward or master."""
    script = hosts.script("import os; print(os.uname().nodename, os.listdir('/root/.ssh'))")
    with begins_with(hosts["node0"], CONFIG, ALIAS + SETTINGS[setting]):
        done = hosts.run("launch", "--log-ranks=all", "-H", "node0:1,gpu2:1", script).assert_ok()
        assert {line.partition(" ")[0] for line in done.lines} == {"node0", "node1"}
        assert "master" not in done.stdout
        done = hosts.run("hosts", "run", "-H", "gpu2", "--", "hostname").assert_ok()
        assert done.stdout == "gpu2: node1\n"


# --- login shells, and their start-up files ---


@pytest.mark.parametrize(
    ("mpi", "shell"),
    [("openmpi5", "fish"), ("openmpi4", "tcsh"), ("intelmpi", "fish"), ("mpich", "tcsh")],
    indirect=["mpi"],
)
def test_a_login_shell_of_another_kind(hosts, mpi, shell):
    """A host's login shell may be of any kind, under every MPI."""
    need(shell)
    changed = partial(re.sub, "(?m)^(root:.*:).*$", rf"\1{tool(shell)}")
    with faults.changed(hosts["node1"], "/etc/passwd", changed):
        job = ("launch", "-H", "node0:1,node1:1", hosts.script("print()"))
        hosts.run(*job, mpi=mpi).assert_ok()


START_UP_FILES = {
    "variables": "set -u -e\n",
    "question": "echo Welcome; read -p 'Which module? ' module\n",
    "trap": "trap 'echo Good-bye' EXIT; trap '' HUP INT TERM\n",
    "shell": '[ "$OTHER" ] || OTHER=1 exec bash -l\n',
}


@pytest.mark.parametrize("text", START_UP_FILES.values(), ids=[*START_UP_FILES])
def test_a_start_up_file(hosts, text):
    """A start-up file of a host may print, ask a question, set options and start another shell."""
    script = hosts.script("print('trained')")
    with begins_with(hosts["node1"], BASHRC, text):
        done = hosts.run("launch", "-H", "node0:1,node1:1", script, env={"MPIDDP_PREFIX": "never"})
    assert done.assert_ok().lines == ["trained"] * 2


# --- the own names of hosts ---


@contextmanager
def own_names(hosts: Hosts, *names: str) -> Iterator[None]:
    with ExitStack() as stack:
        for host, name in zip(hosts.cluster.hosts, names, strict=False):
            stack.enter_context(shelled(host, f"hostname {name}", f"hostname {host.name}"))
        yield


def test_hosts_with_one_hostname(hosts):
    """Hosts with one hostname run, and are told apart by their names in the hostfile."""
    script = hosts.script("import os, sys; print(flush=True); sys.exit(int(os.environ['RANK']))")
    with own_names(hosts, "ubuntu", "ubuntu"):
        done = hosts.run("launch", "-H", "node0:1,node1:1", "--log-ranks=all", script)
    assert "rank 1 on node1 ended first" in done.said[0]
    assert "ubuntu" not in done.stdout + done.stderr


def test_hosts_whose_own_names_are_crossed(hosts):
    """A host whose own name is that of another host of the job is refused before the start."""
    with own_names(hosts, "node0", "node2", "node1"):
        done = hosts.run("launch", "-H", "node0:1,node1:1,node2:1", program("identity.py"))
    assert done.code == 2
    assert "node1: its own name is node2, another host of the job." in done.stderr


# --- jump hosts, and logins that are dropped ---

JUMP = (
    "Host gpu1\n  HostName 10.77.0.2\n  ProxyJump node2\n"
    "Host gpu2\n  HostName 127.0.0.1\n  HostKeyAlias node2\n  ProxyJump node2\n"
)
FORWARD = "ssh -M -S /run/forward -f -N -L 2201:node1:22 -L 2202:node2:22 node0"


def test_hosts_behind_ports_of_one_machine(hosts):
    """Hosts behind ports of one machine, as containers are, are different hosts, also if it is this one."""
    node0, file, known = hosts["node0"], hosts.folder / "ports.txt", "/root/.ssh/known_hosts"
    file.write_text("node0 slots=1\nlocalhost port=2201 slots=1\nlocalhost port=2202 slots=1\n")
    keys = re.findall(r"(?m)^node([12]),\S+ (.*)$", node0.path(known).read_text())
    of_ports = "".join(f"[localhost]:220{number} {key}\n" for number, key in keys)
    forwards = shelled(node0, FORWARD, "ssh -S /run/forward -O exit node0")
    with begins_with(node0, known, of_ports), forwards:
        done = hosts.run("launch", "--hostfile", file, program("reduces.py")).assert_ok()
        assert [(rank["host"], rank["sum"]) for rank in done.records] == [
            (name, 6) for name in hosts.hosts
        ]
        done = hosts.run("hosts", "run", "--hostfile", file, "--", "hostname").assert_ok()
    assert sorted(done.lines) == ["localhost-2201: node1", "localhost-2202: node2", "node0: node0"]


ONE_LOGIN = "MaxStartups 1:100:1\n"  # sshd drops others as long as one has not ended
# A connection to node1's sshd that logs in for ever.
HELD = "import socket; s = socket.create_connection(('node1', 22)); print(s.recv(3), flush=True); input()"


def logins(hosts: Hosts, name: str) -> int:
    """How many logins of node0 this host has accepted."""
    log = hosts[name].path("/run/sshd.log").read_text()
    return len(re.findall(rf"Accepted publickey for root from {hosts['node0'].address} ", log))


@every_mpi
def test_hosts_behind_a_jump_host(hosts, mpi):
    """Any number of hosts behind one jump host start: it gets one login, which ends with the job."""
    with begins_with(hosts["node0"], CONFIG, JUMP), sshd_with(hosts["node2"], ONE_LOGIN):
        before = logins(hosts, "node2")
        where = ("-H", "node0:1,gpu1:1,gpu2:1")
        done = hosts.run("launch", *where, program("identity.py"), mpi=mpi).assert_ok()
        assert {rank["host"] for rank in done.records} == {"node0", "node1", "node2"}
        assert logins(hosts, "node2") - before == 1
    assert not hosts.processes("ControlMaster")


def test_a_connection_of_the_user(hosts):
    """A connection to the jump host that the user has open is used, and outlives the job."""
    node0 = hosts["node0"]
    own = "Host node2\n  ControlPath ~/.ssh/own\n"
    with begins_with(node0, CONFIG, f"{own}{JUMP}"):
        node0.run(["ssh", "-M", "-N", "-f", "node2"], check=True)
        before = logins(hosts, "node2")
        done = hosts.run("hosts", "run", "-H", "gpu1,gpu2", "--", "hostname").assert_ok()
        assert sorted(done.lines) == ["gpu1: node1", "gpu2: node2"]
        assert logins(hosts, "node2") == before
        node0.run(["ssh", "-O", "exit", "node2"], check=True)


def test_a_login_that_is_dropped(hosts):
    """A login that sshd drops before it begins is tried again, within the time of a login, and then named."""
    run = ("hosts", "run", "-H", "node1", "--login-timeout")
    with sshd_with(hosts["node1"], ONE_LOGIN):
        with hosts["node0"].popen([sys.executable, "-c", HELD], stdin=PIPE) as held:
            assert held.stdout.readline()
            names = "its sshd closes each login before it begins."  # or that the time is over
            eventually(
                lambda: names in hosts.run(*run, "2s", "--", "hostname").assert_code(1).stderr
            )
            job = hosts.start(*run, "1m", "--", "hostname")
            eventually(lambda: hosts.processes("sleep 0.5"))  # before it is tried again
            held.communicate("\n")
        assert job.wait().assert_ok().stdout == "node1: node1\n"


# --- logins that fail ---


class Fault(NamedTuple):
    """What makes a login from node0 to node1 fail."""

    words: str  # of the sentence that explains it
    own: str = ""  # a shell command in ~/.ssh of node0
    sshd: str = ""  # settings of node1's sshd
    bashrc: str = ""  # of node1
    pam: str = ""  # rules for node1's sshd


REFUSED = f"permission denied (publickey).\n{FIX}ssh-copy-id node1"
OTHER = f"runs another command, which prints: {{}}\n{FIX}see ForceCommand in its sshd_config"
MISSING = "Welcome / /root/.bashrc: line 2: missing: No such file or directory."
BANNER = "Connection timed out: so ends an idle session.\n"
FAULTS = {
    "readable key": Fault(
        f"{KEY}, because others can read or write it.\n{FIX}chmod 600 {KEY}",
        own="chmod 644 id_ed25519",
    ),
    "locked key": Fault(
        f'{KEY} has a passphrase, and no agent holds it.\n{FIX}eval "$(ssh-agent)"; ssh-add',
        own="ssh-keygen -q -p -P '' -N 'a secret' -f id_ed25519",
    ),
    "broken key": Fault(
        f"the key {KEY} cannot be read (",
        own="head -c 200 id_ed25519 >half; cat half >id_ed25519",
    ),
    "no key": Fault(
        f"no agent and no file of yours has a key.\n{FIX}mpiddp hosts keys", own="rm id_ed25519"
    ),
    "certificate": Fault(
        f"the certificate {KEY}-cert.pub has ended (2020-01-02T00:00:00).\n{FIX}get a new one from the site",
        own="ssh-keygen -y -f id_ed25519 >id_ed25519.pub; ssh-keygen -q -t ecdsa -N '' -f ca; "
        "ssh-keygen -q -s ca -I me -n root -V 20200101:20200102 id_ed25519.pub",
        sshd="AuthorizedKeysFile none\n",
    ),
    "changed key": Fault(
        f"its host key has changed.\n{FIX}ssh-keygen -R",
        own=r'sed -i "s|^\(node1[^ ]*\) .*|\1 $(cat authorized_keys)|" known_hosts',
    ),
    "many keys": Fault(
        f"Too many authentication failures: ssh offers other keys first.\n{FIX}name the right one in",
        own="ssh-keygen -q -t ecdsa -N '' -f id_ecdsa",
        sshd="MaxAuthTries 1\n",
    ),
    "banner": Fault(REFUSED, sshd="Banner /etc/banner\nAuthorizedKeysFile none\n"),
    "quiet": Fault(REFUSED, own="echo LogLevel QUIET >config", sshd="AuthorizedKeysFile none\n"),
    "wrong option": Fault("line 1: Bad configuration option: prot", own="echo Prot 22 >config"),
    "forced command": Fault(OTHER.format("No account."), sshd="ForceCommand echo No account.\n"),
    "no session": Fault(
        f"PAM opens no session there after the login, and says: no job.\n{FIX}see there the lines of session in",
        sshd="UsePAM yes\n",
        pam="account sufficient pam_permit.so\nsession optional pam_echo.so no job\nsession requisite pam_deny.so\n",
    ),
    "early exit": Fault(OTHER.format("nothing."), bashrc="exit 1\n"),
    "greeting": Fault(OTHER.format(MISSING), bashrc="echo Welcome\n. missing || exit\n"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=[*FAULTS])
def test_what_ssh_itself_says(hosts, fault):
    """A login that fails is explained by what ssh itself says, in one line with the command that helps."""
    node0, node1 = hosts["node0"], hosts["node1"]
    change = f"cp -a ~/.ssh ~/.ssh.before; cd ~/.ssh; {fault.own}"
    with (
        shelled(node0, change, "rm -r ~/.ssh; mv ~/.ssh.before ~/.ssh"),
        begins_with(node1, "/etc/banner", BANNER),
        begins_with(node1, BASHRC, fault.bashrc),
        begins_with(node1, "/etc/pam.d/sshd", fault.pam),
        sshd_with(node1, fault.sshd),
    ):
        done = hosts.run("launch", "-H", "node0:1,node1:1", program("identity.py"))
    assert done.code == 2
    (sentence,) = done.refusals
    assert sentence.startswith("ssh node1: ")
    assert fault.words in sentence


def test_a_slow_login(hosts):
    """--login-timeout is the time that a login may take, also of `mpiddp hosts`. A longer one names it."""
    launch = ("launch", "-H", "node0:1,node1:1")
    with begins_with(hosts["node1"], BASHRC, "sleep 2\n"):
        done = hosts.run(*launch, "--login-timeout", "1s", program("identity.py"))
        assert done.code == 1
        assert "slow: --login-timeout 2s" in done.stderr
        hosts.run(*launch, "--login-timeout", "1m", program("identity.py")).assert_ok()
        for verb, *command in (("run", "--", "true"), ("keys",), ("push",)):
            verb_of = ("hosts", verb, "-H", "node0,node1", "--login-timeout", "1s")
            done = hosts.run(*verb_of, *command)
            assert "slow: --login-timeout 2s" in done.stderr
            assert done.code > 0
    # Without a sign of the host: it looks up the key.
    looks_up = (
        "test -e /run/asked || { touch /run/asked; sleep 14; }; cat /root/.ssh/authorized_keys"
    )
    executable(hosts["node1"].path("/run/keys"), looks_up)
    settings = "AuthorizedKeysFile none\nAuthorizedKeysCommand /run/keys\n"
    with sshd_with(hosts["node1"], f"{settings}AuthorizedKeysCommandUser root\n"):
        verb_of = ("hosts", "run", "-H", "node0,node1", "--login-timeout", "1m")
        hosts.run(*verb_of, "--", "true").assert_ok()


@pytest.mark.parametrize(("folder", "names_it"), [("/tmp", ""), (TMPDIR, f": '{TMPDIR}'")])
def test_a_host_without_space(hosts, folder, names_it):
    """A host whose /tmp or TMPDIR is full is named, with the system's reason."""
    with faults.mounted(hosts["node1"], folder, "-o", "size=4k,mode=1777"):
        hosts["node1"].path(f"{folder}/file").write_text("full")
        done = hosts.run("launch", "-H", "node0:1,node1:1", program("identity.py"))
    full = f"node1: OSError: [Errno 28] No space left on device{names_it}."
    assert (done.code, done.said, done.fixes) == (1, [full], ["ssh node1 df"])  # no bad input


def test_no_variable_stays_if_mpirun_does_not_start(hosts):
    """Other hosts have got them before, with the job's key."""
    mpirun = executable(hosts.folder / "mpirun", 'echo "mpirun (Open MPI) 5.0.11"; rm -f "$0"')
    executable(hosts.folder / "prted", "exit 0")
    with faults.mounted(hosts["node1"], "/tmp", "-o", "mode=1777"):
        done = hosts.run(
            "launch", "--no-check", "--mpirun", mpirun, "-H", "node0:1,node1:1", "--", "true"
        )
        kept = [*hosts["node1"].path("/tmp").glob("mpiddp-private-*")]
    assert done.said[-1] == f"cannot start {mpirun}: No such file or directory."
    assert kept == []


FEW = (
    [("-n", "2"), 3],
    [("-n", "2"), 6],
    *([("-H", "node0:1,node1:1"), limit] for limit in (4, 7, 10, 13)),
)


@pytest.mark.parametrize(("where", "limit"), FEW)
def test_a_limit_of_processes(hosts, where, limit):
    """A limit of the user's processes (`ulimit -u`) that is too low for a start is named, whoever meets it."""
    limited = ["bash", "-c", 'ulimit -u "$0" && exec "$@"', str(limit)]
    launch = [sys.executable, "-m", "mpiddp", "launch", *where, program("identity.py")]
    hosts.folder.chmod(0o777)
    done = hosts["node0"].run([*limited, *launch], user=USER, cwd=hosts.folder)
    assert done.returncode == 1, done
    assert done.stderr.endswith(f"\n{FIX}{MORE_PROCESSES}\n"), done.stderr
    assert "allow TCP" not in done.stderr


# After `--version`, it takes all processes that are left, and hangs.
TAKES_ALL = f"""#!{sys.executable}
import os, sys, time
if sys.argv[1] == "--version":
    sys.exit(print("mpirun (Open MPI) 5.0.11"))
try:
    while os.fork():
        pass
except BlockingIOError:
    pass
time.sleep(6000)
"""


def test_an_mpirun_that_hangs_at_a_limit_of_processes(hosts):
    """The same if mpirun does not end: the launcher itself cannot start an ssh then."""
    mpirun = executable(hosts.folder / "mpirun", TAKES_ALL)
    executable(hosts.folder / "prted", "exit 0")
    launch = [sys.executable, "-m", "mpiddp", "launch", "--mpirun", mpirun, "-H", "node0:1,node1:1"]
    limited = ["bash", "-c", 'ulimit -u 40 && exec "$@"', "sh", *launch, program("identity.py")]
    hosts.folder.chmod(0o777)
    done = hosts["node0"].run(limited, user=USER, cwd=hosts.folder)
    assert done.returncode == 1, done
    assert done.stderr.endswith(f"\n{FIX}{MORE_PROCESSES}\n"), done.stderr
    assert "Traceback" not in done.stderr


def test_a_working_folder_that_this_user_may_not_enter(hosts):
    """A working folder that the user may not enter, as root's over NFS, is named before the start."""
    (closed := hosts.folder / "closed").mkdir(mode=0o700)
    enter = f'cd "$0" && exec setpriv --reuid={USER} --regid={USER} --clear-groups env HOME=/ "$@"'
    for where in (["-n", "2"], ["-H", "node0:1"]):
        launch = [sys.executable, "-m", "mpiddp", "launch", *where, "--", "true"]
        done = hosts["node0"].run(["sh", "-c", enter, closed, *launch])
        said = "mpiddp: the working folder cannot be used: Permission denied.\n"
        assert (done.returncode, done.stderr.endswith(said)) == (2, True), done


def test_a_python_that_may_not_be_executed(hosts):
    """A host whose file system of Python is mounted noexec is named, with the system's reason."""
    with faults.mounted(hosts["node1"], sys.base_prefix, "-o", "noexec", what=sys.base_prefix):
        done = hosts.run("launch", "-H", "node0:1,node1:1", program("identity.py"))
    (sentence,) = done.refusals
    assert sentence.startswith(f"node1: {sys.executable} does not run there: ")
    assert sentence.endswith(
        f"Permission denied.\n{FIX}install the same Python there as here, on a file system without noexec"
    )


def test_a_python_of_a_module(hosts):
    """A Python that needs LD_LIBRARY_PATH, as one of a module, starts on every host, from the shell or by -x."""
    libraries = hosts.folder / "needed libs"
    python, where = python_that_needs(libraries), ("-H", "node0:1,node1:1")
    run = (python, "-m", "mpiddp", "launch", *where)
    script = hosts.script("import os; print(os.uname().nodename, os.environ['LD_LIBRARY_PATH'])")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # of mpirun
    env = {"LD_LIBRARY_PATH": str(libraries), "PATH": path}
    for options in ((), ("--no-check",)):
        done = hosts.run(*run, *options, "--log-ranks=all", script, env=env).assert_ok()
        assert {*done.lines} == {f"{name} {libraries}" for name in ("node0", "node1")}
    hosts.run(python, "-m", "mpiddp", "doctor", "--quick", *where, env=env).assert_ok()
    done = hosts.run(*run, "-x", "LD_LIBRARY_PATH=/none", script, env=env).assert_code(2)
    assert "node1: " + python + " does not run there: error while loading" in done.stderr


def test_a_script_that_a_host_lacks(hosts):
    """A host without the script is named before the start, with the command that copies it."""
    folder, launch = "/run/tmp/project", ("launch", "-H", "node0:1,node1:1")
    for name in ("node0", "node1"):
        hosts[name].path(folder).mkdir()
    hosts["node0"].path(f"{folder}/train.py").write_text("print(1)\n")
    done = hosts.run(*launch, "train.py", cwd=folder)
    copy = "mpiddp launch --push …, or mpiddp hosts push -H node0:1,node1:1"
    assert (done.code, done.said, done.fixes) == (2, ["node1: train.py is missing."], [copy])
    done = hosts.run(*launch, "--push", "train.py", cwd=folder)
    assert done.assert_ok().stdout == "1\n1\n"


READS_DATA = """
import os
print(open("data/train").read() + open(os.path.abspath("words.txt")).read())
"""


def test_a_file_that_is_here_alone(hosts):
    """A push says what it leaves out. A script that misses a file there names the command that pushes it."""
    folder, where = "/run/tmp/reads", "-H node0:1,node1:1"
    for name in ("node0", "node1"):
        hosts[name].path(folder).mkdir()
    here, there = (hosts[name].path(folder) for name in ("node0", "node1"))
    (here / "train.py").write_text(READS_DATA)
    (here / "words.txt").write_text("b")
    (here / "data").mkdir()
    (here / "data/train").write_text("a")
    launch, push = ("launch", *where.split()), f"mpiddp hosts push {where}"
    done = hosts.run(*launch, "--push", "train.py", cwd=folder).assert_code(1)
    assert f"left out: data/ (1 B). To push it: {push} data" in done.said
    assert "data/train is on this host, and not on node1." in done.said
    assert done.fixes == [f"{push} data"]
    hosts.run(*shlex.split(done.fixes[0])[1:], cwd=folder).assert_ok()
    (there / "words.txt").unlink()
    done = hosts.run(*launch, "train.py", cwd=folder).assert_code(1)
    assert done.fixes == [push]
    done = hosts.run(*shlex.split(push)[1:], cwd=folder).assert_ok()
    assert "left out" not in done.stderr
    hosts.run(*launch, "train.py", cwd=folder).assert_ok()
    nowhere = "import os; int(os.environ['RANK']) and open('/none')"
    done = hosts.run(*launch, "--", sys.executable, "-c", nowhere, cwd=folder).assert_code(1)
    assert done.fixes == ["Use an absolute path that every host has."]


def test_a_file_that_is_gone(hosts):
    """A push removes a module that an earlier push has sent and that is gone. Another one is named."""
    folder, where = "/run/tmp/branch", hosts.where(2)
    here, there = (hosts[name].path(folder) / "old.py" for name in ("node0", "node1"))
    here.parent.mkdir()
    here.with_name("train.py").write_text("try:\n    import old\nexcept ImportError:\n    pass\n")
    here.touch()
    push, launch = ("hosts", "push", *where, folder), ("launch", *where, "train.py")
    hosts.run(*push).assert_ok()
    here.unlink()
    is_there = f"old.py is on node1, and not on node0.\n{FIX}remove it there; mpiddp hosts push"
    done = hosts.run(*launch, cwd=folder)
    assert (done.code, is_there in done.stderr) == (2, True)
    hosts.run(*push).assert_ok()
    hosts.run(*launch, cwd=folder).assert_ok()
    there.touch()  # no push has sent this one
    hosts.run(*push).assert_ok()
    done = hosts.run(*launch, cwd=folder)
    assert (done.code, is_there in done.stderr) == (2, True)
    assert there.exists()


def test_a_resume_with_push_keeps_shards(hosts):
    """A resume with --push keeps the shards that only other hosts have, on disks of their own."""
    folder = "/run/tmp/sharded"
    for host in hosts.cluster.hosts:
        host.path(folder).mkdir()
    train = ["-m", "mpiddp", "train", "--use-syn", "--arch=resnet20", "--batch-size=4"]
    train += ["--parallel=fsdp", "--backend=gloo", "--epochs=1", "--steps-per-epoch=2", "--out=out"]
    launch = ("launch", "-H", "node[0-2]:1")
    hosts.run(*launch, *train, cwd=folder).assert_ok()
    kept = "out/checkpoints/step_00000002"
    shards = [f"shard_{rank:05d}.safetensors" for rank in range(3)]
    there = {
        host.name: [name for name in shards if host.path(f"{folder}/{kept}/{name}").exists()]
        for host in hosts.cluster.hosts
    }
    assert there["node0"] != shards  # a host has those of two
    done = hosts.run(*launch, "--push", *train, "--resume=auto", cwd=folder)
    assert "missing" not in done.assert_ok().stdout + done.stderr
    for host in hosts.cluster.hosts:
        for name in there[host.name]:
            assert host.path(f"{folder}/{kept}/{name}").exists()
        folders.verify(host.path(f"{folder}/{kept}"))


# --- IPv6 ---


@contextmanager
def ipv6(cluster: Cluster, *, numbers: tuple[int, ...] = (0, 1, 2), alone: bool) -> Iterator[None]:
    """An IPv6 address on these hosts, and the names six0, six1 … for it. Alone, or beside IPv4."""
    etc, known = "", ""
    keys = cluster["node0"].path("/root/.ssh/known_hosts").read_text()
    for number in numbers:
        etc += f"{SIX.format(number + 1)} six{number}\n"
        (key,) = re.findall(rf"(?m)^node{number},\S+ (.*)$", keys)
        known += f"{SIX.format(number + 1)},six{number} {key}\n"
    with ExitStack() as stack:
        for number in numbers:
            host = cluster[f"node{number}"]
            link = f"dev {host.interface}"
            six, four = f"{SIX.format(number + 1)}/64 {link}", f"{host.address}/24 {link}"
            stack.enter_context(shelled(host, f"ip addr add {six} nodad", f"ip addr del {six}"))
            stack.enter_context(sshd_with(host, f"ListenAddress {SIX.format(number + 1)}\n"))
            stack.enter_context(begins_with(host, "/etc/hosts", etc))
            stack.enter_context(begins_with(host, "/root/.ssh/known_hosts", known))
            if alone:
                stack.enter_context(shelled(host, f"ip addr del {four}", f"ip addr add {four}"))
        yield


@pytest.mark.parametrize("numbers", [(0,), (1,), (0, 1)])
def test_one_host_with_an_ipv6_address(hosts, numbers):
    """A host with IPv6 beside IPv4, also by one name, works beside one without: a job has one family."""
    names = "".join(f"{SIX.format(number + 1)} node{number}\n" for number in numbers)
    with ExitStack() as stack:
        stack.enter_context(ipv6(hosts.cluster, numbers=numbers, alone=False))
        for name in ("node0", "node1", "node2"):
            stack.enter_context(begins_with(hosts[name], "/etc/hosts", names))
        done = hosts.run("launch", "-H", "node0:1,node1:1,node2:1", program("reduces.py"))
        assert [rank["sum"] for rank in done.assert_ok().records] == [6, 6, 6]
        assert {rank["master"] for rank in done.records} == {hosts["node0"].address}


@pytest.mark.parametrize("alone", [False, True])
def test_ipv6(hosts, alone):
    """IPv6 addresses in -H and hostfiles, and names with an AAAA record alone, also on hosts without IPv4.

    `mpiddp doctor` raises no false alarm about them.
    """
    file, listed, names = hosts.folder / "file", "[fd77::1]:1,[fd77::2]:1", "six0:1,six1:1"
    file.write_text("fd77::1 slots=1\nfd77::2 slots=1 user=root\n")
    env = {"OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=2"}  # the user's own
    with ipv6(hosts.cluster, alone=alone):
        for where in (("-H", listed), ("-H", names), ("--hostfile", file)):
            script = program("reduces.py" if where[1] is listed else "identity.py")
            done = hosts.run("launch", *where, script, env=env).assert_ok()
            assert [rank["host"] for rank in done.records] == ["node0", "node1"]
            address = "fd77::1" if alone else hosts["node0"].address
            assert {rank["master"] for rank in done.records} == {address}
            if not (alone or where[1] is listed):
                done = hosts.run("doctor", *where).assert_ok()
                assert not re.search("(?m)^(warn|unknown) +names", done.stdout), done.stdout


def test_hosts_that_share_ipv6_alone(hosts):
    """Without a route to the hosts' IPv4 networks, a job uses IPv6; gloo too, if their names lead to it."""
    names = "10.77.0.1 six0\n10.78.0.2 six1\n"
    node0, node1 = hosts["node0"], hosts["node1"]
    with ExitStack() as stack:
        stack.enter_context(ipv6(hosts.cluster, alone=False))
        for host in (node0, node1):
            stack.enter_context(begins_with(host, "/etc/hosts", names))
        own, other = (f"{address}/24 dev eth0" for address in (node1.address, "10.78.0.2"))
        move = "ip addr del {}; ip addr add {}"
        stack.enter_context(shelled(node1, move.format(own, other), move.format(other, own)))
        route = "10.78.0.0/24 dev eth0"
        stack.enter_context(shelled(node0, f"ip route add {route}", f"ip route del {route}"))
        done = hosts.run("launch", "-H", "six0:1,six1:1", program("identity.py")).assert_ok()
        assert {rank["master"] for rank in done.records} == {"fd77::1"}
        assert [rank["host"] for rank in done.records] == ["node0", "node1"]
        # Of an interface with both, gloo takes the IPv4 address, which no route leads to here.
        failed = hosts.run("launch", "-H", "six0:1,six1:1", program("reduces.py"))
        assert (failed.code, "gloo: No route leads to gloo's address" in failed.stderr) == (1, True)
        for number, host in enumerate((node0, node1)):
            own = f"{SIX.format(number + 1)} node{number}\n"
            stack.enter_context(begins_with(host, "/etc/hosts", own))
        done = hosts.run("launch", "-H", "six0:1,six1:1", program("reduces.py")).assert_ok()
        assert [rank["sum"] for rank in done.records] == [3, 3]


MAKES_A_URL = """
import os, torch, torch.distributed as dist
address, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
dist.init_process_group("gloo", init_method=f"tcp://{address}:{port}", rank=int(rank), world_size=2)
total = torch.ones(1)
dist.all_reduce(total)
print(address, total.item())
"""


def test_a_url_of_ipv6(hosts):
    """If all hosts find rank 0's IPv6 address by its host's name, MASTER_ADDR is that name, as a URL needs it."""
    leads_to_ipv6 = partial(re.sub, r"(?m)^10\.77\.0\.(\d+)(?= node)", r"fd77::\1")
    with ExitStack() as stack:
        stack.enter_context(ipv6(hosts.cluster, numbers=(0, 1), alone=True))
        for name in ("node0", "node1"):
            stack.enter_context(faults.changed(hosts[name], "/etc/hosts", leads_to_ipv6))
        done = hosts.run(
            "launch", "--log-ranks=all", "-H", "six0:1,six1:1", hosts.script(MAKES_A_URL)
        )
        assert done.assert_ok().lines == ["node0 2.0"] * 2


@pytest.mark.parametrize("requested", ["fd77::/64", "fd77::1"])
def test_an_interface_of_ipv6(hosts, requested):
    """--interface takes an IPv6 network or address also where hosts have both families, and ssh IPv4."""
    where = ("-H", "node0:1,node1:1", "--interface", requested)
    with ipv6(hosts.cluster, alone=False):
        done = hosts.run("launch", *where, program("reduces.py")).assert_ok()
    assert {rank["master"] for rank in done.records} == {"fd77::1"}
    assert [(rank["host"], rank["sum"]) for rank in done.records] == [("node0", 3), ("node1", 3)]


@every_mpi
def test_every_mpi_over_ipv6(hosts, mpi):
    """Every MPI runs over IPv6 alone, also with --interface, but for MPICH, which is refused."""
    with ipv6(hosts.cluster, alone=True):
        where = ("-H", "[fd77::1]:1,[fd77::2]:1", "--interface", "fd77::/64")
        done = hosts.run("launch", *where, program("identity.py"), mpi=mpi)
    if mpi == "mpich":
        assert (done.code, "MPICH's mpirun knows IPv4 only" in done.stderr) == (2, True)
    else:
        assert [rank["host"] for rank in done.assert_ok().records] == ["node0", "node1"]
