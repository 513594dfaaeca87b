"""Run scripts that refuse their arguments, each in a process of its own that has torch already.

    python -m tests.jobs.mistakes SCRIPT '[[ARGUMENT, …], …]'

Prints `[exit code, stdout, stderr]` of each as JSON. Most of a script's time is the import of torch.
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


def run(script: str, arguments: list[str], streams: list[BinaryIO]) -> int:
    """The exit code of `python SCRIPT ARGUMENTS…` with this stdout and stderr."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    sys.exit(0)


def main(script: str, given: str) -> None:
    ends = []
    for arguments in json.loads(given):
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            code = run(script, arguments, [out, err])
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        ends.append([code, *texts])
    print(json.dumps(ends))


if __name__ == "__main__":
    main(*sys.argv[1:])
