"""How a rank begins: one page for all that it may run. `mpiddp run` runs a script, a module or a command.

    mpirun … python -m mpiddp run train.py --lr 0.1
    mpirun … python -m mpiddp run -- ./any_command

`mpiddp run-function`, a rank of `mpiddp.spawn`, and `mpiddp train` begin in the same way. The GPUs, cores,
threads and malloc of a rank are set before torch loads. A variable of OpenMP or of glibc that the user has
set takes precedence.

An unmodified env:// script runs as under torchrun: the ranks have joined, and MASTER_ADDR and MASTER_PORT
point to a running store. sys.argv, `__main__`, the script's folder on sys.path, exit codes and tracebacks are
the same as if python had started the script.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import InspectLoader
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from mpiddp.errors import DONE, STOPPED, UserError
from mpiddp.paths import named_by
from mpiddp.protocol.variables import BIND, GPUS
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.session import Session
from mpiddp.runtime.job.stop import listen_when_alone
from mpiddp.runtime.launcher.connected import connected
from mpiddp.runtime.log import RankParser
from mpiddp.runtime.start.join import join, limit_threads
from mpiddp.text import shown
from mpiddp.world import World

_OURS = Path(__file__).parents[:3]  # the folders whose frames lead to a script
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


def run_trainer(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run `mpiddp train`, a program that uses public names only: it joins in its process group.

    It supports a stop from its first moment on, and alone the first Ctrl-C requests one.
    """
    world = World.from_env()
    prepare_process(world)
    with connected(world) as session:
        session.stop.declare_support()
        if world.launcher.name == "none":
            listen_when_alone(session.stop)
        code = main(argv)
        if code == STOPPED:
            session.stop.stopped()
        return code


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
    show_own_frames_only()
    return run_rank(
        lambda session, coordinator: _run_script(
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


def _run_script(
    coordinator: Coordinator, name: str, args: Sequence[str], *, is_module: bool
) -> int:
    """Run a script, or a module, as `__main__`, and return 0 at its end. All ranks must call this, once.

    Raises:
        SystemExit: code 2, on every rank, if it is missing on one.
        BaseException: any error of the script.
    """
    with coordinator.all_or_none():
        code, main_module = (_load_module if is_module else _load_file)(name)
    sys.argv = [str(main_module.__file__) if is_module else name, *args]
    # pickle finds the script's own classes under the first name. Objects that a spawned process
    # returns have the second name, which was mpiddp's own module until now.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main_module
    exec(code, main_module.__dict__)
    return DONE


def _load_file(path: str) -> tuple[types.CodeType, types.ModuleType]:
    with named_by(""):
        if not Path(path).exists():
            raise UserError(f"{path} not found (looked in {Path.cwd()}).")
        if Path(path).is_dir():
            raise UserError(
                f"{path} is a folder, not a script. To run a module: mpiddp run -m MODULE"
            )
        if not Path(path).is_file():
            raise UserError(
                f"{path} is no regular file, and each rank reads its script from the disk."
            )
        source = Path(path).read_bytes()
    file = os.path.abspath(path)  # noqa: PTH100 - as python does: a link stays a link
    _set_first_path(str(Path(path).resolve().parent))
    # Keep the `from __future__` imports of this file out of the script.
    code = compile(source, file, "exec", dont_inherit=True)
    return code, _main_module(file)


def _load_module(name: str) -> tuple[types.CodeType, types.ModuleType]:
    _set_first_path(os.getcwd())  # noqa: PTH109 - the same string as python -m uses
    try:
        spec = None if name.startswith(".") else find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # a parent package imports a missing module
            raise
        spec = None
    loader = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec and isinstance(loader, InspectLoader) else None
    if spec is None or spec.origin is None or code is None:
        raise UserError(
            f"module {name} not found (looked in {Path.cwd()} and in the installed packages)."
        )
    main_module = _main_module(spec.origin)
    main_module.__spec__, main_module.__loader__ = spec, loader
    main_module.__package__, main_module.__dict__["__cached__"] = spec.parent, spec.cached
    return code, main_module


def _set_first_path(folder: str) -> None:
    """Put the script's folder in the place of this program's own."""
    if not getattr(sys.flags, "safe_path", False):  # with it, Python 3.11 adds none
        sys.path[0] = folder


def _main_module(file: str) -> types.ModuleType:
    main_module = types.ModuleType("__main__")
    # The name is the module in a script, and its dictionary anywhere else.
    main_module.__dict__.update(__file__=file, __cached__=None, __builtins__=builtins)
    return main_module


def script_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames that lead to the script; None if no other is left."""
    frame = traceback
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith("<frozen ") and Path(file).parent not in _OURS:
            break
        frame = frame.tb_next
    return frame


def show_own_frames_only() -> None:
    """Print the traceback of a script, or of a function, without the frames that lead to it."""
    sys.excepthook = _print_traceback


def _print_traceback(
    kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
) -> None:
    frame = script_frames(traceback)
    # A script that cannot be compiled has no frame. Any other error without one is a bug of mpiddp.
    trimmed = None if frame is None and isinstance(error, SyntaxError) else frame or traceback
    # The interpreter prints the error's own traceback, and ignores the third argument.
    sys.__excepthook__(kind, error.with_traceback(trimmed), trimmed)
