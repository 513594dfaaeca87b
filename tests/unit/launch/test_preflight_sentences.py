"""What the preflight says about a host that cannot be used, and about hosts that differ."""

import os
import re
import socket
from dataclasses import replace

import pytest

from mpiddp.hosts import complaints
from mpiddp.hosts.complaints import NO_PROGRAM, Answer
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.transport import QRSH, SSH
from mpiddp.launch.plan.preflight import HostInfo, _complaint
from tests.support.errors import error
from tests.support.machine import executable

A = Host("a")
NEEDS = {
    "python": "/venv/bin/python",
    "mpirun": "/mpi/bin/mpirun",
    "daemon": "/mpi/bin/prted",
    "folder": "/work",
    "interface": "",
    "program": "",
    "script": "",
    "image": (),
    "image_fix": "",
    "uses_gpus": True,
}
ETH0 = Interface("eth0", "10.0.0.5", "10.0.0.0/24")
FINE = HostInfo(A, True, True, True, "mpirun 5.0", "2.6", "4.1", (), (ETH0,))
HERE = socket.gethostname()
INSTEAD = "--hostfile $PE_HOSTFILE,"
TRY = "ssh -p 22022 u@a true "
# The last lines of ssh where no jump host leads to the host.
KEX = "kex_exchange_identification: "
NO_WAY = f"{KEX}Connection closed by remote host\r\nConnection closed by UNKNOWN port 65535\r\n"


def complaint(needs: dict[str, object] = NEEDS, **has: object) -> str:
    info = replace(FINE, **has)
    return _complaint(info, info, needs)


def test_the_problem_of_one_host():
    """tests/promises/test_start.py has others."""
    no_mpi = complaint(mpirun=None, has_daemon=False)
    assert re.fullmatch(error("the same MPI", "a: /mpi/bin/mpirun "), no_mpi)
    silent = error("does not answer", "a: nvidia-smi (or rocm-smi)", "CUDA_VISIBLE_DEVICES=")
    assert re.fullmatch(silent, complaint(gpus=None))
    assert complaint({**NEEDS, "uses_gpus": False}, gpus=None) == ""
    closed = complaint(errors={"/home/me/a.py": "Permission denied"}, has_script=False)
    assert closed.startswith("a: /home/me/a.py: Permission denied.\n")


SIGNING = (
    'sign_and_send_pubkey: signing failed for ED25519-SK "k" from agent: agent refused operation'
)
PAM = "Access denied by pam_slurm_adopt: you have no active jobs on this node"
UNKNOWN = "Could not resolve hostname b: Name or service not known"
AT_22 = "ssh: connect to host a port 22: "
WAY = f"({HERE} → a tcp/22022)"
REFUSED = ("connection refused", WAY, ": a port=N ")
BEHIND = "channel 0: open failed: {}\r\nstdio forwarding failed\r\n" + NO_WAY


