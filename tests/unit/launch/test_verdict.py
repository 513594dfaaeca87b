"""The verdict on an attempt, by single events: who failed first, the host at fault, a known cause.

test_records.py judges whole records. Tests mpiddp/launch/{events,verdict,watch}.py. No process starts here.
python -m pytest tests/unit/launch/test_verdict.py
"""

from __future__ import annotations

from typing import Any

import pytest

from mpiddp.explain.failures import FAILURES
from mpiddp.launch.events import MPIRUN, MPIRUN_AT_END, Event, Record
from mpiddp.launch.verdict import _OF_THE_HOST as OF_THE_HOST
from mpiddp.launch.verdict import FirstFailure, MpirunEnd, Outcome, explained, verdict
from mpiddp.launch.watch import missing_sentence

HOSTS = ("a", "b", "b")
RESET = "RuntimeError: [gloo] Connection closed by peer"


# --- what ranks report ---


def event(rank: int, kind: str, at: float = 1.0, **facts: Any) -> Event:
    return Event(kind, rank, facts, at)


def failed(rank: int, error: str = "ValueError: x", at: float = 1.0, **facts: Any) -> Event:
    defaults = {"code": 1, "traceback": "…", "is_verdict": False}
    return event(rank, "failed", at, **{**defaults, "error": error, **facts})


def lost(rank: int, at: float = 1.0, silent: bool = False) -> Event:
    return event(rank, "lost", at, silent=silent)


def started(*ranks: int) -> list[Event]:
    return [event(rank, "started", host=HOSTS[rank], pid=rank + 1) for rank in ranks]


def noted(*events: Event, hosts: tuple[str, ...] = HOSTS) -> Record:
    record = Record(hosts, at=0.0)
    for each in events:
        record.add(each)
    return record


def judged(*events: Event, why: str = "", printed: dict[int, list[str]] | None = None) -> Outcome:
    """The verdict of an Open MPI's job. `why` the launcher has ended it, if it has."""
    record = noted(*events)
    if why:
        record.note("end", failed=False, why=why)
    for rank, lines in (printed or {}).items():
        record.add(event(rank, "tail", lines=lines))
    record.note("mpirun", **MpirunEnd("mpirun", 1, proves_signals=True)._asdict())
    return verdict(record)


# --- the first failure, and the host ---


@pytest.mark.parametrize(
    ("events", "culprit"),
    [
        ([failed(2, at=1.0), lost(0, 1.2), lost(1, 1.3)], 2),
        ([failed(0, RESET, 1.00), lost(1, 1.01)], 1),
        ([lost(1, 1.0), event(0, "claim", 1.1), failed(0, RESET, 1.1)], 1),
        ([lost(1, 1.0), event(0, "claim", 1.1), failed(0, "", 1.1, traceback="")], 1),
        # Its peer's report overtakes its own.
        ([event(2, "claim", 0.9), failed(0, "ValueError", 1.0), failed(2, "KeyError", 1.2)], 2),
        ([event(2, "claim", 0.9), lost(0, 1.0), failed(2, "KeyError", 1.2)], 2),
        ([lost(0, 11.0), lost(1, 11.1), lost(2, 12.0, silent=True)], 2),
        ([failed(2, "ConnectionError: no database", 1.0), lost(0, 2.0), lost(1, 2.0)], 2),
        # An mpirun ends the others by SIGTERM.
        ([failed(0, "", 1.0, traceback="", signal=15), failed(1, at=1.1)], 1),
    ],
)
def test_the_first_failure_is_the_cause_of_the_others(events: list[Event], culprit: int) -> None:
    first = judged(*events).first
    assert first is not None
    assert first.rank == culprit


@pytest.mark.parametrize(
    ("events", "host"),
    [
        ([*started(0, 1, 2), lost(0), failed(1, RESET, at=1.1)], "a"),
        ([*started(0, 1, 2), lost(1), lost(2)], "b"),  # one host
        ([*started(0, 1, 2), lost(1, at=15.0, silent=True), lost(0, at=15.0)], "b"),
        ([*started(0, 1, 2), lost(0), lost(1)], ""),  # both at once: which was first?
        ([*started(0, 1, 2), failed(0), lost(1, at=2.0)], ""),  # a script's error
        ([event(rank, "done") for rank in range(3)], ""),
    ],
)
def test_a_host_is_at_fault_where_its_rank_was_lost_first(events: list[Event], host: str) -> None:
    assert judged(*events).host_at_fault == host


@pytest.mark.parametrize(("joined", "host"), [((0,), "b"), ((1,), ""), ((), ""), ((0, 1, 2), "")])
def test_a_host_whose_ranks_alone_did_not_join_is_at_fault(
    joined: tuple[int, ...], host: str
) -> None:
    joining = [event(rank, "joining") for rank in joined]
    assert judged(*joining, why="too late.").host_at_fault == host


# --- a stop, a start ---


