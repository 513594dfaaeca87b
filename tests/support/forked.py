"""Ranks as forks of one process, so that they import each module once.

`Here.fork` and `Hosts.fork` (place.py) run them, with the variables by which a PyTorchJob's ranks find each
other. Only promises of a launcher need a launcher, because a training has the same bits under every launcher
(test_start.py).
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from mpiddp import cli
from tests.support.patience import until_readable
from tests.support.ranks import ROOT

OF_TRAINING = ("mpiddp.train.main", "torch._dynamo")  # two thirds of the time of a short one
OF_RANKS = (
    *OF_TRAINING,
    *("mpiddp.checkpoints.checkpoints", "mpiddp.runtime.torch.process_group"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.profiler", "numpy.ma"),
)


class Rank(NamedTuple):
    """The variables of a rank, and the pid 1 of its host in a test cluster; 0 for this machine."""

    env: Mapping[str, str]
    host: int = 0


def variables(hosts: Sequence[str], address: str, port: int) -> list[dict[str, str]]:
    """Those of a rank on each of these hosts. Rank 0 listens at the address, on the port."""
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_RANK": str(hosts[:rank].count(host)),
            "LOCAL_WORLD_SIZE": str(hosts.count(host)),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        for rank, host in enumerate(hosts)
    ]


def in_children(
    arguments: Sequence[str], ranks: Sequence[Rank], folder: Path, out: int, err: int
) -> int:
    """The exit code of ranks that run a verb of mpiddp, or a script: the first code that is not 0.

    Changes of the process end with the ranks. If a signal ends a rank, the others are killed.
    """
    code, left = 0, {_start(arguments, rank, folder, out, err) for rank in ranks}
    while left:
        pid, status = os.wait()
        left.discard(pid)
        ended = os.waitstatus_to_exitcode(status)
        code = code or ended
        if ended < 0:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
    return code


def _start(arguments: Sequence[str], rank: Rank, folder: Path, out: int, err: int) -> int:
    """The pid of a child that does so."""
    if child := os.fork():
        return child
    code = 1
    try:
        atexit._clear()  # the parent's temporary folders are not this process's to remove
        _end_with_parent()
        if rank.host:
            _enter(rank.host)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(err, 2)
        # A fork of this fork opens the numbers anew.
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            for number, mode in enumerate("rww")
        )
        os.environ.clear()
        os.environ.update(rank.env)
        os.chdir(folder)
        try:
            code = _called(arguments)
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
        getattr(threading, "_shutdown")()  # noqa: B009  # as at Python's end; no stub has it
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter(host: int) -> None:
    """Go on in a child, on a host of a test cluster."""
    libc = ctypes.CDLL(None, use_errno=True)
    kinds = ("pid", "net", "uts", "ipc", "mnt")
    for file in [os.open(f"/proc/{host}/ns/{kind}", os.O_RDONLY) for kind in kinds]:
        if libc.setns(file, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    if child := os.fork():  # only a child is in the namespace of pids
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    _end_with_parent()


def _end_with_parent() -> None:
    """Be killed at the end of the process that has started this one."""
    set_pdeathsig = 1  # linux/prctl.h
    ctypes.CDLL(None).prctl(set_pdeathsig, signal.SIGKILL, 0, 0, 0)


def _called(arguments: Sequence[str]) -> int:
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [
        folder_name for folder_name in path if folder_name and folder_name not in sys.path
    ]
    if arguments[0].endswith(".py"):
        sys.argv = [*arguments]
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")
        return 0
    words = [*arguments[2:]] if arguments[0] == "-m" else [*arguments]
    sys.argv = ["mpiddp", *words]
    return cli.main(words)


@cache
def _server() -> subprocess.Popen[str]:
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


def run(arguments: Sequence[str], ranks: Sequence[Rank], folder: Path, out: Path, err: Path) -> int:
    """`in_children` of a process that has imported torch. The ranks print into the two files."""
    server = _server()
    job = [[*arguments], [*map(list, ranks)], *map(str, (folder, out, err))]
    assert server.stdin
    assert server.stdout
    server.stdin.write(f"{json.dumps(job)}\n")
    server.stdin.flush()
    try:
        until_readable(server.stdout)
        return int(server.stdout.readline())
    except BaseException:  # a time limit: the answer would be the next one's
        server.kill()
        _server.cache_clear()
        raise


if __name__ == "__main__":
    for module in OF_RANKS:
        import_module(module)
    gc.freeze()  # a child's collector would copy all pages
    for line in sys.stdin:
        arguments, ranks, folder, out, err = json.loads(line)
        with open(out, "w", encoding="utf-8") as stdout, open(err, "w", encoding="utf-8") as stderr:  # noqa: PTH123
            files = stdout.fileno(), stderr.fileno()
            print(
                in_children(arguments, [Rank(*fields) for fields in ranks], folder, *files),
                flush=True,
            )
