"""The keys of ssh: which one is taken, what a person confirms, and what is remembered of a yes.

Tests mpiddp/hosts/cluster/keys.py with the real ssh -G, ssh-keygen and ssh-keyscan; no host is contacted.
tests/cluster/launch/test_hosts_keys.py has real hosts.
python -m pytest tests/unit/hosts/test_keys_of_ssh.py
"""

from __future__ import annotations

import io
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts import main
from mpiddp.hosts.cluster import keys
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import shell_command
from tests.support.errors import error
from tests.support.patience import PATIENCE_S

CONFIG = """\
Host a.invalid
  HostName 192.0.2.1
  Port 2222
Host b.invalid
  HostKeyAlias B
Host *
  UserKnownHostsFile {folder}/new/known_hosts {folder}/other
  IdentityFile {folder}/id_rsa
  IdentityFile {folder}/id_ed25519
"""


@pytest.fixture(autouse=True)
def own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh reads ./config alone."""
    ssh = shutil.which("ssh")
    if ssh is None:
        pytest.skip("ssh is not installed")
    monkeypatch.chdir(tmp_path)
    Path("config").write_text(CONFIG.format(folder=tmp_path))
    Path("bin").mkdir()
    program = Path("bin", "ssh")
    program.write_text(f'#!/bin/sh\nexec {ssh} -F {tmp_path}/config "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")


def made(path: Path) -> str:
    """A new key in this file. Returns the public one."""
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "me@here", "-f", str(path)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    return path.with_name(f"{path.name}.pub").read_text().strip()


def test_the_settings_of_a_host(tmp_path: Path) -> None:
    found = keys._settings(Host("a.invalid"))
    assert (found["hostname"], found["port"]) == (["192.0.2.1"], ["2222"])
    assert found["identityfile"] == [f"{tmp_path}/id_rsa", f"{tmp_path}/id_ed25519"]
    own = keys._settings(Host("a.invalid", user="me", port=9))
    assert (own["user"], own["port"]) == (["me"], ["9"])
    Path("config").write_text("Nonsense\n")
    broken = error("fails. Correct", "ssh -G me@a.invalid ", "~/.ssh/config")
    with pytest.raises(UserError, match=rf"^{broken}$"):
        keys._settings(Host("a.invalid", user="me"))


def test_the_key_that_ssh_offers_first(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    second = made(tmp_path / "id_ed25519")
    assert keys._public_key(Host("a.invalid")) == second
    first = made(tmp_path / "id_rsa")
    assert keys._public_key(Host("a.invalid")) == first
    (tmp_path / "id_rsa.pub").unlink()
    assert keys._public_key(Host("a.invalid")).split()[:2] == first.split()[:2]
    assert capfd.readouterr().out == ""


def test_a_key_that_cannot_be_read_is_not_copied(tmp_path: Path) -> None:
    """As one with a passphrase that nobody knows."""
    (tmp_path / "id_rsa").write_text("no key")
    own = tmp_path / "id_rsa"
    unread = error("its public", f"{own}: ", f": ssh-keygen -y -f {own} > {own}.pub ")
    with pytest.raises(UserError, match=rf"^{unread}$"):
        keys._public_key(Host("a.invalid"))


def test_a_key_is_made_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "home" / ".ssh" / "id_ed25519"
    own.parent.parent.mkdir()
    monkeypatch.setattr(keys, "_path", lambda path: Path(path.replace("~", f"{tmp_path}/home")))
    public = keys._public_key(Host("a.invalid"))
    assert capfd.readouterr().out == f"{own} is a new key, without a passphrase\n"
    assert (public, public.split()[0]) == (Path(f"{own}.pub").read_text().strip(), "ssh-ed25519")
    assert own.parent.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(own.parent)
    own.parent.symlink_to("/proc")
    with pytest.raises(UserError, match=error("ssh-keygen cannot", "ssh-keygen ", f" {own}: ")):
        keys._public_key(Host("a.invalid"))


def test_the_home_folder_of_the_users_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/elsewhere")
    assert keys._path("~/.ssh/a").name == "a"
    assert keys._path("~/.ssh/a").is_absolute()
    assert "elsewhere" not in str(keys._path("~/.ssh/a"))
    assert keys._path("/x/~/a") == Path("/x/~/a")


def test_the_fingerprint_of_a_key(tmp_path: Path) -> None:
    public = made(tmp_path / "key")
    listed = subprocess.run(
        ["ssh-keygen", "-lf", str(tmp_path / "key.pub")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    ).stdout.split()
    assert keys._fingerprint(" ".join(public.split()[:2])) == f"{listed[1]} (ED25519)"


def test_a_host_that_sends_no_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    no_key = error("it sends", "127.0.0.1: ", f"Try: ssh-keyscan -p {port} 127.0.0.1 ")
    with pytest.raises(UserError, match=rf"^{no_key}$"):
        keys._scan("127.0.0.1", port, None)


@pytest.mark.parametrize(
    ("lines", "key"),
    [
        ("# h:22 SSH-2.0\nh ssh-rsa AAAA\nh ssh-ed25519 BBB+/=\nh ecdsa-sha2-nistp256 CC\n",
         "ssh-ed25519 BBB+/="),
        ("h ssh-rsa AAAA\nh ecdsa-sha2-nistp256 CC\n", "ecdsa-sha2-nistp256 CC"),
        ("[h]:9 ssh-rsa AAAA\n", "ssh-rsa AAAA"),
    ],
)  # fmt: skip
def test_the_key_that_is_taken_of_a_host(tmp_path: Path, lines: str, key: str) -> None:
    """The one with which a person compares. ssh-keyscan's answer is a file here."""
    Path("answer").write_text(lines)
    program = Path("bin", "ssh-keyscan")
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/asked; cat {tmp_path}/answer\n")
    program.chmod(0o755)
    assert keys._scan("h", 22, None) == key
    assert Path("asked").read_text() == "h\n"


