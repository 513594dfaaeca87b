"""How a rank ended, from an error, an exit code or a signal, and the short sentence of a full GPU."""

import os
import re

from mpiddp.explain.explain import explain
from mpiddp.runtime.job.ending import Ending, ending_of, record
from mpiddp.runtime.job.out_of_memory import shortened
from tests.support.ranks import ROOT

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
    rest = rf"pid {pid} of \w+ \(.+\) 1\.50 GiB, pid 999999 1014\.00 MiB, 2 more\."
    assert re.fullmatch(re.escape(start) + rest, said), said
    assert Ending(1, SHARED.format(pid=pid)).facts["error"] == said
    found = explain([said])
    assert found.failure.id == "cuda-out-of-memory"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


class OfASample(Exception):
    def __init__(self) -> None:
        super().__init__("a sample")
        self.name = 17


def test_odd_errors():
    """An error that is its own cause, and one whose name is a number, end a rank as any other."""
    itself = ValueError("itself")
    assert ending_of(raised(itself, itself)).error == "ValueError: itself"
    assert ending_of(raised(OfASample())).error == "OfASample: a sample"
    lacking = ModuleNotFoundError("no torch", name="torch")
    assert ending_of(raised(lacking)).error.startswith("ModuleNotFoundError: ")


def test_only_this_user_reads_an_error(tmp_path):
    """It may hold a secret."""
    file = tmp_path / "error.json"
    record(ending_of(raised(ValueError("https://token@host"))), str(file))
    assert file.stat().st_mode & 0o777 == 0o600
    assert "token" in file.read_text()


def test_what_follows_and_other_texts_stay():
    assert shortened(f"{REAL} The same.").endswith("this process holds 23.60 GiB. The same.")
    assert shortened("CUDA out of memory.") == "CUDA out of memory."


def test_a_long_word_takes_no_time():
    """Where the time grew with the square of its length, this took an hour."""
    word = "x" * 1_000_000
    assert shortened(word) == word
