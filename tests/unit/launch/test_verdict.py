"""The verdict on an attempt, from a record of what happened: who failed first, the sentence, the exit code.

Tests mpiddp/launch/verdict.py, mpiddp/launch/ranks.py. No process starts here.
python -m pytest tests/unit/launch/test_verdict.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED
from mpiddp.explain.failures import FAILURES
from mpiddp.launch.attempt import Event, Phase
from mpiddp.launch.ranks import MPIRUN, MPIRUN_AT_END, Ranks
from mpiddp.launch.verdict import _OF_THE_HOST as OF_THE_HOST
from mpiddp.launch.verdict import FirstFailure, History, MpirunEnd, Outcome, explained, verdict
from mpiddp.launch.watch import missing_sentence, stuck_sentences
from mpiddp.protocol.server import Message

HOSTS = ("a", "b", "b")
OTHERS = " The other ranks were stopped."
SILENTLY = (
    "ended first, without an error: it was killed, crashed in native code, or called os._exit."
    + OTHERS
)
EARLY = "rank 1 on b ended early, with exit code 0 (os._exit). Then "
RESET = "RuntimeError: [gloo] Connection closed by peer"


def test_every_event_has_an_action_or_none_in_every_phase() -> None:
    assert {len(event.actions) for event in Event} == {len(Phase)}


# --- what ranks report ---


def message(rank: int, kind: str, at: float = 1.0, **facts: Any) -> Message:
    return Message(rank, kind, facts, at)


def failed(rank: int, error: str = "ValueError: x", at: float = 1.0, **facts: Any) -> Message:
    defaults = {"code": 1, "traceback": "…", "is_verdict": False}
    return message(rank, "failed", at, **{**defaults, "error": error, **facts})


def lost(rank: int, at: float = 1.0, silent: bool = False) -> Message:
    return message(rank, "lost", at, silent=silent)


def started(*ranks: int) -> list[Message]:
    return [message(rank, "started", host=HOSTS[rank], pid=rank + 1) for rank in ranks]


def from_all(kind: str, **facts: Any) -> list[Message]:
    return [message(rank, kind, **facts) for rank in range(len(HOSTS))]


def noted(*messages: Message, hosts: tuple[str, ...] = HOSTS) -> Ranks:
    ranks = Ranks(hosts)
    for each in messages:
        ranks.note(each)
    return ranks


# --- the table ---


@dataclass(frozen=True)
class Case:
    """What happened, and the verdict on it. `mpirun` is its exit code, and what the code tells of a rank."""

    name: str
    expected: Outcome
    messages: list[Message] = field(default_factory=list)
    mpirun: tuple[int, str | None] = (1, "")
    was_ended: bool = False
    history: History = field(default_factory=History)


DONE_BY_ALL = from_all("done")
SAVED = [*from_all("supports_stop"), *from_all("stopped"), *DONE_BY_ALL]
BY_USER = History(is_requested=True)
WHILE_SAVING = History(is_requested=True, failed_in_stop=True)


def by_mpirun(sentence: str, code: int = FAILED) -> Outcome:
    return Outcome(code, sentence, is_complete=False)


def of_rank(rank: int, sentence: str, error: str = "", code: int = FAILED) -> Outcome:
    return Outcome(code, sentence, FirstFailure(rank, HOSTS[rank], error))


CASES = [
    Case("all ranks done", Outcome(DONE), DONE_BY_ALL, (0, "")),
    Case("stopped", Outcome(STOPPED, "stopped on request."), SAVED, (75, "")),
    Case(
        "mpirun crashes while it ends the others",
        of_rank(
            1,
            "rank 1 on b failed first: KeyError: 'x'. The other ranks were stopped.",
            "KeyError: 'x'",
        ),
        [failed(1, error="KeyError: 'x'")],
        (-11, None),
    ),
    Case(
        "mpirun's own error code is no signal",
        by_mpirun(
            "mpirun could not start rank 2 on b (exit code 183). To check the hosts: mpiddp doctor"
        )._replace(host_at_fault="b"),
        [*started(0, 1), lost(0)],
        (183, ""),
    ),
    Case(
        "an mpirun that hangs before all ranks have started",
        by_mpirun(
            "rank 0 on a ended before rank 1 on b, rank 2 on b had started. "
            "To check the hosts: mpiddp doctor"
        ),
        [*started(0), lost(0)],
        (-9, ""),
        was_ended=True,
    ),
    Case(
        "done before the stop",
        Outcome(DONE),
        [*from_all("supports_stop"), *DONE_BY_ALL],
        (0, ""),
        history=BY_USER,
    ),
    Case(
        "a script that cannot stop",
        Outcome(INTERRUPTED, "interrupted: the job was stopped."),
        DONE_BY_ALL,
        (0, ""),
        history=BY_USER,
    ),
    Case(
        "interrupted",
        Outcome(INTERRUPTED, "interrupted: the job was stopped."),
        [*started(0, 1, 2), lost(0), lost(1)],
        history=BY_USER,
        was_ended=True,
    ),
    Case(
        "too slow to stop",
        Outcome(INTERRUPTED, "interrupted: rank 1 on b was too slow; the job was killed."),
        [*started(0, 1, 2), lost(1)],
        history=History(is_requested=True, limit="rank 1 on b was too slow"),
    ),
    Case(
        "failed while it saved",
        of_rank(1, f"rank 1 on b failed first: OSError: full.{OTHERS}", "OSError: full"),
        [*from_all("supports_stop"), failed(1, "OSError: full"), lost(0)],
        history=WHILE_SAVING,
    ),
    Case(
        "lost while it saved",
        Outcome(INTERRUPTED, "interrupted: the job was stopped."),
        [*from_all("supports_stop"), lost(1)],
        history=WHILE_SAVING,
    ),
    Case(
        "ended by the launcher",
        Outcome(FAILED, "the job hung and was stopped."),
        [*started(0, 1, 2), lost(0)],
        history=History(ended_because="the job hung and was stopped."),
        was_ended=True,
    ),
    Case(
        "mpirun was killed",
        by_mpirun("the job failed: mpirun was killed by SIGKILL."),
        [*started(0, 1, 2), lost(0)],
        (-9, ""),
    ),
    Case(
        "no rank has reported",
        by_mpirun("the job failed: mpirun ended, but no rank ever reported."),
        mpirun=(0, ""),
    ),
    Case("bad input before the first report", by_mpirun("", BAD_INPUT), mpirun=(2, "")),
    Case(
        "a code of ranks that have started",
        by_mpirun("the job failed: mpirun ended with exit code 2."),
        started(0),
        (2, ""),
    ),
    Case(
        "an exception",
        of_rank(2, f"rank 2 on b failed first: KeyError: 3.{OTHERS}", "KeyError: 3\nmore"),
        [*started(0, 1, 2), failed(2, "KeyError: 3\nmore"), lost(0)],
    ),
    Case(
        "an exception with a log",
        of_rank(0, f"rank 0 on a failed first: E: x (its traceback: /x/0.log).{OTHERS}", "E: x."),
        [message(0, "log", path="/x/0.log"), failed(0, "E: x.")],
    ),
    Case(
        "an exit code",
        of_rank(1, f"rank 1 on b ended first, with exit code 3.{OTHERS}"),
        [failed(1, "", code=3, traceback="")],
    ),
    Case(
        "an error that names the culprit itself",
        Outcome(FAILED, f"rank 0 on a did not answer in 30 s.{OTHERS}"),
        [failed(1, "rank 0 on a did not answer in 30 s.", is_verdict=True)],
    ),
    Case(
        "a refusal of two ranks",
        of_rank(1, "--x: bad", "--x: bad", BAD_INPUT),
        [failed(1, "--x: bad", code=2), failed(0, "--x: bad", code=2, at=3.0)],
    ),
    Case(
        "a host is lost",
        of_rank(1, f"lost b (ranks 1, 2): the host stopped answering.{OTHERS}"),
        [lost(0, 12.0), lost(1, 13.0, silent=True), lost(2, 13.1, silent=True)],
    ),
    Case(
        "a rank that was killed",
        of_rank(1, f"rank 1 on b was killed by SIGKILL.{OTHERS}"),
        [lost(1), lost(0, 1.5)],
        (137, "SIGKILL"),
    ),
    Case(
        "a daemon was killed",
        Outcome(
            FAILED,
            "the ranks on a, b ended at the same moment without an error, as when the MPI daemon on one of "
            "these hosts is killed.",
            FirstFailure(2, "b", ""),
            is_complete=False,
        ),
        [lost(2, 1.0), lost(0, 1.05)],
    ),
    Case("all ended by os._exit(0)", Outcome(DONE), from_all("exited"), (0, "")),
    Case(
        "one ended by os._exit(0), then another failed",
        of_rank(0, f"{EARLY}rank 0 on a failed first: {RESET}.{OTHERS}", RESET),
        [message(1, "exited"), lost(1, 1.5), failed(0, RESET, at=2.0)],
    ),
    Case(
        "two ended by os._exit(0), then the job hung",
        Outcome(
            FAILED,
            "rank 1 on b, rank 2 on b ended early, with exit code 0 (os._exit). "
            "Then the job hung and was stopped.",
        ),
        [message(2, "exited"), message(1, "exited", 2.0)],
        history=History(ended_because="the job hung and was stopped."),
        was_ended=True,
    ),
    Case(
        "a rank that had closed all its files, and said its end over another connection",
        Outcome(DONE),
        [lost(1, 1.0), *DONE_BY_ALL],
        (0, ""),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_verdict(case: Case) -> None:
    code, rank_signal = case.mpirun
    end = MpirunEnd("mpirun", code, rank_signal is not None, case.was_ended)
    found = verdict(noted(*case.messages), end, case.history)
    assert end.rank_signal == rank_signal
    assert found[:4] == case.expected[:4]


TERMINATED = [failed(rank, "", code=143, traceback="", signal=15) for rank in range(3)]


@pytest.mark.parametrize(
    ("code", "proves", "messages", "local", "sentence"),
    [
        (1, True, TERMINATED, {0}, "mpirun was ended by SIGINT or SIGHUP"),
        (1, True, [lost(0), *TERMINATED[1:]], {0}, "mpirun was ended by SIGINT or SIGHUP"),
        (1, True, [lost(1), *TERMINATED], {0}, "the ranks on a, b ended at the same moment"),
        (130, False, [failed(i, "KeyboardInterrupt") for i in range(3)], {0}, "ended by SIGINT"),
        (
            137,
            True,
            [lost(0), lost(1, 1.1), lost(2, 1.1)],
            {0},
            "rank 0 on a was killed by SIGKILL.",
        ),
        (
            1,
            True,
            [lost(1), lost(2), lost(0, 2.0)],
            {0},
            "rank 1 on b ended first",
        ),  # a daemon's ranks
    ],
)
def test_an_mpirun_that_got_a_signal_is_named(
    code: int, proves: bool, messages: list[Message], local: set[int], sentence: str
) -> None:
    end = MpirunEnd("mpirun", code, proves, beside=frozenset(local))
    found = verdict(noted(*messages), end, History())
    assert sentence in found.sentence


def test_a_signal_that_ends_the_only_rank_is_the_ranks() -> None:
    """Hydra's mpirun ends with the code of its rank. That of several ranks proves a signal to itself."""
    end = MpirunEnd("mpirun", 143)
    found = verdict(noted(TERMINATED[0], hosts=("a",)), end, History())
    assert found.sentence == "rank 0 on a was killed by SIGTERM."
    both = verdict(noted(*TERMINATED[:2], hosts=("a", "b")), end, History())
    assert both.sentence == "mpirun was ended by SIGTERM, and has ended all ranks."


