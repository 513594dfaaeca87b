"""What the preflight says about a host that cannot be used, and about hosts that differ.

Tests mpiddp/launch/preflight.py and mpiddp/hosts/complaints.py. No host is contacted here.
python -m pytest tests/unit/launch/test_preflight_sentences.py
"""

from __future__ import annotations

import re
import socket
from dataclasses import replace

import pytest

from mpiddp.hosts.complaints import NO_PROGRAM, Answer, no_answer
from mpiddp.hosts.gpu_health import Health
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.transport import QRSH, SSH
from mpiddp.launch.preflight import (
    HostInfo,
    Needs,
    _complaint,
)
from tests.support.errors import error

A, B = Host("a"), Host("b")
NEEDS = Needs("/venv/bin/python", "/mpi/bin/mpirun", "/mpi/bin/prted", "/work", "/bin")
ETH0 = Interface("eth0", "10.0.0.5", "10.0.0.0/24")
FINE = HostInfo(A, True, True, True, "mpirun 5.0", "2.6", "4.1", Health(), (ETH0,))
HERE = socket.gethostname()
INSTEAD = ": --hostfile $PE_HOSTFILE "
TRY = "Try: ssh -p 22022 u@a true "
# The last lines of ssh where no jump host leads to the host.
NO_WAY = (
    "kex_exchange_identification: Connection closed by remote host\r\n"
    "Connection closed by UNKNOWN port 65535\r\n"
)


MISSING = "missing or does not run. Install the same MPI"


@pytest.mark.parametrize(
    ("has", "needs", "words", "values"),
    [
        ({"has_folder": False}, {}, "missing. Copy", ("a: ", " /work ", "mpiddp hosts push")),
        ({"mpirun": None, "has_daemon": False}, {}, MISSING, ("a: /mpi/bin/mpirun ",)),
        ({"has_daemon": False}, {}, MISSING, ("a: /mpi/bin/prted ",)),
        ({"has_program": False}, {"program": "x"}, "Install it on", ("a: x is not on PATH",)),
        ({"has_program": False}, {"program": "/x"}, "Install it", ("a: /x is missing or not ex",)),
        ({"has_script": False}, {"script": "t.py"}, "Copy it", ("a: t.py ", "launch --push")),
        ({}, {"interface": "eth1"}, "interface", ('"eth1"', " a,", "has eth0.")),
        ({"python": "2.7.18"}, {}, "same Python", ("a: /venv/bin/python is Python 2.7 there, 3.",)),
        # A tool of GPUs that does not answer matters only where a rank may use GPUs.
        ({"health": None}, {}, "amd-smi, xpu-smi", ("a: nvidia-smi", "CUDA_VISIBLE_DEVICES=")),
    ],
)
def test_the_problem_of_one_host(has, needs, words, values):
    info = replace(FINE, **has)
    assert re.fullmatch(error(words, *values), _complaint(info, info, replace(NEEDS, **needs)))
    without = replace(FINE, health=None)
    assert _complaint(without, without, replace(NEEDS, uses_gpus=False)) == ""


UNKNOWN = "Could not resolve hostname {}: Name or service not known"
AT_22 = "ssh: connect to host a port 22: "
WAY = f"({HERE} → a tcp/22022)"
REFUSED = ("connection refused", (WAY, ": a port=N "))
BEHIND = "channel 0: open failed: {}\r\nstdio forwarding failed\r\n" + NO_WAY


@pytest.mark.parametrize(
    ("errors", "words", "values"),
    [
        (f"ssh: {UNKNOWN.format('a')}", "a: cannot be resolved", (HERE,)),
        ("REMOTE HOST IDENTIFICATION HAS CHANGED!", "changed. Check", (" -R '[a]:22022' ",)),
        ("Host key verification failed.", ">> ~/.ssh/known_hosts", (": ssh-keyscan -p 22022 a ",)),
        (
            "u@a: Permission denied (publickey,password).",
            *("Run: ssh-copy-id", ("(publickey,password)", "Run: ssh-copy-id -p 22022 u@a ")),
        ),
        (f"{AT_22}Connection refused", *REFUSED),
        (f"{AT_22}No route to host", "no route", (WAY,)),
        (f"{AT_22}Network is unreachable", "no route", (WAY,)),
        ("Timeout, server a not responding.", "any more", (WAY, "Check that")),
        (f"{AT_22}Connection timed out", "Check that the", (" 5 s", WAY)),
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
        # A banner says what it likes: only ssh's own lines count.
        (
            f"Sessions end: Connection timed out. Permission denied (x).\n{AT_22}No route to host",
            *("no route", (WAY,)),
        ),
        (
            "Permissions 0644 for '/k' are too open.\r\nu@a: Permission denied (publickey).",
            *("does not use", ("key /k, because", "chmod 600 /k ")),
        ),
        ("", "failed:", ("no output", "Try: ssh -v -p 22022 u@a true ")),
    ],
)
def test_what_mends_an_error_of_ssh(errors, words, values):
    host = replace(A, user="u", port=22022)
    answer = Answer(255, "", errors, has_begun=False)
    said = no_answer(host, NEEDS.python, answer)
    assert re.fullmatch(error(words, *values), said)


@pytest.mark.parametrize(
    ("code", "errors", "transport", "sentence"),
    [
        (
            NO_PROGRAM,
            "",
            SSH,
            error("missing. Install", "a: /venv/bin/python "),
        ),
        (None, "", SSH, error("no answer in", "ssh a: ", " 15 s", "Try: ssh a true ")),
        *(
            (
                *(code, errors, QRSH),
                error("Where ssh", "qrsh -inherit a ", reason, INSTEAD),
            )
            for code, errors, reason in (
                (1, "first\ndenied.\n", "denied"),
                (1, "", "no output"),
                (None, "", "no answer in 15 s"),
            )
        ),
    ],
)
def test_a_host_that_gives_no_answer(
    code: int | None, errors: str, transport: object, sentence: str
) -> None:
    answer = Answer(code, "", errors, has_begun=False)
    said = no_answer(A, NEEDS.python, answer, transport)  # type: ignore[arg-type]
    assert re.fullmatch(sentence, said)


def test_a_program_that_hangs_is_not_blamed_on_ssh() -> None:
    for transport in (SSH, QRSH):
        said = no_answer(A, NEEDS.python, Answer(None, "", ""), transport)
        assert re.fullmatch(error("file server", "a: /venv/bin/python "), said)


def test_versions_that_differ() -> None:
    assert _complaint(replace(FINE, host=B), FINE, NEEDS) == ""
    for change, words, values in (
        ({"torch": None}, "same version", ("torch ", "2.6 on a, missing on b")),
        ({"mpi4py": "4.0", "mpirun": "x"}, "same version", ("mpi4py ", "4.1 on a, 4.0 on b")),
        (
            {"mpirun": "mpirun 4"},
            "same MPI on",
            ("/mpi/bin/mpirun ", "mpirun 5.0 on a, mpirun 4 on b"),
        ),
    ):
        said = _complaint(replace(FINE, host=B, **change), FINE, NEEDS)
        assert re.fullmatch(error(words, *values), said)
