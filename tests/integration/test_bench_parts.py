"""The scripts of benchmarks/. tests/promises/test_python.py has `mpiddp bench`."""

import re
import sys

import pytest

from tests.support.ranks import ROOT, run_command

TINY = ("--arch=resnet20", "--batch-size=2", "--rounds=1")
RUNS = {
    "start": (("--ranks=1", "--rounds=1"), r"^1 +torchrun +\d+\.\d\d \("),
    "step": (("-H", "localhost:1", *TINY, "--steps=4"), r"^bare loop again +\d"),
    "saving": (("-H", "localhost:2", *TINY, "--steps=2"), r"^\| at once \| \d"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_row_of_a_table_is_measured(name, tmp_path):
    options, last_row = RUNS[name]
    command = [sys.executable, "-m", f"benchmarks.{name}", *options, "--out", str(tmp_path)]
    done = run_command(command, ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(last_row, done.stdout, re.MULTILINE), done.stdout
