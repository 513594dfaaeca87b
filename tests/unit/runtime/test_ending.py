"""How a rank ended, from an error, an exit code or a signal, and the short sentence of a full GPU.

Tests mpiddp/runtime/job/{ending,out_of_memory}.py. Needs no torch.
"""

import os
import re

import pytest

from mpiddp.errors import JobFailed, NoAnswer, UserError
from mpiddp.explain.explain import explain
from mpiddp.runtime.job.ending import Ending, Refused, ending_of, ending_of_process, record
from mpiddp.runtime.job.out_of_memory import shortened
from tests.support.ranks import ROOT

SENTENCE = "hosts.txt:3: one sentence."
EXIT = "rank 1 ended with exit code"


@pytest.mark.parametrize(
    ("error", "expected", "line"),
    [
        (None, Ending(0), ""),
        (SystemExit(), Ending(0), ""),
        (SystemExit(0), Ending(0), ""),
        (SystemExit(False), Ending(0), ""),
        (SystemExit(""), Ending(1), f"{EXIT} 1"),
        (SystemExit(3), Ending(3), f"{EXIT} 3"),
        (SystemExit(True), Ending(1), f"{EXIT} 1"),
        (SystemExit(2), Ending(2), ""),  # it has printed why
        (SystemExit(75), Ending(75), ""),
        (SystemExit(-1), Ending(255), f"{EXIT} 255"),
        (SystemExit(300), Ending(44), f"{EXIT} 44"),
        (SystemExit(256), Ending(0), ""),
        (SystemExit(1 << 80), Ending(255), f"{EXIT} 255"),
        (SystemExit("no data"), Ending(1, "no data"), f"{EXIT} 1: no data"),
        (UserError(SENTENCE), Ending(2, SENTENCE), SENTENCE),
        (JobFailed(SENTENCE), Ending(1, SENTENCE, is_verdict=True), SENTENCE),
        (NoAnswer(SENTENCE), Ending(1, SENTENCE, is_verdict=True), SENTENCE),
        (Refused(2), Ending(2), ""),
        (Refused(1, SENTENCE), Ending(1, SENTENCE, is_verdict=True), SENTENCE),
    ],
    ids=repr,
)
def test_an_error(error, expected, line):
    found = ending_of(error)
    assert found == expected
    assert found.line("rank 1") == line
    assert found.is_failure == (expected.code != 0)


def test_a_requested_end_is_no_failure():
    assert ending_of(SystemExit(75), has_stopped=True) == Ending(0)
    assert ending_of(SystemExit(3), has_stopped=True) == Ending(3)


BUG = Ending(3, "RuntimeError: a bug", "Traceback …")
OF_TORCH = '{"message": {"message": "RuntimeError: a bug", "extraInfo": {"py_callstack": "…"}}}'


@pytest.mark.parametrize(
    ("recorded", "status", "expected"),
    [
        ([BUG], 3, BUG),
        ([BUG], -15, BUG),  # ended before it had printed all
        ([BUG], 4, Ending(4, BUG.error)),  # of the shell around it
        ([BUG, Ending(3)], 3, BUG),
        ([BUG, UserError(SENTENCE)], 2, Ending(2, SENTENCE)),
        (OF_TORCH, 3, Ending(3, BUG.error)),
        ("[1, 2", 3, Ending(3)),
    ],
)
def test_what_the_script_has_recorded(tmp_path, recorded, status, expected):
    """It explains the end of the process, as far as it is about this end."""
    file = tmp_path / "error.json"
    for each in recorded if isinstance(recorded, list) else ():
        record(each if isinstance(each, Ending) else ending_of(each), str(file))
    if isinstance(recorded, str):
        file.write_text(recorded, encoding="utf-8")
    assert ending_of_process(status, Ending(0), str(file)) == expected


REAL = (ROOT / "tests/data/failures/cuda-out-of-memory.txt").read_text().strip()
ASKED = "OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 GiB"
# torch 2.11 on an H100 that five processes share.
SHARED = (
    f"{ASKED}. GPU 0 has a total capacity of 79.18 GiB of which 5.25 GiB is free. Process 999999 has "
    "1014.00 MiB memory in use. Process {pid} has 1.50 GiB memory in use. Process 999997 has 1010.00 MiB "
    "memory in use. Process 999996 has 1010.00 MiB memory in use. "
    f"{REAL[REAL.index('Including') :]}"
)


def test_who_holds_the_rest():
    pid = os.getpid()
    said = shortened(SHARED.format(pid=pid))
    start = f"{ASKED}: GPU 0 has 5.25 GiB of 79.18 GiB free; this process holds 23.60 GiB, "
    rest = rf"pid {pid} of \w+ \(.+\) 1\.50 GiB, pid 999999 1014\.00 MiB, 2 more 1\.97 GiB\."
    assert re.fullmatch(re.escape(start) + rest, said), said
    assert Ending(1, SHARED.format(pid=pid)).facts["error"] == said
    found = explain([said])
    assert found.failure.id == "cuda-out-of-memory"


def test_what_follows_and_other_texts_stay():
    assert shortened(f"{REAL} The same.").endswith("this process holds 23.60 GiB. The same.")
    assert shortened("CUDA out of memory.") == "CUDA out of memory."


def test_a_long_word_takes_no_time():
    """Where the time grew with the square of its length, this took an hour."""
    word = "x" * 1_000_000
    assert shortened(word) == word
