"""Run Python programs, each in a process of its own that has torch already. Most of their time is its import.

    python -m tests.jobs.forked '[["SCRIPT", "ARGUMENT", …], ["-m", "MODULE", …], …]'

Prints `[exit code, stdout, stderr]` of each as JSON.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import BinaryIO

import mpiddp.runtime.torch.process_group  # noqa: F401  torch as well


def run(command: list[str], streams: list[BinaryIO]) -> int:
    """The exit code of `python COMMAND…` with this stdout and stderr."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")
    sys.exit(0)


def main(commands: str) -> None:
    ends = []
    for command in json.loads(commands):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = run(command, [out, err])
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        ends.append([code, *texts])
    print(json.dumps(ends))


if __name__ == "__main__":
    main(sys.argv[1])
