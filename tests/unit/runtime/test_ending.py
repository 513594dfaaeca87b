"""How a rank ended, from an error, an exit code or a signal.

Tests mpiddp/runtime/job/ending.py. Needs no torch.
"""

import pytest

from mpiddp.errors import JobFailed, NoAnswer, UserError
from mpiddp.runtime.job.ending import Ending, Refused, ending_of, ending_of_process, record

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
        (SystemExit(256), Ending(1), f"{EXIT} 1"),
        (SystemExit(1 << 80), Ending(1), f"{EXIT} 1"),
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
