"""What the preflight says about a host that cannot be used, and about hosts that differ.

Tests mpiddp/launch/preflight.py. No host is contacted here.
python -m pytest tests/unit/launch/test_preflight_sentences.py
"""

from __future__ import annotations

import json
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

A, B, C = Host("a"), Host("b"), Host("c")
NEEDS = Needs("/venv/bin/python", "/mpi/bin/mpirun", "/mpi/bin/prted", "/work", "/bin")
ETH0 = Interface("eth0", "10.0.0.5", "10.0.0.0/24")
FINE = HostInfo(A, True, True, True, "mpirun 5.0", "2.6", "4.1", 0, (ETH0,))
HERE = socket.gethostname()
# The last lines of ssh where no jump host leads to the host.
NO_WAY = (
    "kex_exchange_identification: Connection closed by remote host\r\n"
    "Connection closed by UNKNOWN port 65535\r\n"
)


@pytest.mark.parametrize(
    ("info", "needs", "sentence"),
    [
        (FINE, NEEDS, None),
        (
            replace(FINE, has_folder=False),
            NEEDS,
            "a: the working folder /work is missing. "
            "Copy it there with mpiddp hosts push, or launch from a folder that every host has.",
        ),
        (
            replace(FINE, mpirun=None, has_daemon=False),
            NEEDS,
            "a: /mpi/bin/mpirun is missing or does not run. "
            "Install the same MPI at the same path on every host.",
        ),
        (
            replace(FINE, has_daemon=False),
            NEEDS,
            "a: /mpi/bin/prted is missing or does not run. "
            "Install the same MPI at the same path on every host.",
        ),
        (
            replace(FINE, has_program=False),
            replace(NEEDS, program="singularity"),
            "a: singularity is not on PATH. Install it on every host.",
        ),
        (
            replace(FINE, has_program=False),
            replace(NEEDS, program="/opt/run"),
            "a: /opt/run is missing or not executable. Install it on every host.",
        ),
        (FINE, replace(NEEDS, interface="10.0.0.0/16"), None),
        (
            replace(FINE, interfaces=(ETH0, replace(ETH0, name="ib0"))),
            replace(NEEDS, interface="eth1"),
            'interface "eth1" is not on a, which has eth0 and ib0.',
        ),
    ],
)
def test_the_problem_of_one_host(info: HostInfo, needs: Needs, sentence: str | None) -> None:
    assert _complaint(info, needs) == sentence


def test_a_tool_of_gpus_that_does_not_answer() -> None:
    """It matters only where a rank may use GPUs."""
    assert "a" in str(_complaint(replace(FINE, gpus=None), NEEDS))
    assert _complaint(replace(FINE, gpus=None), replace(NEEDS, uses_gpus=False)) is None


