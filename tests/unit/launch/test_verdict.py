"""The verdict on an attempt: who failed first, the host at fault, a known cause, by events and whole records.

Most records are of real jobs (`tests.support.records` runs them again); the others are of what is hard to
provoke. No process starts here.
"""

import sys
from pathlib import Path
from typing import Any

import pytest

from mpiddp.launch.judge.events import MPIRUN, MPIRUN_AT_END, MpirunEnd, Outcome, Record
from mpiddp.launch.judge.verdict import verdict
from mpiddp.protocol.server import Event
from mpiddp.text import FIX
from tests.support.records import FOLDER, JOBS, replay

HOSTS = ("a", "b", "b")
RESET = {"error": "RuntimeError: [gloo] Connection closed by peer", "follows": True}


def event(rank: int, kind: str, at: float = 1.0, **facts: Any) -> Event:
    return Event(kind, rank, facts, at)


def failed(rank: int, error: str = "ValueError: x", at: float = 1.0, **facts: Any) -> Event:
    defaults = {"code": 1, "traceback": "…", "is_verdict": False, "error": error}
    return event(rank, "failed", at, **{**defaults, **facts})


def lost(rank: int, at: float = 1.0, silent: float = 0.0) -> Event:
    return event(rank, "lost", at, silent=silent)


def started(*ranks: int) -> list[Event]:
    return [event(rank, "started", host=HOSTS[rank], pid=rank + 1) for rank in ranks]


def judged(*events: Event, why: str = "", printed: dict[int, list[str]] | None = None) -> Outcome:
    """The verdict of an Open MPI's job. `why` the launcher has ended it, if it has."""
    record = Record(HOSTS, at=0.0)
    for event_ in events:
        record.add(event_)
    if why:
        record.add(Event("end", facts={"failed": False, "why": why}))
    for rank, lines in (printed or {}).items():
        record.add(event(rank, "tail", lines=lines))
    mpirun = MpirunEnd("mpirun", 1, proves_signals=True)
    record.add(Event("mpirun", facts=mpirun._asdict()))
    return verdict(record)


@pytest.mark.parametrize(
    ("events", "culprit"),
    [
        ([failed(2, at=1.0), lost(0, 1.2), lost(1, 1.3)], 2),
        ([failed(0, at=1.00, **RESET), lost(1, 1.01)], 1),
        ([lost(1, 1.0), event(0, "claim", 1.1), failed(0, at=1.1, **RESET)], 1),
        ([lost(1, 1.0), event(0, "claim", 1.1), failed(0, "", 1.1, traceback="")], 1),
        # Its peer's report overtakes its own.
        ([event(2, "claim", 0.9), failed(0, "ValueError", 1.0), failed(2, "KeyError", 1.2)], 2),
        ([event(2, "claim", 0.9), lost(0, 1.0), failed(2, "KeyError", 1.2)], 2),
        ([lost(0, 11.0), lost(1, 11.1), lost(2, 12.0, silent=15.0)], 2),
        # Whatever the words of an error, its rank has failed first.
        ([failed(2, "RuntimeError: cannot restore a socket", 1.0), failed(0, at=1.15)], 2),
        # By SIGTERM, an mpirun ends the others, and somebody else ends one.
        ([failed(0, "", 1.0, traceback="", signal=15, passed=True), failed(1, at=1.1)], 1),
        ([event(0, "claim"), failed(1, "", 1.1, traceback="", signal=15), failed(0, **RESET)], 1),
    ],
)
def test_the_first_failure_is_the_cause_of_the_others(events, culprit):
    assert judged(*events).rank == culprit


PREEMPTED = Event("preempted")
STEP = event(0, "progress", step=9, memory=0, own_s=1.0, cpu_s=1.0, counter=0)
KILLED = failed(1, "", 1.0, traceback="", signal=15)


@pytest.mark.parametrize(
    ("events", "code", "sentence"),
    [
        ([], 75, "the job was preempted before it began."),
        ([lost(0), lost(1, 1.1)], 75, "the job was preempted before it began."),
        ([*started(0, 1, 2), KILLED], 75, "the job was preempted before it began."),
        (
            [*started(0, 1, 2), STEP, KILLED],
            *(
                130,
                "interrupted: the job was preempted. Its script had not called mpiddp.should_stop()",
            ),
        ),
    ],
)
def test_a_preemption_is_no_failure_of_a_rank(events, code, sentence):
    outcome = judged(*events, PREEMPTED)
    assert (outcome.code, outcome.rank, outcome.sentence[: len(sentence)]) == (code, None, sentence)
    assert judged(*events).code == 1


