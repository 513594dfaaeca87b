"""The options of `mpiddp launch`: what one becomes, what users of other launchers type, what contradicts.

Tests mpiddp/launch/options.py.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from mpiddp.launch.options import LaunchOptions, option_parser, parse_options

JOB = ("-m", "train", "--lr", "1")
DEFAULTS = LaunchOptions(JOB)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MPIDDP_LOG_RANKS", "MPIDDP_PREFIX", "MPIDDP_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)


def parsed(options: str) -> LaunchOptions:
    return parse_options([*options.split(), *JOB])


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ("", {}),
        ("-H a:2,b", {"host_list": "a:2,b"}),
        ("--no-check", {"check": False}),
        ("--wait-for-hosts 10m", {"wait_s": 600.0}),
        ("-x A=2 -x B=1", {"exports": ("A=2", "B=1"), "variables": {"A": "2", "B": "1"}}),
        ("--mpi-args=-v --mpi-args= --mpi-args=--a_b", {"mpi_args": ("-v", "--a_b")}),
        ("--stop-after 55m", {"stop_after_s": 3300.0}),
        ("-v", {"verbose": True}),
        # What users of mpirun, torchrun and others type:
        ("-np 2", {"n": 2}),
        ("--nproc-per-node 2", {"npernode": 2}),
        ("--nproc_per_node=2", {"npernode": 2}),
        ("--nproc_per_node gpu", {"needs_gpus": True}),
        ("--nproc_per_node auto", {}),
        (
            "--nnodes=1 --nproc_per_node=4 --rdzv_id=7 --rdzv-backend c10d --rdzv_endpoint=a:2",
            {"npernode": 4, "host_list": "localhost"},
        ),
        ("--standalone --rdzv-conf timeout=9", {"host_list": "localhost"}),
        ("--host a", {"host_list": "a"}),
        ("--hosts a:2,b:2", {"host_list": "a:2,b:2"}),
        ("--machinefile f", {"hostfile": "f"}),
        ("--standalone", {"host_list": "localhost"}),
        ("--max_restarts 3 -n 1", {"max_restarts": 3, "n": 1}),
    ],
)
def test_what_an_option_becomes(options, fields):
    assert parsed(options) == replace(DEFAULTS, **fields)


def test_variables_are_other_defaults(monkeypatch):
    monkeypatch.setenv("MPIDDP_LOG_RANKS", "all")
    monkeypatch.setenv("MPIDDP_PREFIX", "never")
    monkeypatch.setenv("MPIDDP_TIMEOUT", "3m")
    found = replace(DEFAULTS, log_ranks="all", prefix="never", timeout_s=180.0)
    assert parsed("") == found
    assert parsed("--timeout 90") == replace(found, timeout_s=90.0)


def test_the_help_begins_with_examples_and_has_the_common_options(capsys):
    printed = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            parse_options([flag])
        printed[flag] = capsys.readouterr().out
    short, whole = printed.values()
    assert short.index("mpiddp launch -n 2 train.py") < short.index("--hostfile FILE")
    assert "--max-restarts" in short
    assert "--mpi-args" not in short
    shown = [each for each in option_parser()._actions if each.help != argparse.SUPPRESS]
    flags = {flag for action in shown for flag in action.option_strings}
    assert [flag for flag in sorted(flags) if flag not in whole] == []


@pytest.fixture
def script(tmp_path) -> Path:
    script = tmp_path / "train.py"
    script.write_text("import sys\n")
    return script


@pytest.mark.parametrize(
    ("source", "flag"),
    [
        ("parser.add_argument('--dry-run')", "--dry-run"),
        ("parser.add_argument('--dry_run')", "--dry-run"),
        ("import argparse", "--help"),
        ("from transformers import HfArgumentParser", "-h"),
        ("parse('-n')", "-n"),
    ],
)
def test_an_option_that_the_script_takes(script, source, flag, capsys):
    script.write_text(source)
    assert parse_options([str(script), flag]).job == (str(script), flag)
    assert capsys.readouterr().err == ""


def test_an_option_of_the_launcher_behind_the_script_is_pointed_out(script, capfd):
    parse_options([str(script), "-n", "4", "--lr", "1"])
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert f"-n comes after {script}" in said


@pytest.mark.parametrize(
    ("job", "command"),
    [
        (JOB, ("train", "--lr", "1")),
        (("--", "ls", "-v", "-h"), ("ls", "-v", "-h")),
        (("-m", "train", "-n", "4"), ("train", "-n", "4")),  # nobody reads its parser
        ((__file__, "--", "-m"), (__file__, "--", "-m")),
    ],
)
def test_the_job(job, command):
    found = parse_options([*job])
    assert (found.job, found.command) == (job, command)
