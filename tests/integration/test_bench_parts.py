"""The scripts of benchmarks/. tests/promises/test_python.py has `mpiddp bench`."""

import os
import re
import sys

import pytest

from benchmarks.all import FIGURES
from tests.gpu import session
from tests.support.cluster import lacking
from tests.support.ranks import ROOT, run_command

# The beginning of a line in the table of each one, whatever the widths of its columns.
LINES = {
    "first": "| mpiddp --version | 0.",
    "start_variable": "1 torchrun ",
    "start_hosts": "2 mpiddp ",
    "restart": "2 torchrun ",
    "restart_hosts": "2 mpiddp ",
    "step": "bare loop again",
    "saving": "| at once | ",
    "beside_dcp": "| FSDP2 | ",
    "scaling": "efficiency",
    "scale": "launcher CPU s",
    "reference": "2 hosts, 100 Mbit/s",
    "random_faults": "| signals to | jobs |",
    "gpu": '"name": "start"',
}
NEED_ROOT = ("start_hosts", "restart_hosts", "reference", "random_faults")


def test_what_waits_for_a_gpu_takes_at_most_12_minutes():
    assert sum(check.limit_s for check in session.CHECKS.values()) <= session.LIMIT_S == 12 * 60


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in FIGURES if name != "start"]
)  # start_variable does all of it
def test_each_benchmark_works(name, tmp_path):
    """Each one runs once, with as little as it can measure, and its table has the commit and the command."""
    if name in NEED_ROOT and os.geteuid() != 0:
        lacking("this needs root")
    out = tmp_path / "figures.md"
    command = [sys.executable, "-m", "benchmarks.all", "--only", name, "--brief", "--out", str(out)]
    done = run_command(command, ROOT)
    assert done.returncode == 0, done.stderr
    assert LINES[name] in re.sub(" +", " ", out.read_text()), out.read_text()
    assert f"-m {FIGURES[name].module} " in out.read_text().splitlines()[-2]
