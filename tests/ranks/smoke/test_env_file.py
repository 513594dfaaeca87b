"""Variables of --env-file and of patterns of -x reach the ranks, and no value is printed.

Tests mpiddp/launch/env_file.py, mpiddp/launch/starters/environment.py.
python -m pytest tests/ranks/smoke/test_env_file.py
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.ranks import launch, script


def test_variables_of_a_file_and_of_a_pattern_reach_the_ranks(tmp_path: Path) -> None:
    file = tmp_path / "job.env"
    file.write_text('APP_KEY="private value"\nAPP_MODE=file\n')
    print_variables = (
        "import json, os; print(json.dumps({name: value for name, value in os.environ.items() "
        "if name.startswith('APP_')}))"
    )
    options = ("--env-file", str(file), "-x", "APP_*", "-n", "1", script(tmp_path, print_variables))
    done = launch(*options, APP_MODE="here", APP_DIR="/data", APP_TOKEN="private-value")
    assert done.returncode == 0, done.stderr
    # On this host, the ranks inherit the environment of the shell.
    received = json.loads(done.stdout)
    assert (received["APP_KEY"], received["APP_MODE"]) == ("private value", "file")
    assert received["APP_DIR"] == "/data"
    assert "To pass it by name: -x APP_TOKEN\n" in done.stderr


def test_a_dry_run_shows_no_value_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "job.env"
    file.write_text("PLAIN=private-value\n")
    done = launch("--dry-run", "--env-file", str(file), "-n", "1", script(tmp_path, ""))
    assert done.returncode == 0, done.stderr
    assert "PLAIN=… " in done.stdout
    assert "… stands for values that are never printed here. Fill in: PLAIN\n" in done.stderr
    assert "private-value" not in done.stdout + done.stderr
