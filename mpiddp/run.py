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
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.world import World, limit_threads


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="mpiddp run", description=__doc__, allow_abbrev=False)
    parser.add_argument("--keep-mpi", action="store_true", help="the script uses mpi4py itself")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)

    world = World.from_env()
    limit_threads(world)

    sys.excepthook = _script_excepthook
    from mpiddp.group import assemble

    with assemble(world, keep_mpi=options.keep_mpi) as crew:
        with crew.together():
            if not options.module and not Path(options.script).is_file():
                raise UserError(f"{options.script} not found (looked in {Path.cwd()}).")
        if options.module:
            _run_module(options.script, options.args)
        else:
            _run_script(options.script, options.args)
    return 0


def _run_script(path: str, args: list[str]) -> None:
    """As `python path args…`. A module of its own, so that pickle and spawn find `__main__`."""
    code = compile(Path(path).read_bytes(), path, "exec")
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    sys.argv = [path, *args]
    sys.path[0] = str(Path(path).resolve().parent)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _run_module(name: str, args: list[str]) -> None:
    """As `python -m name args…`."""
    sys.argv = [name, *args]
    sys.path[0] = os.getcwd()  # noqa: PTH109 - the very string that python -m puts there
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _script_excepthook(
    kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
) -> None:
    """The script's traceback without the frames that only brought us to the script."""
    ours = {str(Path(__file__).parent), str(Path(runpy.__file__).parent), "<frozen runpy>"}
    frame = traceback
    while frame is not None:
        filename = frame.tb_frame.f_code.co_filename
        if filename not in ours and str(Path(filename).parent) not in ours:
            break
        frame = frame.tb_next
    trimmed = frame or traceback
    # The interpreter prints the error's own traceback, whatever it is handed besides.
    sys.__excepthook__(kind, error.with_traceback(trimmed), trimmed)
