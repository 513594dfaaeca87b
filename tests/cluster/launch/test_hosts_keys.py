"""`mpiddp hosts keys`, from hosts that ssh asks for everything to logins without a question.

Tests mpiddp/hosts/cluster/keys.py.
python -m pytest tests/cluster/launch/test_hosts_keys.py
"""

from __future__ import annotations

import re
import shutil
import stat
import sys
from collections.abc import Iterator
from subprocess import PIPE, STDOUT, CompletedProcess

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.cluster.keys import parse_jump, summary
from tests.support import cluster
from tests.support.cluster import Cluster, Layout, faults, ssh
from tests.support.cluster.host import Host
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

HOSTS = [sys.executable, "-m", "mpiddp", "hosts"]
PASSWORD = "a password"
_HASH = "$6$mpiddp$iAGtOWy6S5/wYngnyRrRPLZpS7l.mPSTKWl0y7KeWM0U.gxY9tWQCqDKNKt/tMTKCtk1V5NrPeUjJwLoBCSOC."
# Its stdin and stdout become those of a terminal, from which ssh reads a password.
_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


@pytest.fixture
def hosts() -> Iterator[Cluster]:
    """node0 has no folder .ssh. node1 and node2 accept root's password, and node1 has no key of its own."""
    with cluster.up_or_skip(3, layout=Layout(apart=True)) as standing:
        first, *others = standing.hosts
        shutil.rmtree(first.path("/root/.ssh"))
        others[0].path("/root/.ssh/id_ed25519").unlink()
        for host in others:
            config = host.path("/etc/ssh/sshd_config")
            allowed = config.read_text().replace(
                "PasswordAuthentication no", "PasswordAuthentication yes"
            )
            ssh.stop_sshd(host)
            config.write_text(f"PermitRootLogin yes\n{allowed}")
            ssh.start_sshd([host])
            lines = host.path("/etc/shadow").read_text().splitlines()
            host.path("/etc/shadow").write_text(
                "".join(
                    f"root:{_HASH}:19000:0:99999:7:::\n"
                    if line.startswith("root:")
                    else f"{line}\n"
                    for line in lines
                )
            )
        (standing.shared / "hosts").write_text("node0\nnode1\nnode2\n")
        yield standing


def keys(hosts: Cluster, *arguments: str, file: str = "hosts") -> CompletedProcess[str]:
    """Without a terminal."""
    command = [*HOSTS, "keys", str(hosts.shared / file), *arguments]
    return hosts["node0"].run(command, cwd=ROOT)


def at_terminal(hosts: Cluster, answers: dict[str, str], *arguments: str) -> tuple[int, str]:
    """The exit code and all that the terminal shows. `answers`: what to type after which text, in order."""
    command = [*HOSTS, "keys", str(hosts.shared / "hosts"), *arguments]
    terminal = [sys.executable, "-c", _TERMINAL, *command]
    shown = ""
    with hosts["node0"].popen(terminal, cwd=ROOT, stdin=PIPE, stderr=STDOUT) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        for question, answer in answers.items():
            while question not in shown:
                character = running.stdout.read(1)
                assert character, shown
                shown += character
            running.stdin.write(f"{answer}\n")
            running.stdin.flush()
        shown += running.stdout.read()
        running.wait(PATIENCE_S)
    return running.returncode, shown.replace("\r\n", "\n")


def fingerprint(host: Host) -> str:
    done = host.run(["ssh-keygen", "-lf", "/etc/ssh/ssh_host_key"], check=True)
    return done.stdout.split()[1]


def refusal(done: CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done
    return done.stderr.strip()


YES = {
    "(yes/no)": "yes",
    "root@node1's password:": PASSWORD,
    "root@node2's password:": PASSWORD,
}


def test_from_questions_to_none(hosts: Cluster) -> None:
    node0, node1, node2 = hosts.hosts
    folder = node0.path("/root/.ssh")
    expected = f"node1  {fingerprint(node1)} (ED25519)\nnode2  {fingerprint(node2)} (ED25519)\n"
    done = keys(hosts)
    assert (done.returncode, done.stdout) == (2, expected)
    sentence = error("accepted: a", "terminal")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr
    assert not folder.exists()
    code, shown = at_terminal(hosts, {"(yes/no)": "y"})
    assert code == 2
    assert shown.startswith(expected)
    assert re.fullmatch(error("accepted, and"), shown.splitlines()[-1]), shown
    assert not folder.exists()

    authorized = node1.path("/root/.ssh/authorized_keys")
    before = authorized.read_text().rstrip("\n")  # sshd accepts a last line without an end
    authorized.write_text(before)
    authorized.chmod(0o620)
    code, shown = at_terminal(hosts, YES)
    assert code == 0, shown
    assert shown.endswith(
        "node2: the key was copied\n"
        "node0: reaches every other host\n"
        "node1: reaches no other host\n"
        "node2: reaches node1, not node0\n"
    )
    public = (folder / "id_ed25519.pub").read_text()
    assert authorized.read_text() == f"{before}\n{public}"
    modes = [
        stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "id_ed25519", authorized)
    ]
    assert modes == [0o700, 0o600, 0o600]

    files = [*folder.iterdir(), authorized, node2.path("/root/.ssh/authorized_keys")]
    contents = [path.read_text() for path in files]
    done = keys(hosts)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("node0: reaches every other host\n")
    assert [path.read_text() for path in files] == contents
    command = [*HOSTS, "run", str(hosts.shared / "hosts"), "--", "echo", "here"]
    assert node0.run(command, cwd=ROOT).stdout == "node[0-2]: here\n"


