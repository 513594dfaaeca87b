"""`mpiddp runs DIR` prints a line for each run, with what the end of its records tells.

Tests mpiddp/report/main.py.
"""

import json
import os

from mpiddp import cli
from tests.support.run_folders import write_run


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
