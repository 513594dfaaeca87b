"""The known cause below a verdict: of what the first rank said, else of what the others and mpirun said.

Tests mpiddp/launch/supervise/known_cause.py. tests/promises/test_doctor.py tests the table.
python -m pytest tests/unit/launch/test_known_cause.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mpiddp.explain.failures import FAILURES
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.processes import OomKills
from mpiddp.hosts.transport import Transport
from mpiddp.launch.monitor.ranks import Ranks
from mpiddp.launch.streams.tail import Tail
from mpiddp.launch.supervise import kernel_kills
from mpiddp.launch.supervise.known_cause import OF_THE_HOST, known_cause, look_into
from mpiddp.launch.supervise.verdict import (
    FirstFailure,
    History,
    MpirunEnd,
    killed_first,
    verdict,
)
from mpiddp.protocol.server import Message

MPIRUN = -1
OUT_OF_MEMORY = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
RESET = "RuntimeError: [/gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:4711. GLHF"
WAITED = "RuntimeError: [a.cc:78] Timed out waiting 18000ms for recv operation to complete"
NO_DAEMON = b"ORTE was unable to reliably start one or more daemons.\n"


def cause(error: str | None, *printed: tuple[int, bytes]) -> str | None:
    """The row that explains a job whose rank 0 failed first with `error`, None for no first rank."""
    tail = Tail()
    for rank, text in printed:
        tail.add(rank, text)
    found = known_cause(None if error is None else FirstFailure(0, "a", error), tail)
    return found.failure.id if found else None


@pytest.mark.parametrize(
    ("error", "printed", "expected"),
    [
        (OUT_OF_MEMORY.decode(), (), "cuda-out-of-memory"),
        ("", [(0, OUT_OF_MEMORY)], "cuda-out-of-memory"),
        ("", [(0, OUT_OF_MEMORY[:20]), (1, b"x\n"), (0, OUT_OF_MEMORY[20:])], "cuda-out-of-memory"),
        # The first rank's error is a consequence or a symptom, and another rank has the cause.
        (RESET, [(1, OUT_OF_MEMORY)], "cuda-out-of-memory"),
        (WAITED, [(1, OUT_OF_MEMORY)], "cuda-out-of-memory"),
        (WAITED, (), "gloo-timeout"),
        (None, [(MPIRUN, NO_DAEMON)], "mpi-host-not-started"),
        # Its own error is the cause, whatever the others have printed.
        ("ValueError: 3 channels", [(1, OUT_OF_MEMORY)], None),
        ("", [(0, b"ValueError: 3 channels\n")], None),
        (None, [(1, RESET.encode())], None),
        (None, (), None),
    ],
)
def test_one_row_explains_the_job_or_none(
    error: str | None, printed: tuple[tuple[int, bytes], ...], expected: str | None
) -> None:
    assert cause(error, *printed) == expected


LOST = [Message(1, "lost", {"silent": True}, 1.0)]
ENDED_EARLY = [
    Message(1, "exited", {}, 1.0),
    Message(
        0,
        "failed",
        {"code": 1, "error": RESET, "traceback": True, "is_verdict": False},
        1.1,
    ),
]


@pytest.mark.parametrize(
    ("messages", "text", "at_fault"),
    [
        (LOST, b"PRTE has lost communication with a remote daemon.\n", "b"),
        (ENDED_EARLY, b"Caught signal 11 (Segmentation fault)\n", ""),
    ],
)
def test_a_verdict_that_is_the_cause_needs_none(
    messages: list[Message], text: bytes, at_fault: str
) -> None:
    ranks, tail = Ranks(("a", "b")), Tail()
    for message in messages:
        ranks.note(message)
    tail.add(MPIRUN, text)
    history = History(ranks, MpirunEnd("mpirun", 1))
    assert known_cause(None, tail) is not None
    assert look_into(history, verdict(history), tail) == ("", at_fault)


def test_only_the_end_of_a_long_output_is_kept() -> None:
    tail = Tail()
    tail.add(0, OUT_OF_MEMORY)
    for _ in range(1000):
        tail.add(1, b"x" * 99 + b"\n")
    assert known_cause(None, tail) is None
    tail.add(1, b"y" * (1 << 20) + OUT_OF_MEMORY)
    kept = "\n".join(line for lines in tail.by_rank().values() for line in lines)
    assert len(kept) < 1 << 16
    assert known_cause(None, tail) is not None


def test_rows_of_the_host_are_in_the_table() -> None:
    assert set(OF_THE_HOST) <= {failure.id for failure in FAILURES}


def test_the_kernels_count_is_said_if_it_has_grown() -> None:
    assert kernel_kills.sentence(1, OomKills(1, 32 << 30), "here") == ""
    assert kernel_kills.sentence(1, None, "here") == ""
    assert kernel_kills.sentence(1, OomKills(2, 32 << 30), "here").startswith(
        "the kernel has killed a process here since the start, because its control group's limit of 34.4 GB "
        "was reached (oom_kill). Fix: "
    )
    several = kernel_kills.sentence(1, OomKills(4, None), "on b")
    assert "killed 3 processes on b since the start, because this host's memory was" in several


def test_a_kill_of_the_kernel_is_the_cause_and_no_fault_of_its_host(tmp_path: Path) -> None:
    """The rank's control group is asked, whatever the rank says of it is no path of ours."""
    (tmp_path / "memory.events").write_text("oom 3\noom_kill 3\n")
    (tmp_path / "memory.max").write_text("34359738368\n")
    here = Hosts("list", (Host("localhost"),))
    for told, is_named in (
        ({"memory_group": str(tmp_path), "oom_kills": 2}, True),
        ({"memory_group": str(tmp_path), "oom_kills": 3}, False),
        ({"memory_group": str(tmp_path / "gone"), "oom_kills": 0}, False),
        ({"memory_group": 7, "oom_kills": "x"}, False),
        ({}, False),
    ):
        ranks = Ranks(("localhost",))
        ranks.note(Message(0, "started", {"host": "a", "pid": 1, **told}, 1.0))
        ranks.note(Message(0, "lost", {"silent": False}, 2.0))
        history = History(ranks, MpirunEnd("mpirun", 1))
        kill = kernel_kills.kernel_kill(history, here, sys.executable, asks=False)
        assert bool(kill) == is_named, told
        expected = (kill, "") if is_named else ("", "localhost")
        assert look_into(history, verdict(history), Tail(), kill) == expected