def test_a_key_that_is_there_is_used(hosts: Cluster) -> None:
    """Also where its public half is missing, and where a key of another kind comes first."""
    folder = hosts["node0"].path("/root/.ssh")
    folder.mkdir(mode=0o700)
    make = ["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", "/root/.ssh/id_ecdsa"]
    hosts["node0"].run(make, check=True)
    (folder / "id_ecdsa.pub").unlink()
    (folder / "known_hosts").write_text("# mine")
    code, shown = at_terminal(hosts, YES)
    assert code == 0, shown
    assert sorted(path.name for path in folder.iterdir()) == ["id_ecdsa", "known_hosts"]
    assert (folder / "known_hosts").read_text().startswith("# mine\nnode1 ssh-ed25519 ")
    assert "ecdsa-sha2" in hosts["node1"].path("/root/.ssh/authorized_keys").read_text()


def test_through_a_jump_host(hosts: Cluster) -> None:
    """node0 has no name for node2, and node1 has."""
    node0, _, node2 = hosts.hosts
    names = node0.path("/etc/hosts")
    names.write_text("".join(line for line in names.open() if "node2" not in line))
    (hosts.shared / "hosts").write_text("node2\n")
    two = {"(yes/no)": "yes", "root@node1's password:": PASSWORD, "node2  SHA": "yes"}
    code, shown = at_terminal(
        hosts, {**two, "root@node2's password:": PASSWORD}, "--jump", "root@node1:22"
    )
    assert code == 0, shown
    assert f"node2  {fingerprint(node2)} (ED25519)\n" in shown
    before, lines = shown.split("~/.ssh/config has:\n")
    assert before.splitlines()[-2] == "node2: reaches every other host"
    node0.path("/root/.ssh/config").write_text(lines)
    command = [*HOSTS, "run", str(hosts.shared / "hosts"), "--", "uname", "-n"]
    assert node0.run(command, cwd=ROOT).stdout == "node2: node2\n"

    (hosts.shared / "ghost").write_text("ghost\n")
    sentence = refusal(keys(hosts, "--jump", "node1", file="ghost"))
    assert re.fullmatch(error("not reach it", "ghost: node1 "), sentence), sentence


def test_bad_input(hosts: Cluster) -> None:
    (hosts.shared / "dash").write_text("-oProxyCommand=x\n")
    (hosts.shared / "none").write_text("node9\n")
    (hosts.shared / "port").write_text("node1 port=7\n")
    for file, arguments, sentence in (
        ("dash", (), error("and would", "dash:1: ", '"-oProxyCommand=x"')),
        (
            "hosts",
            ("--jump=-oProxyCommand=x",),
            error("and would", '--jump: host "-oProxyCommand=x"'),
        ),
        ("hosts", ("--jump", "node9"), error("be resolved", "node9: ", "node0")),
        ("hosts", ("--jump", "node1:7"), error("connection refused", "ssh node1: ")),
        ("hosts", ("--jump", ""), error("--jump: expected", "--jump: ")),
        ("none", (), error("be resolved", "node9: ", "node0")),
        ("port", (), error("connection refused", "ssh node1: ")),
    ):
        assert re.fullmatch(sentence, refusal(keys(hosts, *arguments, file=file))), sentence
    hosts["node0"].path("/root/.ssh").write_text("a file")
    code, shown = at_terminal(hosts, {"(yes/no)": "yes"})
    assert code == 2
    assert re.fullmatch(error(":", "/root/.ssh: File exists"), shown.splitlines()[-1])
    hosts["node0"].path("/root/.ssh").unlink()
    with faults.no_sshd(hosts["node2"]):
        assert re.fullmatch(error("connection refused", "ssh node2: "), refusal(keys(hosts)))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", error("--jump: expected", "--jump: ")),
        ("a b", error("--jump: expected", "--jump: ")),
        ("-x", error("and would", "--jump: ", '"-x"')),
        ("user@-x", error("and would", "--jump: ", '"-x"')),
        ("node1:x", error("--jump: expected", "--jump: ", "name[:port]")),
        ("node1:99999", error("to 65535", "--jump: ", "port=99999")),
    ],
)
def test_jump_hosts_that_are_none(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_jump(text)


def test_who_reaches_whom() -> None:
    names = [f"node{number}" for number in range(4)]
    assert summary({"node0": []}) == ["node0: reaches every other host"]
    every = {name: [other for other in names if other != name] for name in names}
    assert summary(every) == ["node[0-3]: reaches every other host"]
    assert summary({**every, "node1": [], "node2": [], "node3": ["node1"]}) == [
        "node0: reaches every other host",
        "node[1-2]: reaches no other host",
        "node3: reaches node1, not node[0,2]",
    ]
