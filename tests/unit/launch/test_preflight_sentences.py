"""What the preflight says about a host that cannot be used, and about hosts that differ."""

import re
import socket
from dataclasses import replace

import pytest

from mpiddp.hosts.complaints import NO_PROGRAM, Answer
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.transport import QRSH, SSH
from mpiddp.launch.plan.preflight import HostInfo, _complaint
from tests.support.errors import error

A = Host("a")
NEEDS = {
    "python": "/venv/bin/python",
    "mpirun": "/mpi/bin/mpirun",
    "daemon": "/mpi/bin/prted",
    "folder": "/work",
    "interface": "",
    "program": "",
    "script": "",
    "uses_gpus": True,
}
ETH0 = Interface("eth0", "10.0.0.5", "10.0.0.0/24")
FINE = HostInfo(A, True, True, True, "mpirun 5.0", "2.6", "4.1", (), (ETH0,))
HERE = socket.gethostname()
INSTEAD = ": --hostfile $PE_HOSTFILE "
TRY = "Try: ssh -p 22022 u@a true "
# The last lines of ssh where no jump host leads to the host.
NO_WAY = (
    "kex_exchange_identification: Connection closed by remote host\r\n"
    "Connection closed by UNKNOWN port 65535\r\n"
)


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


UNKNOWN = "Could not resolve hostname {}: Name or service not known"
AT_22 = "ssh: connect to host a port 22: "
WAY = f"({HERE} → a tcp/22022)"
REFUSED = ("connection refused", (WAY, ": a port=N "))
BEHIND = "channel 0: open failed: {}\r\nstdio forwarding failed\r\n" + NO_WAY


@pytest.mark.parametrize(
    ("errors", "words", "values"),
    [
        ("Host key verification failed.", "host key is unknown", (": mpiddp hosts keys ",)),
        (NO_WAY, "closes each login before", ("MaxStartups", TRY)),
        (f"{AT_22}No route to host", "no route", (WAY,)),
        (f"{AT_22}Network is unreachable", "no route", (WAY,)),
        ("Timeout, server a not responding.", "any more", (WAY, "Check that")),
        (f"{AT_22}Connection timed out", "Check that the", (" 5 s", WAY)),
        ("Connection to 10.0.0.2 port 22 timed out", "half-way", (WAY, "timeout 30s", "(MTU)")),
        (
            f"ssh: {UNKNOWN.format('b')}\r\n{NO_WAY}",
            "way failed",
            (f"(ssh: {UNKNOWN.format('b')})", TRY),
        ),
        (BEHIND.format("connect failed: Connection refused"), *REFUSED),
        (
            BEHIND.format("connect failed: No route to host"),
            "way does",
            ("(No route to host)", TRY),
        ),
        (BEHIND.format("prohibited: open failed"), "way does", ("(prohibited: open failed)", TRY)),
        ("banner\nsomething else\n", "failed:", ("something else", TRY)),
        ("", "failed:", ("no output", "Try: ssh -v -p 22022 u@a true ")),
    ],
)
def test_what_mends_an_error_of_ssh(errors, words, values):
    """tests/promises/test_ssh.py has the errors that a test can provoke."""
    host = replace(A, user="u", port=22022)
    answer = Answer(host, NEEDS["python"], SSH, 255, "", errors, has_begun=False)
    assert re.fullmatch(error(words, *values), answer.why)


@pytest.mark.parametrize(
    ("errors", "is_lost"),
    [
        (f"{AT_22}No route to host", True),
        (f"{AT_22}Connection refused", True),
        (f"{AT_22}Connection timed out", True),
        ("Connection to 10.0.0.2 port 22 timed out", True),
        ("Timeout, server a not responding.", True),
        (BEHIND.format("connect failed: No route to host"), True),
        (NO_WAY, False),
        ("kex_exchange_identification: read: Connection reset by peer", False),
        ("Host key verification failed.", False),
        ("Connection timed out: a banner\nu@a: Permission denied (publickey).", False),
    ],
)
def test_only_a_host_without_a_way_to_it_is_lost(errors, is_lost):
    answer = Answer(A, NEEDS["python"], SSH, 255, "", errors.replace("\n", "\r\n"), has_begun=False)
    assert answer.is_lost is is_lost
    assert replace(answer, exit_code=None).is_lost
    assert not replace(answer, has_begun=True).is_lost


@pytest.mark.parametrize(
    ("code", "errors", "transport", "sentence"),
    [
        (NO_PROGRAM, "", SSH, error("missing. Install", "a: /venv/bin/python ")),
        (None, "", SSH, error("no answer in", "ssh a: ", " 15 s", "Try: ssh a true ")),
        *(
            (*(code, errors, QRSH), error("Where ssh", "qrsh -inherit a ", reason, INSTEAD))
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