@pytest.mark.parametrize(
    ("errors", "sentence"),
    [
        (
            "ssh: Could not resolve hostname a: Name or service not known",
            f"a: cannot be resolved from {HERE}. Add it to DNS or /etc/hosts.",
        ),
        (
            "REMOTE HOST IDENTIFICATION HAS CHANGED!\nHost key verification failed.",
            "ssh a: its host key has changed. Check that it is the same host, "
            "then run: ssh-keygen -R a",
        ),
        (
            "Host key verification failed.",
            "ssh a: its host key is unknown. Check it, then: ssh-keyscan -p 22022 a >> ~/.ssh/known_hosts",
        ),
        (
            "u@a: Permission denied (publickey,password).",
            "ssh a: permission denied (publickey,password). Run: ssh-copy-id -p 22022 u@a",
        ),
        (
            "ssh: connect to host a port 22: Connection refused",
            "ssh a: connection refused. "
            "Start sshd there, or give its port in the hostfile: a port=N",
        ),
        *(
            (
                f"ssh: connect to host a port 22: {error}",
                f"ssh a: no route from {HERE}. Check that the host is on and the network is up.",
            )
            for error in ("No route to host", "Network is unreachable")
        ),
        (
            "ssh: connect to host a port 22: Connection timed out",
            "ssh a: no answer in 5 s. Check that the host is on and the network is up.",
        ),
        (
            "ssh: Could not resolve hostname bastion: Name or service not known\r\n" + NO_WAY,
            "ssh a: the jump host on the way failed (ssh: Could not resolve hostname bastion: "
            "Name or service not known). Try: ssh -p 22022 u@a true",
        ),
        (
            "channel 0: open failed: connect failed: Connection refused\r\n"
            "stdio forwarding failed\r\n" + NO_WAY,
            "ssh a: connection refused. "
            "Start sshd there, or give its port in the hostfile: a port=N",
        ),
        *(
            (
                f"channel 0: open failed: {error}\r\nstdio forwarding failed\r\n{NO_WAY}",
                f"ssh a: the jump host on the way does not reach it ({reason}). Try: ssh -p 22022 u@a true",
            )
            for error, reason in (
                ("connect failed: Name or service not known", "Name or service not known"),
                ("connect failed: No route to host", "No route to host"),
                ("administratively prohibited: open failed",) * 2,
            )
        ),
        ("banner\nsomething else\n", "ssh a failed: something else. Try: ssh -p 22022 u@a true"),
        ("", "ssh a failed: no output. Try: ssh -p 22022 u@a true"),
    ],
)
def test_what_mends_an_error_of_ssh(errors: str, sentence: str) -> None:
    host = replace(A, user="u", port=22022)
    assert _no_answer(host, Answer(255, "", errors), NEEDS, SSH) == sentence


@pytest.mark.parametrize(
    ("code", "errors", "transport", "sentence"),
    [
        (
            NO_PROGRAM,
            "",
            SSH,
            "a: /venv/bin/python is missing. Install it at the same path on every host, or copy it there: "
            "mpiddp hosts push",
        ),
        (None, "", SSH, "ssh a: no answer in 15 s. Try: ssh a true"),
        (
            1,
            "first\ndenied.\n",
            QRSH,
            "qrsh -inherit a failed: denied. Where ssh is allowed, it can be used instead: "
            "--hostfile $PE_HOSTFILE",
        ),
        (
            1,
            "",
            QRSH,
            "qrsh -inherit a failed: no output. Where ssh is allowed, it can be used instead: "
            "--hostfile $PE_HOSTFILE",
        ),
        (
            None,
            "",
            QRSH,
            "qrsh -inherit a failed: no answer in 15 s. Where ssh is allowed, it can be used instead: "
            "--hostfile $PE_HOSTFILE",
        ),
    ],
)
def test_a_host_that_gives_no_answer(
    code: int | None, errors: str, transport: object, sentence: str
) -> None:
    assert _no_answer(A, Answer(code, "", errors), NEEDS, transport) == sentence  # type: ignore[arg-type]


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
    assert disagreements([FINE, *others], "/mpi/bin/mpirun") == [
        "torch differs: 2.6 on a and b, missing on c. Install the same version on every host."
    ]
    changed = replace(FINE, host=B, mpi4py="4.0", mpirun="mpirun 4.1")
    assert disagreements([FINE, changed], "/mpi/bin/mpirun") == [
        "mpi4py differs: 4.1 on a, 4.0 on b. Install the same version on every host.",
        "/mpi/bin/mpirun differs: mpirun 5.0 on a, mpirun 4.1 on b. Install the same MPI on every host.",
    ]


def test_a_host_that_differs_from_those_that_have_run_the_job() -> None:
    old = replace(FINE, host=B, torch="2.5")
    infos = {A: FINE, B: old, C: replace(FINE, host=C)}
    sentence = "b: torch differs: 2.6 on a, 2.5 on b. Install the same version on every host."
    assert strangers(infos, [A], "/mpi/bin/mpirun") == {B: sentence}
    assert strangers(infos, [A, B], "/mpi/bin/mpirun") == {}  # they have never agreed
    assert strangers(infos, [], "/mpi/bin/mpirun") == {}
