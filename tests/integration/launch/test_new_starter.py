"""A row of the table is all that a new starter needs.

Tests mpiddp/launch/starters/.
python -m pytest tests/integration/launch/test_new_starter.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env, script

MADE_UP = """
import re, sys
from mpiddp.launch.main import main
from mpiddp.launch.starters import table
from mpiddp.launch.starters.command import Command, StarterKind, flag


def compose(starter, request):
    return Command(str(starter.program), (flag("--quiet", why="why"),), request.job, request.settings)


row = StarterKind("Made Up", re.compile("Made Up ([0-9.]+)"), compose, refuses={"loud": "this test"})
table.STARTERS += (row,)
sys.exit(main(sys.argv[1:]))
"""


def test_a_row_of_the_table_is_all_that_a_starter_needs(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "Made Up 1.5" && exit\nshift 2; exec "$@"\n'
    )
    mpirun.chmod(0o755)
    job = script(tmp_path, "print('started')")

    def start(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", MADE_UP, "--mpirun", str(mpirun), "-n", "1", *options, job]
        return subprocess.run(
            command, env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
        )

    done = start("--mpi-args=--fast")
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
    assert "--quiet --fast " in start("--dry-run", "--mpi-args=--fast").stdout
    assert "--mpi-args: --loud would contradict this test." in start("--mpi-args=--loud").stderr
