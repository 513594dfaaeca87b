"""What the preflight says about a host that cannot be used, and about hosts that differ.

Tests mpiddp/launch/preflight.py. No host is contacted here.
python -m pytest tests/unit/launch/test_preflight_sentences.py
"""

from __future__ import annotations

import json
import re
import socket
from dataclasses import asdict, replace

import pytest

from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.ssh import NO_PROGRAM, Answer
from mpiddp.hosts.transport import QRSH, SSH
from mpiddp.launch.preflight import (
    HostInfo,
    Needs,
    _complaint,
    _no_answer,
    _read,
    disagreements,
    strangers,
)
from tests.support.errors import error

A, B, C = Host("a"), Host("b"), Host("c")
NEEDS = Needs("/venv/bin/python", "/mpi/bin/mpirun", "/mpi/bin/prted", "/work", "/bin")
ETH0 = Interface("eth0", "10.0.0.5", "10.0.0.0/24")
FINE = HostInfo(A, True, True, True, "mpirun 5.0", "2.6", "4.1", 0, (ETH0,))
HERE = socket.gethostname()
INSTEAD = ": --hostfile $PE_HOSTFILE "
TRY = "Try: ssh -p 22022 u@a true "
# The last lines of ssh where no jump host leads to the host.
NO_WAY = (
    "kex_exchange_identification: Connection closed by remote host\r\n"
    "Connection closed by UNKNOWN port 65535\r\n"
)


@pytest.mark.parametrize(
    ("info", "needs", "sentence"),
    [
        (
            replace(FINE, has_folder=False),
            NEEDS,
            error("missing. Copy", "a: ", " /work ", "mpiddp hosts push"),
        ),
        (
            replace(FINE, mpirun=None, has_daemon=False),
            NEEDS,
            error("missing or does", "a: /mpi/bin/mpirun "),
        ),
        (
            replace(FINE, has_daemon=False),
            NEEDS,
            error("missing or does", "a: /mpi/bin/prted "),
        ),
        (
            replace(FINE, has_program=False),
            replace(NEEDS, program="singularity"),
            error("Install it on", "a: singularity is not on PATH"),
        ),
        (
            replace(FINE, has_program=False),
            replace(NEEDS, program="/opt/run"),
            error("Install it on", "a: /opt/run is missing or not executable"),
        ),
        (
            replace(FINE, interfaces=(ETH0, replace(ETH0, name="ib0"))),
            replace(NEEDS, interface="eth1"),
            error("interface", '"eth1"', " a,", "eth0 and ib0"),
        ),
    ],
)
def test_the_problem_of_one_host(info: HostInfo, needs: Needs, sentence: str) -> None:
    assert re.fullmatch(sentence, _complaint(info, needs))


def test_a_tool_of_gpus_that_does_not_answer() -> None:
    """It matters only where a rank may use GPUs."""
    silent = error("amd-smi, xpu-smi", "a: nvidia-smi", "CUDA_VISIBLE_DEVICES=")
    assert re.fullmatch(silent, _complaint(replace(FINE, gpus=None), NEEDS))
    assert _complaint(replace(FINE, gpus=None), replace(NEEDS, uses_gpus=False)) == ""


