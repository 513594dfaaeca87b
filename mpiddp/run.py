"""`mpiddp run`: one rank of a job runs an unmodified env:// script, as torchrun would have it.

The ranks meet, the store that MASTER_ADDR and MASTER_PORT point at is up, and the script finds
sys.argv, `__main__`, its folder on sys.path, exit codes and tracebacks as if python had started it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import types
from importlib.util import find_spec
from pathlib import Path

from mpiddp.errors import OneSentenceParser, UserError
from mpiddp.world import World, limit_threads


def main(argv: list[str]) -> int:
    parser = OneSentenceParser(
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
    limit_threads(world)

    sys.excepthook = _script_excepthook
    from mpiddp.group import assemble

    with assemble(world, keep_mpi=options.keep_mpi) as crew:
        check, run = (_check_module, _run_module) if options.is_module else (_check_file, _run_file)
        with crew.together():
            check(options.script)
        sys.argv = [options.script, *options.args]
        run(options.script)
    return 0


def _check_file(path: str) -> None:
    if not Path(path).exists():
        raise UserError(f"{path} not found (looked in {Path.cwd()}).")
    if not Path(path).is_file():
        raise UserError(f"{path} is a folder, not a script. To run a module: mpiddp run -m MODULE")


def _run_file(path: str) -> None:
    """As `python path`. In a module of its own, so that pickle and spawn find `__main__`."""
    file = os.path.abspath(path)  # noqa: PTH100 - as python has it: links stay links
    # This file's own `from __future__` lines are not the script's.
    code = compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=file, __builtins__=__builtins__, __cached__=None)
    sys.path[0] = str(Path(file).resolve().parent)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _check_module(name: str) -> None:
    sys.path[0] = os.getcwd()  # noqa: PTH109 - the very string that python -m puts there
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = find_spec(f"{name}.__main__")
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or " "):  # one that a package on the way imports
            raise
        spec = None
    if spec is None:
        raise UserError(f"no module {name} to run (looked in {Path.cwd()} and what is installed).")


def _run_module(name: str) -> None:
    """As `python -m name`."""
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script_excepthook(
    kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
) -> None:
    """The script's traceback without the frames that only brought us to the script."""
    ours = {str(Path(__file__).parent), str(Path(runpy.__file__).parent)}
    frame = traceback
    while frame is not None:
        filename = frame.tb_frame.f_code.co_filename
        if not filename.startswith("<frozen ") and str(Path(filename).parent) not in ours:
            break
        frame = frame.tb_next
    # A script that cannot be compiled has no frame of its own; what else has none is a bug of ours.
    trimmed = None if frame is None and isinstance(error, SyntaxError) else frame or traceback
    # The interpreter prints the error's own traceback, whatever it is handed besides.
    sys.__excepthook__(kind, error.with_traceback(trimmed), trimmed)
