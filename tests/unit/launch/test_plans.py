"""Plans as a dry run prints them: hosts, ranks, variables and flags, for one mpirun that starts nothing.

Tests mpiddp/launch/main.py, plan.py, variables.py and place.py.
python -m pytest tests/unit/launch/test_plans.py
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.launch.main import main
from mpiddp.launch.options import parse_options
from mpiddp.launch.place import key_of
from mpiddp.launch.plan import AGENT, make_plan
from tests.support.machine import an_mpirun

HERE = socket.gethostname()
Plan = Callable[..., tuple[dict[str, str], list[str], str]]


@pytest.fixture(name="plan")
def a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Plan:
    """The variables that mpirun's environment gets, its arguments, and stderr, of a dry run."""
    for name in [each for each in os.environ if each.startswith(("MPIDDP_", "MASTER_", "OMPI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    mpirun = an_mpirun(tmp_path)

    def plan(
        *options: str, job: tuple[str, ...] = ("--", "ls")
    ) -> tuple[dict[str, str], list[str], str]:
        assert main(["--mpirun", mpirun, *options, "--dry-run", *job]) == 0
        out, err = capfd.readouterr()
        words = shlex.split(next(line for line in out.splitlines() if mpirun in line))
        at = words.index(mpirun)
        return dict(word.split("=", 1) for word in words[:at]), words[at + 1 :], err

    return plan


def value(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


@pytest.mark.parametrize(
    ("job", "rank"),
    [
        (("-m", "train", "--lr", "1"), "mpiddp run -m train --lr 1"),
        (("--", "ls", "-v"), "mpiddp run -- ls -v"),
        (("-m", "mpiddp", "run", "s"), "mpiddp run s"),
        (("-m", "mpiddp"), "mpiddp run -m mpiddp"),
    ],
)
def test_the_command_of_a_rank(plan: Plan, job: tuple[str, ...], rank: str) -> None:
    arguments = plan("-H", "localhost:1", job=job)[1]
    own = [*AGENT[:-1], *rank.split()] if "-m" in AGENT else [*AGENT, *rank.split()[1:]]
    assert arguments[arguments.index(sys.executable) + 1 :] == own


def test_a_pipe_of_hosts_is_read_once(plan: Plan, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"localhost slots=2\n")
    os.close(write)
    path = f"/dev/fd/{read}"
    for _ in range(2):
        assert plan("--hostfile", path)[0]["MPIDDP_PLACEMENT"] == f"{HERE}:2"
    os.close(read)


# --- what earlier jobs have shown ---


LISTED = Hosts("hosts", (Host("A.invalid"), Host("b.invalid"), Host("localhost")))


@pytest.mark.parametrize(("slots", "has_one"), [(0, False), (1, True)])
def test_a_job_on_this_machine_has_no_memory(tmp_path: Path, slots: int, has_one: bool) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text(f"localhost slots=1\nb.invalid slots={slots}\n")
    where = ["--mpirun", an_mpirun(tmp_path), "--hostfile", str(hostfile), "--no-check", "-n", "1"]
    for of_drill in ({}, {"MPIDDP_DRILL": "1"}):
        plan = make_plan(parse_options([*where, "--", "true"]), {**os.environ, **of_drill})
        assert (plan.memory is not None) == (has_one and not of_drill)


@pytest.mark.parametrize(
    ("name", "key"), [("B.invalid", "b.invalid"), (HERE, "localhost"), ("c", "c")]
)
def test_the_key_of_a_host_that_mpirun_got(name: str, key: str) -> None:
    assert key_of(name, LISTED) == key


def test_a_verbose_plan_says_what_it_takes(plan: Plan, tmp_path: Path) -> None:
    err = plan("-H", "a.invalid:1,b.invalid:2", "-v")[2].splitlines()
    assert err.pop().startswith("mpiddp: they do not get ")
    assert err.pop().startswith("mpiddp: of this shell, the ranks get ")
    assert err == [
        f"mpiddp: Open MPI 5.0.11, {tmp_path}/mpirun",
        "mpiddp: ssh reaches the other hosts",
        "mpiddp: a.invalid: rank 0",
        "mpiddp: b.invalid: ranks 1-2",
    ]
    err = plan("-H", "localhost:1", "-v", "--interface", "127.0.0.1")[2].splitlines()
    assert err[1:3] == [
        "mpiddp: lo (127.0.0.1) leads to the other hosts",
        f"mpiddp: {HERE}: rank 0",
    ]
    assert "reaches" not in plan("-H", "a.invalid:1,b.invalid:1")[2]