# What ssh prints, what the line about it shows, and whether the host is lost: no way leads to it any more.
ERRORS = [
    ("Host key verification failed.", False, "host key is unknown", "mpiddp hosts keys "),
    (NO_WAY, False, "closes each login before", "MaxStartups", TRY),
    (f"{KEX}read: Connection reset by peer", False, "closes each login before", "MaxStartups", TRY),
    ("Connection timed out: a banner\r\nu@a: Permission denied (publickey).", False, "(publickey)"),
    (f"{AT_22}No route to host", True, "no route", WAY),
    (f"{AT_22}Network is unreachable", True, "no route", WAY),
    (f"{AT_22}Connection refused", True, *REFUSED),
    ("Timeout, server a not responding.", True, "any more", WAY, "check that"),
    (f"{AT_22}Connection timed out", True, "check that the", " 5 s", WAY),
    ("Connection to 10.0.0.2 port 22 timed out", True, "half-way", WAY, "timeout 30s", "(MTU)"),
    (f"ssh: {UNKNOWN}\r\n{NO_WAY}", False, "way failed", f"(ssh: {UNKNOWN})", TRY),
    (BEHIND.format("connect failed: Connection refused"), True, *REFUSED),
    (
        BEHIND.format("connect failed: No route to host"),
        True,
        "way does",
        "(No route to host)",
        TRY,
    ),
    (BEHIND.format("prohibited: open failed"), True, "way does", "(prohibited: open failed)", TRY),
    (
        "Certificate invalid: expired\r\nHost key verification failed.",
        False,
        "(Certificate invalid: expired)",
        "the site",
    ),
    (f"{SIGNING}\r\nu@a: Permission denied (publickey).", False, "agent refused", "touch or"),
    ("u@a: Permission denied (gssapi-keyex,gssapi-with-mic).", False, "gssapi", "kinit"),
    ("u@a: Permission denied (gssapi-keyex,password).", False, "gssapi", "kinit"),
    (
        "u@a: Permission denied (publickey,gssapi-with-mic).",
        False,
        "gssapi",
        "kinit, or ssh-copy-id",
    ),
    (
        "sign_and_send_pubkey: no mutual signature supported\r\nu@a: Permission denied (publickey).",
        False,
        "old",
        "-t ed25519",
    ),
    (
        "u@a: Permission denied (keyboard-interactive).",
        False,
        "interactive",
        "log in once, with ControlMaster",
    ),
    (f"Warning: x\r\n{PAM}\r\nConnection closed by 10.0.0.7 port 22", False, PAM, "salloc"),
    (
        "Warning: x\r\nConnection closed by 10.0.0.7 port 22",
        False,
        "no reason (Connection closed",
        "journalctl",
    ),
    ("banner\nsomething else\n", False, "failed:", "something else", TRY),
    ("", False, "failed:", "no output", "ssh -v -p 22022 u@a true "),
]


@pytest.mark.parametrize(("errors", "is_lost", "words"), [(*row[:2], row[2:]) for row in ERRORS])
def test_what_mends_an_error_of_ssh(errors, is_lost, words, tmp_path, monkeypatch):
    """tests/promises/test_ssh.py has the errors that a test can provoke."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/id_ed25519").touch()
    complaints._refused_because.cache_clear()
    host = replace(A, user="u", port=22022)
    answer = Answer(host, NEEDS["python"], SSH, 255, "", errors, has_begun=False)
    assert re.fullmatch(error(*words), answer.why)
    assert answer.is_lost is is_lost
    assert replace(answer, exit_code=None).is_lost
    assert not replace(answer, has_begun=True).is_lost


def test_an_ssh_that_does_not_start_is_no_fault_of_a_host(tmp_path, monkeypatch):
    """As after conda's libcrypto stands before the system's, by LD_LIBRARY_PATH."""
    why = "ssh: symbol lookup error: ssh: undefined symbol: EVP_KDF_ctrl"
    executable(tmp_path / "ssh", f"echo '{why}' >&2; exit 127")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answer = Answer(A, NEEDS["python"], SSH, 127, "", f"{why}\n", has_begun=False)
    assert answer.why.startswith(f"ssh does not run here: {why}.\n")


@pytest.mark.parametrize(
    ("code", "errors", "transport", "sentence"),
    [
        (
            1,
            "Password change required but no TTY available.\n",
            SSH,
            error("has expired.", "ssh a: ", "ssh a"),
        ),
        (NO_PROGRAM, "", SSH, error("missing.", "a: /venv/bin/python ", "install it")),
        (None, "", SSH, error("no answer in", "ssh a: ", " 15 s", "(MTU)", "ssh -v a true")),
        *(
            (
                *(code, errors, QRSH),
                error("where ssh is allowed", "qrsh -inherit a ", reason, INSTEAD),
            )
            for code, errors, reason in (
                (1, "first\ndenied.\n", "denied"),
                (1, "", "no output"),
                (None, "", "no answer in 15 s"),
            )
        ),
    ],
)
def test_a_host_that_gives_no_answer(code, errors, transport, sentence):
    answer = Answer(A, NEEDS["python"], transport, code, "", errors, has_begun=False)
    assert re.fullmatch(sentence, answer.why)
