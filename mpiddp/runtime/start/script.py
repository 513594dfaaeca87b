"""One rank of a job runs an unmodified env:// script, as torchrun does.

The ranks have joined, and MASTER_ADDR and MASTER_PORT point to a running store. sys.argv, `__main__`, the
script's folder on sys.path, exit codes and tracebacks are the same as if python had started the script.
"""

from __future__ import annotations

import builtins
import os
import sys
import types
from collections.abc import Sequence
from importlib.abc import InspectLoader
from importlib.util import find_spec
from pathlib import Path

from mpiddp.errors import DONE, UserError
from mpiddp.paths import named_by
from mpiddp.runtime.job.coordinator import Coordinator

_OURS = Path(__file__).parents[:3]  # the folders whose frames lead to a script


def run_script(
    coordinator: Coordinator, name: str, args: Sequence[str], *, is_module: bool = False
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