@pytest.mark.parametrize(
    ("asks", "agent", "words"),
    [
        (True, "sh", "the kernel has killed 2 processes on far.invalid since the start, "),
        (False, "sh", ""),
        (True, "no-such-program", ""),
    ],
)
def test_a_kill_of_the_kernel_on_another_host(
    tmp_path: Path, asks: bool, agent: str, words: str
) -> None:
    """The host's shell may print lines of its own."""
    (tmp_path / "memory.events").write_text("oom_kill 5\n")
    (tmp_path / "memory.max").write_text("max\n")
    shell = Transport("shell", (agent, "-c", 'echo welcome; eval "$1"; echo bye'), "rsh")
    hosts = Hosts("list", (Host("near.invalid"), Host("far.invalid")), transport=shell)
    ranks = Ranks(("near.invalid", "far.invalid"))
    told = {"memory_group": str(tmp_path), "oom_kills": 3}
    ranks.note(Message(1, "started", {"host": "f", "pid": 1, **told}, 1.0))
    ranks.note(Message(1, "lost", {"silent": False}, 2.0))
    history = History(ranks, MpirunEnd("mpirun", 1))
    kill = kernel_kills.kernel_kill(history, hosts, sys.executable, asks=asks)
    assert kill.startswith(words)
    assert bool(kill) == bool(words)


def test_nobody_is_asked_for_a_rank_that_no_signal_has_ended() -> None:
    history = History(Ranks(("localhost",)), MpirunEnd("mpirun", 1))
    here = Hosts("list", (Host("localhost"),))
    assert kernel_kills.kernel_kill(history, here, sys.executable, asks=True) == ""
    assert look_into(history, verdict(History(Ranks(("a",)), MpirunEnd("mpirun", 0))), Tail()) == (
        "",
        "",
    )


def test_the_sentence_of_a_known_cause_and_the_host_at_fault() -> None:
    failure = {"code": 1, "error": "", "traceback": False, "is_verdict": False}
    for text, row, host in (
        (OUT_OF_MEMORY, "cuda-out-of-memory", ""),
        (b"CUDA error: uncorrectable ECC error encountered\n", "cuda-hardware", "b"),
        (b"nothing that is known\n", "", ""),
    ):
        ranks, tail = Ranks(("a", "b")), Tail()
        ranks.note(Message(1, "failed", failure, 1.0))
        tail.add(1, text)
        history = History(ranks, MpirunEnd("mpirun", 1))
        sentence, at_fault = look_into(history, verdict(history), tail)
        assert at_fault == host, row
        if row:
            assert sentence.startswith(f'"{text.decode().strip()}" has a known cause. ')
            assert sentence.endswith(f" More: docs/troubleshooting.md#{row}")
        else:
            assert sentence == ""


@pytest.mark.parametrize(
    ("code", "error", "is_killed"),
    [
        (137, "", True),
        (136, "", False),
        (1, "DataLoader worker (pid 7) is killed by signal: Killed.", True),
        (1, "ValueError", False),
    ],
)
def test_ranks_that_the_kernel_may_have_killed(code: int, error: str, is_killed: bool) -> None:
    ranks = Ranks(("a", "b"))
    facts = {"code": code, "error": error, "traceback": False, "is_verdict": False}
    ranks.note(Message(1, "failed", facts, 1.0))
    history = History(ranks, MpirunEnd("mpirun", 1))
    assert killed_first(history) == (1 if is_killed else None)