@pytest.mark.parametrize(
    ("errors", "sentence"),
    [
        (
            "ssh: Could not resolve hostname a: Name or service not known",
            error("be resolved", "a: ", HERE),
        ),
        (
            "REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.",
            error("changed. Check", "ssh a: ", "run: ssh-keygen -R a "),
        ),
        (
            "Host key verification failed.",
            error(
                ">> ~/.ssh/known_hosts",
                *("ssh a: ", ": ssh-keyscan -p 22022 a >> ~/.ssh/known_hosts "),
            ),
        ),
        (
            "u@a: Permission denied (publickey,password).",
            error(
                "Run: ssh-copy-id",
                *("ssh a: ", "(publickey,password)", "Run: ssh-copy-id -p 22022 u@a "),
            ),
        ),
        (
            "ssh: connect to host a port 22: Connection refused",
            error("connection refused", "ssh a: ", ": a port=N "),
        ),
        *(
            (
                f"ssh: connect to host a port 22: {reason}",
                error("no route", "ssh a: ", HERE),
            )
            for reason in ("No route to host", "Network is unreachable")
        ),
        (
            "ssh: connect to host a port 22: Connection timed out",
            error("s. Check that the", "ssh a: ", " 5 s"),
        ),
        (
            "ssh: Could not resolve hostname bastion: Name or service not known\r\n" + NO_WAY,
            error(
                "way failed",
                "ssh a: ",
                "(ssh: Could not resolve hostname bastion: Name or service not known)",
                TRY,
            ),
        ),
        (
            "channel 0: open failed: connect failed: Connection refused\r\n"
            "stdio forwarding failed\r\n" + NO_WAY,
            error("connection refused", "ssh a: ", ": a port=N "),
        ),
        *(
            (
                f"channel 0: open failed: {said}\r\nstdio forwarding failed\r\n{NO_WAY}",
                error("way does", "ssh a: ", f"({reason})", TRY),
            )
            for said, reason in (
                ("connect failed: Name or service not known", "Name or service not known"),
                ("connect failed: No route to host", "No route to host"),
                ("administratively prohibited: open failed",) * 2,
            )
        ),
        ("banner\nsomething else\n", error("failed:", "ssh a ", "something else", TRY)),
        ("", error("failed:", "ssh a ", "no output", TRY)),
    ],
)
def test_what_mends_an_error_of_ssh(errors: str, sentence: str) -> None:
    host = replace(A, user="u", port=22022)
    assert re.fullmatch(
        sentence, _no_answer(host, Answer(255, "", errors, has_begun=False), NEEDS, SSH)
    )


@pytest.mark.parametrize(
    ("code", "errors", "transport", "sentence"),
    [
        (
            NO_PROGRAM,
            "",
            SSH,
            error("Install it at", "a: /venv/bin/python ", ": mpiddp hosts push "),
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
    said = _no_answer(A, Answer(code, "", errors, has_begun=False), NEEDS, transport)  # type: ignore[arg-type]
    assert re.fullmatch(sentence, said)


def test_the_answer_is_the_last_line_that_is_one() -> None:
    fields = {name: value for name, value in asdict(FINE).items() if name != "host"}
    line = json.dumps(fields)
    assert _read(A, Answer(0, f"welcome\n{line}\n{{}}\n", "")) == FINE
    assert _read(A, Answer(0, "welcome\n", "")) is None
    assert _read(A, Answer(0, line[:-1], "")) is None
    assert _read(A, Answer(0, '{"has_folder": true}', "")) is None


def test_versions_that_differ() -> None:
    others = (replace(FINE, host=B), replace(FINE, host=C, torch=None))
    assert disagreements([FINE, others[0]], "/mpi/bin/mpirun") == []
    (torch,) = disagreements([FINE, *others], "/mpi/bin/mpirun")
    assert re.fullmatch(error("same version", "torch ", "2.6 on a and b, missing on c"), torch)
    changed = replace(FINE, host=B, mpi4py="4.0", mpirun="mpirun 4.1")
    mpi4py, mpi = disagreements([FINE, changed], "/mpi/bin/mpirun")
    assert re.fullmatch(error("same version", "mpi4py ", "4.1 on a, 4.0 on b"), mpi4py)
    versions = "mpirun 5.0 on a, mpirun 4.1 on b"
    assert re.fullmatch(error("same MPI on", "/mpi/bin/mpirun ", versions), mpi)


def test_a_host_that_differs_from_those_that_have_run_the_job() -> None:
    infos = [FINE, replace(FINE, host=B, torch="2.5"), replace(FINE, host=C)]
    for proven, odd in (([A], [B]), ([], [B]), ([B], [A, C]), ([C], [B])):
        found = strangers(infos, proven, "/mpi/bin/mpirun")
        assert list(found) == odd
    assert re.fullmatch(error("same version", "torch ", "2.6 on c, 2.5 on b"), found[B])
    assert strangers([], [], "mpirun") == {}
