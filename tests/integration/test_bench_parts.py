"""The parts of mpiddp bench that need no ranks: its tables, turns, options and limits.

Tests mpiddp/bench/.
python -m pytest tests/integration/test_bench_parts.py
"""

from __future__ import annotations

import errno
import os
import re
import sys
from pathlib import Path
from statistics import median

import pytest

from mpiddp.bench import rendezvous
from mpiddp.bench.jobs import BenchJobFailed, run
from mpiddp.bench.options import SharedOptions, as_arguments
from mpiddp.bench.report import aligned, markdown, shown, spread
from mpiddp.bench.rounds import ratios, turns
from mpiddp.bench.run import _check_writable, _write
from mpiddp.bench.step import Options as StepOptions
from mpiddp.bench.step import rank_options as step_options
from mpiddp.errors import JobFailed
from mpiddp.train.options import option_parser as train_parser
from tests.support.errors import error
from tests.support.ranks import ROOT, run_command, run_forked

NO_SCRIPTS = {"__init__", "harness", "smoke", "slow_disk"}


def test_a_full_disk_is_no_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rendezvous.json").symlink_to("/dev/full")
    full_disk = error("cannot be written", f"--out {tmp_path} ", "No space left on device")
    with pytest.raises(JobFailed, match=full_disk):
        _write(tmp_path, "rendezvous", rendezvous.BENCHMARK, {})

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "open", full)
    unwritable = error("Name another folder", f"--out {tmp_path}: ", "(No space left on device)")
    with pytest.raises(JobFailed, match=unwritable):
        _check_writable(tmp_path)


def test_job_timeout() -> None:
    with pytest.raises(BenchJobFailed, match=r"it did not end within 0\.2 s\."):
        run([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)


def test_output_that_is_no_text() -> None:
    done = run(["printf", "caf\\351\\n"], timeout_s=60)
    assert done.lines == ["caf\N{REPLACEMENT CHARACTER}"]


def test_spread_and_tables() -> None:
    values = [3.0, 1.0, 2.5]
    assert spread(values) == {"median": median(values), "low": 1.0, "high": 3.0}
    assert shown(spread(values), ".1f", 10) == "25.0 (10.0 to 30.0)"
    head, rows = ("a", "number"), [["bc", "1"], ["d", "22"]]
    assert aligned(head, rows) == "a   number\nbc       1\nd       22"
    assert markdown(head, rows) == "| a | number |\n|---|---|\n| bc | 1 |\n| d | 22 |"


def test_turns_change_their_order_in_every_round() -> None:
    order = list(turns("abc", 4, warmup=1))
    by_round = [[name for at, name in order if at == number] for number in range(5)]
    assert ["".join(names) for names in by_round] == ["abc", "cba", "bca", "acb", "cab"]
    assert ratios([3.0, 1.0], [2.0, 4.0]) == [1.5, 0.25]


def test_a_value_of_x_is_on_no_command_line() -> None:
    exports = ("WORD=private", "NCCL_DEBUG=INFO", "HOME")
    shared = SharedOptions(mpirun=None, timeout=60, out=None, x=exports)
    assert shared.launch_options() == ["-x", "WORD", "-x", "NCCL_DEBUG=INFO", "-x", "HOME"]
    assert shared.hidden_values() == {"WORD": "private"}


def test_options_reach_the_ranks_unchanged() -> None:
    options = StepOptions(steps=7, real_data=True, rounds=2)
    assert as_arguments(options) == ["--steps", "7", "--real-data", "--rounds", "2"]
    assert step_options([*as_arguments(options), "--lr", "1"]) == (options, ["--lr", "1"])


@pytest.mark.slow
def test_every_benchmark_script_has_help_and_the_options_of_its_page() -> None:
    files = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - NO_SCRIPTS
    scripts = ["faults", "gpu", *sorted(files)]
    ends = run_forked([["-m", f"benchmarks.{script}", "--help"] for script in scripts])
    pages = "\n".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    table = (ROOT / "benchmarks/README.md").read_text()
    for script, (code, stdout, stderr) in zip(scripts, ends, strict=True):
        assert (script, code, stderr) == (script, 0, "")
        assert stdout.startswith(f"usage: python -m benchmarks.{script} ")
        assert f"\n| {script} |" in table
        if script == "gpu":
            continue  # its options are those of its commands
        text = " ".join(stdout.split())
        known = set(re.findall(r"--[a-z][a-z-]*", text))
        if "Accepts the options of mpiddp train too" in text:
            known |= set(train_parser()._option_string_actions)
        for command in re.findall(rf"python -m benchmarks\.{script} ([^`#\n]*)", pages):
            assert set(re.findall(r"--[a-z][a-z-]*", command)) <= known, command


def test_light_clients_speak_the_language_of_the_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.scale", "--ranks", "16", "--out", str(tmp_path)]
    done = run_command(command, ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +16 +\d", done.stdout, re.MULTILINE), done.stdout
