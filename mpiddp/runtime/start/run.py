"""How a rank begins: one page for all that it may run. `mpiddp run` runs a script, a module or a command.

    mpirun … python -m mpiddp run train.py --lr 0.1
    mpirun … python -m mpiddp run -- ./any_command

`mpiddp run-function`, a rank of `mpiddp.spawn`, and `mpiddp train` begin in the same way. Its GPUs, cores,
threads and malloc are set before torch loads. A variable of OpenMP or of glibc that the user has set takes
precedence.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial
from itertools import takewhile

from mpiddp.errors import UserError
from mpiddp.protocol.variables import BIND, GPUS
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.session import Session
from mpiddp.runtime.launcher.connected import connected
from mpiddp.runtime.log import RankParser
from mpiddp.runtime.start.join import join, limit_threads
from mpiddp.text import shown
from mpiddp.world import World

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_KEPT = 1 << 30  # bytes of a block; larger ones are data sets, not a step's tensors
_LARGEST_IN_OLD_GLIBC = 32 << 20  # an old glibc rejects a larger value


def run_rank(
    run: Callable[[Session, Coordinator], int],
    *,
    keep_mpi: bool = False,
    uses_torch: bool = True,
) -> int:
    """Be a rank of a job: join the others, `run`, and leave together. Returns the exit code of `run`.

    Args:
        keep_mpi, uses_torch: see `mpiddp.runtime.start.join.join`.

    Raises:
        UserError, JobFailed, SystemExit: see `mpiddp.runtime.start.join.join`.
    """
    world = World.from_env()
    prepare_process(world)
    joined = partial(join, world, keep_mpi=keep_mpi, uses_torch=uses_torch)
    with connected(world) as session, joined() as coordinator:
        return run(session, coordinator)


def prepare_process(world: World) -> None:
    """Configure GPUs, cores, threads and memory for this rank. Call this before torch is imported.

    Raises:
        UserError: variables of the launcher that contradict each other.
    """
    if {GPUS, BIND} & os.environ.keys():
        from mpiddp.runtime.start.own_gpu import bind_to_gpu, choose_gpus  # few ranks need it

        choose_gpus(world)
        bind_to_gpu(world)
    limit_threads(world)
    is_configured = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys()
    if not is_configured and "glibc.malloc." not in os.environ.get("GLIBC_TUNABLES", ""):
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Let glibc keep freed memory, because the next step allocates the same amount.

    By default, glibc returns the memory of a step's tensors to the system, and the next step waits until
    the kernel has found and zeroed every page again. With another libc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    if not mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT):
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_OLD_GLIBC)


def main(argv: list[str]) -> int:
    """Run `mpiddp run ARGV`, and return the exit code."""
    ours, rest = _split(argv)
    is_command, is_module = rest[:1] == ["--"], rest[:1] == ["-m"]
    job = rest[1:] if is_command or is_module else rest
    options = _parser().parse_args([*ours, *(["command"] if is_command else job[:1])])
    if is_command:
        command = job
        _check_command(command, keep_mpi=options.keep_mpi)
        from mpiddp.runtime.start.command import run_command  # a script needs none of it

        return run_rank(lambda session, job: run_command(command, session, job), uses_torch=False)
    from mpiddp.runtime.start.script import run_script, show_own_frames_only

    show_own_frames_only()
    return run_rank(
        lambda session, coordinator: run_script(
            coordinator, options.script, job[1:], is_module=is_module
        ),
        keep_mpi=options.keep_mpi,
    )


def _parser() -> RankParser:
    parser = RankParser(
        prog="mpiddp run",
        usage="%(prog)s [--keep-mpi] (SCRIPT | -m MODULE | -- COMMAND) [ARGS ...]",
        description="Run an unmodified env:// script, or any command, as one rank of a job, after all "
        "ranks have joined.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--keep-mpi",
        action="store_true",
        help="keep MPI initialized, for a script that uses mpi4py itself",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, or a module with -m")
    return parser


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our own options, and what follows: a script, "-m" and a module, or "--" and a command."""
    ours = list(takewhile(lambda each: each.startswith("-") and each not in ("--", "-m"), argv))
    return ours, argv[len(ours) :]


def _check_command(command: list[str], *, keep_mpi: bool) -> None:
    if not command:
        raise UserError('mpiddp run: no command follows "--". See: mpiddp run --help')
    if keep_mpi:
        raise UserError(
            "mpiddp run --keep-mpi is for a Python script. A command that uses MPI itself is started by "
            f"mpirun: mpirun … {shown(command[0])}"
        )
