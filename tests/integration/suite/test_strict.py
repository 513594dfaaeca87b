"""The rules of .ci/run: which failed test is repeated, that a repeat is reported, and which test may skip.

Tests tests/support/strict.py.
python -m pytest tests/integration/suite/test_strict.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT
from tests.support.strict import COUNTED, MAX_REPEATS, allowed_skips, find_known, known_failures

GLOO = (
    "[E1121 23:36:46.525016948 ProcessGroupGloo.cpp:67] Gloo connectFullMesh failed with "
    "[gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection refused"
)
# The first run of each test fails, the next one passes.
FAILS_ONCE = """
from pathlib import Path

def fails_once(number):
    mark = Path(__file__).with_suffix(f".{{number}}")
    if not mark.exists():
        mark.touch()
        raise AssertionError({text!r})
"""


def run_tests(folder: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    """pytest with the plugin on files of these tiers, as .ci/run starts it."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    for name, text in files.items():
        path = folder / "tests" / name / f"test_{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", COUNTED))}
    env |= {
        "PYTHONPATH": str(ROOT),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # others load for seconds
    plugins = ["-p", "tests.support.strict", *(["-p", "xdist.plugin"] if "-n" in options else [])]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-p", "no:cacheprovider", *options],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def failing(text: str, count: int = 1) -> str:
    tests = "".join(f"\ndef test_{number}(): fails_once({number})\n" for number in range(count))
    return FAILS_ONCE.format(text=text) + tests


@pytest.mark.parametrize("options", [[], ["-n", "2", "--dist", "loadfile"]])
@pytest.mark.parametrize("tier", ["ranks", "cluster"])
def test_a_known_failure_is_repeated_and_reported(
    tmp_path: Path, tier: str, options: list[str]
) -> None:
    done = run_tests(tmp_path, *options, **{tier: failing(GLOO)})
    assert done.returncode == 0, done.stdout
    assert f"flake: tests/{tier}/test_{tier}.py::test_0" in done.stdout
    assert "It was repeated. gloo-full-mesh: gloo tries to connect" in done.stdout
    assert GLOO in done.stdout.replace("\nE  ", "")
    assert "1 passed, 1 repeated" in done.stdout


@pytest.mark.parametrize(("tier", "text"), [("ranks", "rank 1 hangs"), ("unit", GLOO)])
def test_another_failure_is_not_repeated(tmp_path: Path, tier: str, text: str) -> None:
    done = run_tests(tmp_path, **{tier: failing(text)})
    assert (done.returncode, "flake" in done.stdout) == (1, False), done.stdout


def test_a_test_that_fails_twice_has_failed(tmp_path: Path) -> None:
    done = run_tests(tmp_path, ranks=f"def test_it(): raise AssertionError({GLOO!r})\n")
    assert done.returncode == 1
    assert "1 failed, 1 repeated" in done.stdout, done.stdout


def test_all_processes_together_repeat_two_tests(tmp_path: Path) -> None:
    files = {tier: failing(GLOO, 2) for tier in ("ranks", "cluster")}
    done = run_tests(tmp_path, "-n", "2", "--dist", "loadfile", **files)
    assert done.returncode == 1
    assert f"2 failed, 2 passed, {MAX_REPEATS} repeated" in done.stdout, done.stdout


def test_a_fixture_of_the_module_is_set_up_again(tmp_path: Path) -> None:
    text = failing(GLOO, 0) + (
        "import pytest\n"
        "@pytest.fixture(scope='module')\n"
        "def hosts():\n    fails_once(0)\n    return 3\n"
        "def test_first(hosts): assert hosts == 3\n"
        "def test_second(hosts): assert hosts == 3\n"
    )
    done = run_tests(tmp_path, cluster=text)
    assert done.returncode == 0, done.stdout
    assert "2 passed, 1 repeated" in done.stdout


@pytest.mark.parametrize("options", [[], ["-n", "2"]])
def test_a_skip_without_an_allowed_reason_fails_the_run(tmp_path: Path, options: list[str]) -> None:
    text = "import pytest\ndef test_it(): pytest.skip({!r})\ndef test_other(): pass\n"
    files = {"unit": text.format("needs a GPU"), "ranks": text.format("it hangs here")}
    done = run_tests(tmp_path, *options, **files)
    assert done.returncode == 1, done.stdout
    assert "tests/ranks/test_ranks.py::test_it: it hangs here" in done.stdout
    assert "test_it: needs a GPU" not in done.stdout


def test_an_allowed_skip_and_an_expected_failure_pass(tmp_path: Path) -> None:
    text = (
        "import pytest\ndef test_it(): pytest.skip('needs a GPU')\n"
        "@pytest.mark.xfail(reason='a bug of an MPI')\ndef test_other(): raise AssertionError\n"
    )
    done = run_tests(tmp_path, unit=text)
    assert done.returncode == 0, done.stdout


def test_a_file_that_skips_needs_an_allowed_reason_too(tmp_path: Path) -> None:
    text = "import pytest\npytest.skip('no time', allow_module_level=True)\n"
    done = run_tests(tmp_path, unit=text, ranks="def test_it(): pass\n")
    assert done.returncode == 1, done.stdout
    assert "no time" in done.stdout


def test_each_pattern_is_a_regular_expression_with_a_reason() -> None:
    assert find_known(GLOO, known_failures()) == known_failures()[0]
    assert all(each.reason and re.compile(each.pattern) for each in known_failures())
    assert all(re.compile(each) for each in allowed_skips())