@pytest.mark.parametrize(
    ("limit", "full"), [(1 << 30, "limit of 1.1 GB"), (None, "its host's memory")]
)
def test_kills_of_the_kernel_are_the_cause(limit: int | None, full: str) -> None:
    killed = failed(1, "", code=137, traceback="", signal=9, oom_kills=2, memory_limit=limit)
    end, printed = MpirunEnd("mpirun", 137, True), {1: ["ValueError: x"]}
    found = verdict(noted(killed), end, History(), printed=printed)
    assert found.known_cause.startswith("the kernel has killed 2 processes of rank 1")
    assert full in found.known_cause
    assert found.host_at_fault == ""


@pytest.mark.parametrize(
    ("messages", "culprit"),
    [
        ([failed(2, at=1.0), lost(0, 1.2), lost(1, 1.3)], 2),
        ([failed(0, RESET, 1.00), lost(1, 1.01)], 1),
        ([lost(1, 1.0), message(0, "claim", 1.1), failed(0, RESET, 1.1)], 1),
        ([lost(1, 1.0), message(0, "claim", 1.1), failed(0, "", 1.1, traceback="")], 1),
        # Its peer's report overtakes its own.
        ([message(2, "claim", 0.9), failed(0, "ValueError", 1.0), failed(2, "KeyError", 1.2)], 2),
        ([message(2, "claim", 0.9), lost(0, 1.0), failed(2, "KeyError", 1.2)], 2),
        ([lost(0, 11.0), lost(1, 11.1), lost(2, 12.0, silent=True)], 2),
        ([failed(2, "ConnectionError: no database", 1.0), lost(0, 2.0), lost(1, 2.0)], 2),
        # An mpirun ends the others by SIGTERM.
        ([failed(0, "", 1.0, traceback="", signal=15), failed(1, at=1.1)], 1),
    ],
)
def test_the_first_failure_is_the_cause_of_the_others(
    messages: list[Message], culprit: int
) -> None:
    first = verdict(noted(*messages), MpirunEnd("mpirun", 1), History()).first
    assert first is not None
    assert first.rank == culprit


