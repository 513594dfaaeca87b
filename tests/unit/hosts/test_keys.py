"""Which key `mpiddp hosts keys` copies. tests/promises/test_hosts.py copies one."""

import shutil
import subprocess
from pathlib import Path

import pytest

from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.keys import _public_key

pytestmark = pytest.mark.skipif(not shutil.which("ssh-agent"), reason="no ssh-agent")


def test_the_key_of_an_agent_is_taken(tmp_path, monkeypatch):
    """A user of a security key, or of an agent that is forwarded, gets no key without a passphrase."""
    key, agent = tmp_path / "key", tmp_path / "agent"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    public = key.with_suffix(".pub").read_text()
    monkeypatch.setenv("HOME", str(tmp_path))
    with subprocess.Popen(["ssh-agent", "-D", "-a", agent], stdout=subprocess.DEVNULL) as process:
        try:
            monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
            while (
                subprocess.run(["ssh-add", "-l"], capture_output=True).returncode == 2
            ):  # it does not answer yet
                assert process.poll() is None
            subprocess.run(["ssh-add", "-q", key], check=True)
            key.unlink()
            with _public_key(Host("node1")) as file:
                assert Path(file).read_text("utf-8").split()[:2] == public.split()[:2]
        finally:
            process.terminate()
    assert not (tmp_path / ".ssh").exists()


def test_a_private_key_without_its_public_half_is_kept(tmp_path, monkeypatch):
    (tmp_path / ".ssh").mkdir()
    key = tmp_path / ".ssh" / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key], check=True)
    private, public = key.read_bytes(), key.with_suffix(".pub").read_text()
    key.with_suffix(".pub").unlink()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with _public_key(Host("node1")) as file:
        assert Path(file).read_text("utf-8").split()[:2] == public.split()[:2]
    assert key.read_bytes() == private
