"""mpiddp in forks of one process: many commands, of which none imports what another has imported already."""

import atexit
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

from mpiddp import cli
from tests.support.ranks import ROOT

LIMIT_S = 300
OF_TRAINING = ("mpiddp.train.train", "torch._dynamo")  # two thirds of the time of a short one


def in_a_child(
    arguments: Sequence[str], env: Mapping[str, str], folder: Path, out: int, err: int
) -> int:
    """The exit code of mpiddp with these arguments. What it changes ends with the child."""
    if (child := os.fork()) == 0:
        code = 99
        try:
            signal.alarm(LIMIT_S)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out, 1)
            os.dup2(err, 2)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            os.environ.clear()
            os.environ.update(env)
            os.chdir(folder)
            sys.argv = ["mpiddp", *arguments]
            try:
                code = cli.main([*arguments])
            except SystemExit as exit:
                code = exit.code if isinstance(exit.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@cache
def _server() -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.kill)
    return process


def train(
    arguments: Sequence[str], env: Mapping[str, str], folder: Path, out: Path, err: Path
) -> int:
    """The exit code of `mpiddp ARGUMENTS…`, a training without a launcher."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    job = [list(arguments), dict(env), *map(str, (folder, out, err))]
    server.stdin.write(f"{json.dumps(job)}\n")
    server.stdin.flush()
    return int(server.stdout.readline())


if __name__ == "__main__":
    for module in OF_TRAINING:
        import_module(module)
    for line in sys.stdin:
        arguments, env, folder, out, err = json.loads(line)
        with open(out, "w") as stdout, open(err, "w") as stderr:  # noqa: PTH123
            print(in_a_child(arguments, env, folder, stdout.fileno(), stderr.fileno()), flush=True)