# --- the host ---


@pytest.mark.parametrize(
    ("messages", "host"),
    [
        ([*started(0, 1, 2), lost(0), failed(1, RESET, at=1.1)], "a"),
        ([*started(0, 1, 2), lost(1), lost(2)], "b"),  # one host
        ([*started(0, 1, 2), lost(1, at=15.0, silent=True), lost(0, at=15.0)], "b"),
        ([*started(0, 1, 2), lost(0), lost(1)], ""),  # both at once: which was first?
        ([*started(0, 1, 2), failed(0), lost(1, at=2.0)], ""),  # a script's error
        (DONE_BY_ALL, ""),
    ],
)
def test_a_host_is_at_fault_where_its_rank_was_lost_first(
    messages: list[Message], host: str
) -> None:
    assert verdict(noted(*messages), MpirunEnd("mpirun", 1), History()).host_at_fault == host


@pytest.mark.parametrize(("joined", "host"), [((0,), "b"), ((1,), ""), ((), ""), ((0, 1, 2), "")])
def test_a_host_whose_ranks_alone_did_not_join_is_at_fault(
    joined: tuple[int, ...], host: str
) -> None:
    ranks = noted(*(message(rank, "joining") for rank in joined))
    found = verdict(ranks, MpirunEnd("mpirun", 1), History(ended_because="too late."))
    assert found.host_at_fault == host


