"""`mpiddp runs DIR` prints a line for each run, with what the end of its records tells.

Tests mpiddp/report/main.py.
python -m pytest tests/unit/report/test_runs.py
"""

import json
import os
import re
import subprocess
import sys

import pytest

from mpiddp import cli
from tests.support.errors import error
from tests.support.ranks import ROOT
from tests.support.run_folders import write_run

AS_NOBODY = """
import os, sys
from mpiddp.report.main import list_runs
os.chdir(sys.argv[1])
list_runs(["a"])  # loads all that it needs
if os.getuid() == 0:  # who may read everything
    os.setuid(65534)
sys.exit(list_runs(["."]))
"""


def test_folders_that_may_not_be_read_hide_no_run(tmp_path):
    """Another user's runs, and lost+found."""
    folder = tmp_path / "runs"
    for name in ("a", "b", "c"):
        write_run(folder / name)
    folder.chmod(0o755)
    (folder / "b").chmod(0)
    (folder / "c/metrics.jsonl").chmod(0)
    command = [sys.executable, "-c", AS_NOBODY, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    (folder / "b").chmod(0o700)
    assert (done.returncode, done.stderr) == (0, "")
    a, b, c = done.stdout.splitlines()[-3:]
    assert a.split()[:2] == ["a", "done"]
    for name, line in (("b", b), ("c", c)):
        assert line.startswith(f"{name} ")
        assert "(Permission denied)" in line


def test_only_the_end_of_long_records_is_read(tmp_path, capsys):
    folder = write_run(tmp_path / "a", steps=10)
    record = json.dumps({"step": 111, "loss": 0.25}).encode() + b"\n"
    size = 1 << 40  # as a file with a hole, which a read from its beginning would not end
    with (folder / "metrics.jsonl").open("r+b") as file:
        file.seek(size)
        file.write(b"\n" + record)
    os.utime(folder / "metrics.jsonl")
    assert cli.main(["runs", str(folder)]) == 0
    assert "111" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "id", "problem"),
    [
        ("nothing", "No such file or directory.", ": "),
        ("file", "Not a directory.", ": "),
        ("empty", "run. Expected", " "),
    ],
)
def test_what_is_no_folder_of_runs_is_one_sentence(tmp_path, capsys, name, id, problem):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    assert cli.main(["runs", str(tmp_path / name)]) == 2
    sentence = error(id, f"{tmp_path / name}{problem}")
    assert re.fullmatch(rf"{sentence}\n", capsys.readouterr().err)