@pytest.mark.parametrize(
    ("events", "clause"),
    [
        (
            [*started(0, 1, 2), event(0, "done")],
            "rank 1 on b, rank 2 on b had not stopped 30 s after the request (--grace)",
        ),
        (
            [*started(0, 1), event(1, "saving", active=True)],
            "rank 1 on b was still saving 30 s after the request",
        ),
        (
            [event(1, "stopped"), event(2, "stopped")],
            "rank 1 on b, rank 2 on b were still saving 30 s after the request",
        ),
    ],
)
def test_the_ranks_that_exceed_a_limit_of_a_stop(events: list[Event], clause: str) -> None:
    assert noted(*events).late_clause(30.0) == clause


def test_the_last_words_are_in_the_script_and_not_in_pythons_import_system() -> None:
    inner = '  File "<frozen importlib._bootstrap>", line 241, in _call_with_frames_removed\n'
    own = 'thread MainThread:\n  File "/x/train.py", line 3, in main\n    work()\n'
    frames = event(0, "stacks", step=0, text=own + inner, cpu_s=0.0, state="S")
    record = noted(event(0, "started", host="a", pid=5), frames, hosts=("a",))
    assert missing_sentence(record, 60).endswith("in /x/train.py, line 3, in main: work()")


def test_before_any_rank_has_joined_those_that_have_not_started_are_missing() -> None:
    record = noted(*started(0, 2), hosts=("a", "b", "c"))
    sentence = missing_sentence(record, 60)
    assert sentence.startswith("only 2 of 3 ranks joined in 60 s. Missing: rank 1 on b.")


# --- known causes ---

OUT_OF_MEMORY = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
CLOSED = "RuntimeError: [/gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:4711. GLHF"
WAITED = "RuntimeError: [a.cc:78] Timed out waiting 18000ms for recv operation to complete"
NO_DAEMON = b"ORTE was unable to reliably start one or more daemons.\n"


def cause(error: str | None, *printed: tuple[int, bytes]) -> str | None:
    """The row that explains a job whose rank 0 failed first with `error`, None for no first rank."""
    texts: dict[int, bytes] = {}
    for rank, text in printed:
        texts[rank] = texts.get(rank, b"") + text
    lines = {rank: text.decode().splitlines() for rank, text in texts.items()}
    row, _ = explained(None if error is None else FirstFailure(0, "a", error), lines)
    return row or None


@pytest.mark.parametrize(
    ("error", "printed", "expected"),
    [
        (OUT_OF_MEMORY.decode(), (), "cuda-out-of-memory"),
        ("", [(0, OUT_OF_MEMORY)], "cuda-out-of-memory"),
        ("", [(0, OUT_OF_MEMORY[:20]), (1, b"x\n"), (0, OUT_OF_MEMORY[20:])], "cuda-out-of-memory"),
        # The first rank's error is a consequence or a symptom, and another rank has the cause.
        (CLOSED, [(1, OUT_OF_MEMORY)], "cuda-out-of-memory"),
        (WAITED, [(1, OUT_OF_MEMORY)], "cuda-out-of-memory"),
        (WAITED, (), "gloo-timeout"),
        (None, [(MPIRUN, NO_DAEMON)], "mpi-host-not-started"),
        # Its own error is the cause, whatever the others have printed.
        ("ValueError: 3 channels", [(1, OUT_OF_MEMORY)], None),
        ("", [(0, b"ValueError: 3 channels\n")], None),
        (None, [(1, CLOSED.encode())], None),
        (None, (), None),
    ],
)
def test_one_row_explains_the_job_or_none(
    error: str | None, printed: tuple[tuple[int, bytes], ...], expected: str | None
) -> None:
    assert cause(error, *printed) == expected


def test_what_mpirun_says_of_the_end_of_a_job_is_no_cause() -> None:
    """It has ended the ranks of a job that hung. What it has said before may explain why no rank started."""
    banner = ["mpirun noticed that process rank 1 exited on signal 9 (Killed)."]
    hung = "the job hung and was stopped."
    assert not judged(why=hung, printed={MPIRUN_AT_END: banner}).known_cause
    assert judged(why=hung, printed={MPIRUN: NO_DAEMON.decode().splitlines()}).known_cause
    killed = failed(1, "", traceback="", signal=9)
    assert not judged(killed, printed={MPIRUN: banner}).known_cause


def test_rows_of_the_host_are_in_the_table() -> None:
    assert set(OF_THE_HOST) <= {failure.id for failure in FAILURES}


def test_the_sentence_of_a_known_cause_and_the_host_at_fault() -> None:
    for text, row, host in (
        (OUT_OF_MEMORY.decode().strip(), "cuda-out-of-memory", ""),
        ("CUDA error: uncorrectable ECC error encountered", "cuda-hardware", "b"),
        ("nothing that is known", "", ""),
    ):
        found = judged(failed(1, "", traceback=""), printed={1: [text]})
        assert found.host_at_fault == host, row
        assert found.known_cause.startswith(f'"{text}" has a known cause. ') is bool(row)
        assert (" Fix: " in found.known_cause) is bool(row)
