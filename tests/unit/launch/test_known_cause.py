"""The known cause below a verdict: of what the first rank said, else of what the others and mpirun said.

Tests mpiddp/launch/verdict.py. tests/promises/test_doctor.py tests the table.
python -m pytest tests/unit/launch/test_known_cause.py
"""

from __future__ import annotations

import pytest

from mpiddp.explain.failures import FAILURES
from mpiddp.launch.ranks import Ranks
from mpiddp.launch.verdict import _OF_THE_HOST as OF_THE_HOST
from mpiddp.launch.verdict import FirstFailure, History, MpirunEnd, explained, verdict
from mpiddp.protocol.server import Message

MPIRUN = -1
OUT_OF_MEMORY = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
RESET = "RuntimeError: [/gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:4711. GLHF"
WAITED = "RuntimeError: [a.cc:78] Timed out waiting 18000ms for recv operation to complete"
NO_DAEMON = b"ORTE was unable to reliably start one or more daemons.\n"


def cause(error: str | None, *printed: tuple[int, bytes]) -> str | None:
    """The row that explains a job whose rank 0 failed first with `error`, None for no first rank."""
    texts: dict[int, bytes] = {}
    for rank, text in printed:
        texts[rank] = texts.get(rank, b"") + text
    lines = {rank: text.decode().splitlines() for rank, text in texts.items()}
    found = explained(None if error is None else FirstFailure(0, "a", error), lines)
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


def test_rows_of_the_host_are_in_the_table() -> None:
    assert set(OF_THE_HOST) <= {failure.id for failure in FAILURES}


def test_the_sentence_of_a_known_cause_and_the_host_at_fault() -> None:
    failure = {"code": 1, "error": "", "traceback": False, "is_verdict": False}
    for text, row, host in (
        (OUT_OF_MEMORY, "cuda-out-of-memory", ""),
        (b"CUDA error: uncorrectable ECC error encountered\n", "cuda-hardware", "b"),
        (b"nothing that is known\n", "", ""),
    ):
        ranks = Ranks(("a", "b"))
        ranks.note(Message(1, "failed", failure, 1.0))
        printed = {1: [text.decode().strip()]}
        found = verdict(ranks, MpirunEnd("mpirun", 1), History(), printed=printed)
        sentence = found.known_cause
        assert found.host_at_fault == host, row
        if row:
            assert sentence.startswith(f'"{text.decode().strip()}" has a known cause. ')
            assert " Fix: " in sentence
        else:
            assert sentence == ""