# --- what a person confirms ---


@pytest.fixture(name="key")
def a_key_of_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What every host sends."""
    key = " ".join(made(tmp_path / "host_key").split()[:2])
    monkeypatch.setattr(keys, "_scan", lambda name, port, jump: key)
    return key


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


HOSTS = [Host("a.invalid"), Host("b.invalid"), Host("long.invalid", port=9)]


def test_hosts_are_known_after_a_yes(
    tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(" Yes\n"))
    keys._confirm(HOSTS, None)
    fingerprint = keys._fingerprint(key)
    assert capfd.readouterr().out == (
        f"a.invalid     {fingerprint}\nb.invalid     {fingerprint}\nlong.invalid  {fingerprint}\n"
        "Compare them on each host: ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub\n"
        "Are these the keys of these hosts? (yes/no) "
    )
    file = tmp_path / "new" / "known_hosts"
    lines = [f"[192.0.2.1]:2222 {key}", f"b {key}", f"[long.invalid]:9 {key}"]
    assert file.read_text().splitlines() == lines
    assert file.parent.stat().st_mode & 0o777 == 0o700
    file.write_text("old, without an end")
    monkeypatch.setattr(sys, "stdin", Terminal("yes\n"))
    keys._confirm(HOSTS[1:], None)
    assert file.read_text() == f"old, without an end\nb {key}\n[long.invalid]:9 {key}\n"


@pytest.mark.usefixtures("key")
@pytest.mark.parametrize(
    ("stdin", "id"),
    [
        (Terminal("no\n"), "accepted, and"),
        (Terminal(""), "accepted, and"),
        (io.StringIO("yes\n"), "accepted: a"),
    ],
)
def test_hosts_are_not_known_without_a_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stdin: io.StringIO, id: str
) -> None:
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(UserError, match=rf"^{error(id)}$"):
        keys._confirm(HOSTS, None)
    assert not (tmp_path / "new").exists()


# --- the verb ---


def test_this_machine_needs_no_key(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Path("hosts").write_text("localhost\n127.0.0.1\n")
    assert main.main(["keys", "hosts"]) == 0
    summary = "127.0.0.1,localhost: reaches every other host\n"
    assert capfd.readouterr().out in (
        summary,
        summary.replace("127.0.0.1,localhost", "localhost,127.0.0.1"),
    )
    assert main.main(["keys", "hosts", "--jump", "me@localhost:22"]) == 0
    assert capfd.readouterr().out.endswith(
        "\nEvery other command goes that way too where ~/.ssh/config has:\n"
        "Host \n    ProxyJump me@localhost:22\n"
    )
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("id_")] == []


def test_a_host_that_ssh_does_not_reach(capfd: pytest.CaptureFixture[str]) -> None:
    with Path("config").open("a") as config:
        config.write("  ProxyCommand false\n")
    far = Host("a.invalid")
    failed = error("failed:", "ssh a.invalid ", "Try: ssh a.invalid true ")
    with pytest.raises(UserError, match=rf"^{failed}$"):
        keys.open_logins([Host("localhost"), far], None)
    found, unknown = keys.reached([Host("localhost"), far], None)
    assert found == {"localhost": ["a.invalid"], "a.invalid": []}
    assert unknown == {"a.invalid": ["localhost"]}


def test_a_jump_host_that_does_not_answer_is_no_fault_of_the_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    Path("config").write_text(f"Host a.invalid\n  ProxyJump 127.0.0.1:{port}\n")
    said = f"(ssh: connect to host 127.0.0.1 port {port}: Connection refused)"
    failed = error("way failed", "ssh a.invalid: ", said, "Try: ssh a.invalid true ")
    with pytest.raises(UserError, match=rf"^{failed}$"):
        keys.open_logins([Host("a.invalid")], None)


def test_each_host_says_whom_it_reaches_and_whom_not() -> None:
    """The command of the hosts, run here."""
    with Path("config").open("a") as config:
        config.write("  ProxyCommand false\n")
    done = keys._on_each(keys._REACH, {Host("localhost"): "n1 a.invalid \nn2 b.invalid 22\n"}, None)
    assert done[Host("localhost")].stdout == "mpiddp-misses n1\nmpiddp-misses n2\n"


def test_the_commands_run_where_the_login_shell_is_csh(tmp_path: Path) -> None:
    """sshd gives a command to it in this way, in the user's home folder."""
    tcsh = shutil.which("tcsh")
    if tcsh is None:
        pytest.skip("tcsh is not installed. Run: apt-get install tcsh")
    with Path("config").open("a") as config:
        config.write("  ProxyCommand false\n")
    for line, stdin, printed in (
        (keys._ADD_KEY, "ssh-ed25519 AAAA me@here\n", ""),
        (keys._REACH, "n1 a.invalid 22\n", "mpiddp-misses n1\n"),
    ):
        *_, command = shell_command(Host("a.invalid"), line)
        done = subprocess.run(
            [tcsh, "-c", command],
            env={**os.environ, "HOME": str(tmp_path)},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
    assert Path(".ssh/authorized_keys").read_text() == "ssh-ed25519 AAAA me@here\n"
