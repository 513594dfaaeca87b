"""`mpiddp run`: one rank of a job runs an unmodified env:// script, as torchrun would have it.

The ranks join, the store that MASTER_ADDR and MASTER_PORT point at is up, and the script finds
sys.argv, `__main__`, its folder on sys.path, exit codes and tracebacks as if python had started it.
"""

from __future__ import annotations

import argparse
import os
import sys
import types
from importlib.abc import InspectLoader
from importlib.util import find_spec
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.runtime.arguments import RankParser
from mpiddp.runtime.process_setup import configure_process
from mpiddp.runtime.session import reporting
from mpiddp.world import World

_OURS = Path(__file__).parents[:2]  # the folders of all that leads to a script


def main(argv: list[str]) -> int:
    parser = RankParser(
        prog="mpiddp run",
        usage="%(prog)s [--keep-mpi] (SCRIPT | -m MODULE) [ARGS ...]",
        description="One rank of a job: run an env:// script, as it is, with all ranks together.",
        allow_abbrev=False,
    )
    parser.add_argument("--keep-mpi", action="store_true", help="the script uses mpi4py itself")
    parser.add_argument("-m", dest="is_module", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("script", metavar="SCRIPT", help="a file, or with -m a module's name")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's own arguments")
    options = parser.parse_args(argv)

    world = World.from_env()
    configure_process(world)

    sys.excepthook = _script_excepthook
    with reporting(world):
        _run(options, world)
    return 0


def _run(options: argparse.Namespace, world: World) -> None:
    from mpiddp.runtime.join import join  # with torch, which takes a while

    load = _load_module if options.is_module else _load_file
    with join(world, keep_mpi=options.keep_mpi) as coordinator:
        with coordinator.all_or_none():
            code, main_module = load(options.script)
        file = str(main_module.__file__)
        sys.argv = [file if options.is_module else options.script, *options.args]
        # Pickle looks for the script's own classes under the first name. What a spawned process
        # sends back is of the second, which is mpiddp's own until now.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main_module
        exec(code, main_module.__dict__)


def _load_file(path: str) -> tuple[types.CodeType, types.ModuleType]:
    if not Path(path).exists():
        raise UserError(f"{path} not found (looked in {Path.cwd()}).")
    if not Path(path).is_file():
        raise UserError(f"{path} is a folder, not a script. To run a module: mpiddp run -m MODULE")
    file = os.path.abspath(path)  # noqa: PTH100 - as python has it: a link stays a link
    sys.path[0] = str(Path(path).resolve().parent)
    # This file's own `from __future__` lines are not the script's.
    code = compile(Path(path).read_bytes(), file, "exec", dont_inherit=True)
    return code, _main_module(file)


def _load_module(name: str) -> tuple[types.CodeType, types.ModuleType]:
    sys.path[0] = os.getcwd()  # noqa: PTH109 - the very string that python -m puts there
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # one that a package on the way imports
            raise
        spec = None
    loader = spec.loader if spec is not None else None
    code = loader.get_code(spec.name) if spec and isinstance(loader, InspectLoader) else None
    if spec is None or spec.origin is None or code is None:
        raise UserError(f"no module {name} to run (looked in {Path.cwd()} and what is installed).")
    main_module = _main_module(spec.origin)
    main_module.__spec__, main_module.__loader__ = spec, loader
    main_module.__package__, main_module.__dict__["__cached__"] = spec.parent, spec.cached
    return code, main_module


def _main_module(file: str) -> types.ModuleType:
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__file__=file, __cached__=None, __builtins__=__builtins__)
    return main_module


def _script_excepthook(
    kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
) -> None:
    """The script's traceback without the frames that only brought us to the script."""
    frame = traceback
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith("<frozen ") and Path(file).parent not in _OURS:
            break
        frame = frame.tb_next
    # A script that cannot be compiled has no frame of its own; what else has none is a bug of ours.
    trimmed = None if frame is None and isinstance(error, SyntaxError) else frame or traceback
    # The interpreter prints the error's own traceback, whatever it is handed besides.
    sys.__excepthook__(kind, error.with_traceback(trimmed), trimmed)