def test_a_host_whose_ranks_are_all_lost_at_once_is_at_fault():
    """Also if the MPI ends the agents of other hosts then. The records have the other cases."""
    assert judged(*started(0, 1, 2), lost(1), lost(2)).host_at_fault == "b"
    killed = failed(1, "", traceback="", signal=9)
    assert judged(*started(0, 1, 2), killed, lost(0, 1.04)).host_at_fault == "b"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("ValueError: a\nb.", "ValueError: a"),
        (
            "ValueError: \x1b[31mred\x07",
            r"ValueError: \x1b[31mred\x07",
        ),  # no reader has to escape it
        ("RuntimeError: \n\n  Could not find /data/x\n", "RuntimeError: Could not find /data/x"),
        (
            "ValueError: Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent "
            'call last):\n  File "x.py", line 1\nValueError: bad sample\n',
            "ValueError: Caught ValueError in DataLoader worker process 0: ValueError: bad sample",
        ),
        (
            "ProcessRaisedException: \n\n-- Process 0 terminated with the following error:\nTraceback (most "
            'recent call last):\n  File "x.py", line 1\nValueError: bad rate\n',
            "ProcessRaisedException: ValueError: bad rate",
        ),
    ],
)
def test_the_line_of_an_error(error, line):
    assert f" failed first: {line}. The other ranks" in judged(failed(1, error)).sentence


def test_what_mpirun_says_of_the_end_of_a_job_is_no_cause():
    """It has ended the ranks of a job that hung. What it has said before may explain why no rank started."""
    banner = ["mpirun noticed that process rank 1 exited on signal 9 (Killed)."]
    hung = "the job hung and was stopped."
    assert not judged(why=hung, printed={MPIRUN_AT_END: banner}).known_cause
    no_daemon = ["unable to reliably start one or more daemons"]
    assert judged(why=hung, printed={MPIRUN: no_daemon}).known_cause
    assert not judged(failed(1, "", traceback="", signal=9), printed={MPIRUN: banner}).known_cause


def test_the_sentence_of_a_known_cause_and_the_host_at_fault():
    for text, row, host in (
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", "cuda-out-of-memory", ""),
        ("CUDA error: uncorrectable ECC error encountered", "cuda-hardware", "b"),
        ("nothing that is known", "", ""),
    ):
        outcome = judged(failed(1, "", traceback=""), printed={1: [text]})
        assert outcome.host_at_fault == host, row
        assert outcome.known_cause.startswith(f'"{text}" has a known cause. ') is bool(row)
        assert (FIX in outcome.known_cause) is bool(row)


def test_a_missing_module_is_of_the_python_that_ran(monkeypatch, tmp_path):
    """Not of the environment that is active, if mpiddp is of another one."""
    error = "ModuleNotFoundError: No module named 'only_in_active'"
    for active in (tmp_path, Path(sys.prefix)):
        monkeypatch.setenv("VIRTUAL_ENV", str(active))
        cause = judged(failed(1, error)).known_cause
        assert f"fix: Run {sys.executable} -m pip install" in cause
        assert (f"environment is another one, {active}." in cause) is (active == tmp_path)


def test_a_known_cause_of_many_ranks_is_searched_where_ranks_have_failed():
    text, others = "CUDA out of memory. Tried to allocate 2.00 GiB.", range(3, 300)
    printed = {**{rank: ["nothing that is known"] for rank in others}, 2: [text]}
    failures = (failed(rank, "", rank * 1.0, traceback="") for rank in (1, 2))
    assert judged(*failures, printed=printed).known_cause.startswith(f'"{text}" has a known')


def test_an_explanation_that_fails_hides_no_verdict(monkeypatch):
    """The installation may change during a job, so that the table of failures does not fit its code."""
    monkeypatch.setattr("mpiddp.explain.explain.explain", lambda lines: {}["kinit"])
    outcome = judged(failed(1, "RuntimeError: nccl"))
    assert "RuntimeError: nccl" in outcome.sentence
    assert outcome.known_cause.startswith("no known cause was looked for: KeyError: 'kinit' (")


RECORDS = sorted(FOLDER.glob("*.jsonl"))


def test_there_is_a_record_of_each_job():
    assert JOBS.keys() <= {path.stem for path in RECORDS}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_what_is_said_of_a_record(path):
    assert replay(path) == path.with_suffix(".txt").read_text(encoding="utf-8")


def test_a_stop_of_a_job_that_hangs_says_so():
    """Whatever the ranks print once they are interrupted: gloo blames the rank that has closed its connection."""
    hang = "rank 1 on b has not entered barrier no. 7, for which rank 0 has waited 61 s."
    stop = Event("stop", facts={"by": "BY_USER", "reason": "SIGINT", "signal": 2, "hang": hang})
    end = Event("end", facts={"failed": True})
    late = [event(0, "supports_stop"), stop, failed(0, **RESET), end]
    outcome = judged(*started(0, 1, 2), *late)
    assert (outcome.code, outcome.sentence) == (
        130,
        f"interrupted: the job hung, and was stopped: {hang}",
    )


@pytest.mark.parametrize(("at", "code"), [(0.9, 130), (2.0, 0)])
def test_a_stop_after_the_last_rank_has_ended_interrupts_nothing(at, code):
    """Its output may still be read then, or mpirun still end."""
    stop = Event("stop", facts={"by": "BY_USER", "reason": "SIGINT", "signal": 2}, at=at)
    done = [event(rank, "done", 1.0) for rank in range(3)]
    assert (
        judged(*started(0, 1, 2), *(done if at > 1 else []), stop, *(done if at < 1 else [])).code
        == code
    )