# --- the stacks ---

WAITS = 'thread MainThread:\n  File "/site/torch/distributed/c10d.py", line 9, in all_reduce\n    wait()\n'
WORKS = 'thread MainThread:\n  File "/x/train.py", line 3, in main\n    work()\n'


def stacks(rank: int, step: int, text: str) -> Message:
    return message(rank, "stacks", step=step, text=text, cpu_s=0.0, state="S")


def test_the_hang_report_names_the_rank_that_is_behind() -> None:
    ranks = noted(stacks(0, 7, "stack 0"), stacks(1, 6, "stack 1"), hosts=("a", "b"))
    assert stuck_sentences(ranks, 60) == [
        "rank 1 on b has made no step for 60 s while the others wait at step 7. "
        "Its Python stack follows.\nstack 1"
    ]


def test_the_hang_report_names_the_rank_that_is_not_in_torch() -> None:
    ranks = noted(stacks(0, 7, WAITS), stacks(1, 7, WORKS), hosts=("a", "b"))
    (sentence,) = stuck_sentences(ranks, 60)
    assert sentence.startswith("rank 1 on b has made no step for 60 s while the others wait at ")


@pytest.mark.parametrize(
    ("messages", "clause"),
    [
        (
            [*started(0, 1, 2), message(0, "done")],
            "rank 1 on b, rank 2 on b had not stopped 30 s after the request (--grace)",
        ),
        (
            [*started(0, 1), message(1, "saving", active=True)],
            "rank 1 on b was still saving 30 s after the request",
        ),
        (
            [message(1, "stopped"), message(2, "stopped")],
            "rank 1 on b, rank 2 on b were still saving 30 s after the request",
        ),
    ],
)
def test_the_ranks_that_exceed_a_limit_of_a_stop(messages: list[Message], clause: str) -> None:
    assert noted(*messages).late_clause(30.0) == clause


def test_the_last_words_are_in_the_script_and_not_in_pythons_import_system() -> None:
    inner = '  File "<frozen importlib._bootstrap>", line 241, in _call_with_frames_removed\n'
    ranks = noted(message(0, "started", host="a", pid=5), stacks(0, 0, WORKS + inner), hosts=("a",))
    assert missing_sentence(ranks, 60).endswith("in /x/train.py, line 3, in main: work()")


def test_before_any_rank_has_joined_those_that_have_not_started_are_missing() -> None:
    ranks = noted(*started(0, 2), hosts=("a", "b", "c"))
    sentence = missing_sentence(ranks, 60)
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
    end, hung = MpirunEnd("mpirun", 1), History(ended_because="the job hung and was stopped.")
    assert not verdict(noted(), end, hung, printed={MPIRUN_AT_END: banner}).known_cause
    no_daemon = {MPIRUN: NO_DAEMON.decode().splitlines()}
    assert verdict(noted(), end, hung, printed=no_daemon).known_cause
    killed = noted(failed(1, "", traceback="", signal=9))
    assert not verdict(killed, end, History(), printed={MPIRUN: banner}).known_cause


def test_rows_of_the_host_are_in_the_table() -> None:
    assert set(OF_THE_HOST) <= {failure.id for failure in FAILURES}


def test_the_sentence_of_a_known_cause_and_the_host_at_fault() -> None:
    for text, row, host in (
        (OUT_OF_MEMORY.decode().strip(), "cuda-out-of-memory", ""),
        ("CUDA error: uncorrectable ECC error encountered", "cuda-hardware", "b"),
        ("nothing that is known", "", ""),
    ):
        ranks, end = noted(failed(1, "", traceback="")), MpirunEnd("mpirun", 1)
        found = verdict(ranks, end, History(), printed={1: [text]})
        assert found.host_at_fault == host, row
        assert found.known_cause.startswith(f'"{text}" has a known cause. ') is bool(row)
        assert (" Fix: " in found.known_cause) is bool(row)
