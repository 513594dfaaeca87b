"""The limit of a benchmark's job, and the scripts of benchmarks/.

tests/promises/test_python.py has `mpiddp bench`. Tests mpiddp/bench/ and benchmarks/.
"""

import re
import sys

import pytest

from mpiddp.bench.measured_jobs import BenchJobFailed, output_of
from tests.support.ranks import ROOT, run_command


def test_a_command_has_a_limit():
    with pytest.raises(BenchJobFailed, match=r"a job did not end within 0\.2 s\."):
        output_of([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)


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
