"""The function of `mpiddp.spawn`: its caller pickles it, every rank runs it and answers with its result.

It is the module that `mpiddp launch` runs on every rank. Function and answer travel over the connection of
the rank's script to the launcher, see `mpiddp.launch.control.Exchange`.

cloudpickle pickles what `__main__` and a notebook define by value, and the rest by name. The other hosts have
the installed packages, but not the files beside the caller's script. So these modules are pickled by value.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import linecache
import pickle
import sys
import traceback
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from mpiddp.errors import JobFailed, UserError, import_package
from mpiddp.protocol.channel import mac
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import ending_of
from mpiddp.runtime.job.session import current
from mpiddp.runtime.join import join
from mpiddp.runtime.script import script_frames

_MAX_TRACEBACK = 1 << 15  # characters
_LARGEST_ERROR = 32 << 20  # bytes of the pickle of an exception
_INSTALLED = frozenset({"site-packages", "dist-packages"})  # folders of packages


def said(error: Exception) -> str:
    """Python's name of an error and its text, to go on with a full stop."""
    return f"{type(error).__name__}: {str(error).rstrip('.')}"


# --- in the caller ---


def pickled_call(
    function: Callable[..., Any], args: tuple[Any, ...], max_result_bytes: int
) -> bytes:
    """The function and its arguments, with what a rank has to know of them."""
    cloudpickle = import_package("cloudpickle", "mpiddp.spawn")
    name = name_of(function)
    before = cloudpickle.list_registry_pickle_by_value()
    own = [module for module in _own_modules() if module.__name__ not in before]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        body = cloudpickle.dumps((function, args))
    except Exception as error:
        raise UserError(
            f"mpiddp.spawn cannot pickle {name}, its arguments and the variables that it uses: "
            f"{said(error)}. Create it within the function."
        ) from error
    finally:
        for module in own:
            with contextlib.suppress(ValueError):  # another thread has
                cloudpickle.unregister_pickle_by_value(module)
    facts = {
        "name": name,
        "cloudpickle": cloudpickle.__version__,
        "max_result_bytes": max_result_bytes,
        "sources": _sources(function),
        "path": [str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)],
    }
    return b64encode(pickle.dumps((facts, body)))


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function; of a partial one, that of its function; else the type's name."""
    inner = _inner(function)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _sources(function: Callable[..., Any]) -> dict[str, Any]:
    """The lines of the function's file or cell, as an entry of linecache that no check of files removes."""
    code = getattr(inspect.unwrap(_inner(function)), "__code__", None)
    if code is None:
        return {}
    file, lines = code.co_filename, linecache.getlines(code.co_filename)
    return {file: (sum(map(len, lines)), None, lines, file)}


def _own_modules() -> list[ModuleType]:
    """The loaded modules of Python files below the script's folder, or a notebook's working folder."""
    # A notebook has "" behind the folders of the standard library.
    folders = [Path(each).resolve() for each in sys.path[:1] + [""] * ("" in sys.path)]
    others, found = {"mpiddp", *sys.stdlib_module_names}, []
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or ".").resolve()
        is_own = path.suffix == ".py" and any(map(path.is_relative_to, folders))
        is_other = _INSTALLED & {*path.parts} or name.partition(".")[0] in others
        if is_own and not is_other and name == module.__name__ != "__main__":
            found.append(module)
    return found


class _Unpickler(pickle.Unpickler):
    """Reads a pickle of a rank without changing the caller's own classes.

    cloudpickle sends a class of `__main__` by value, finds the caller's class again, and would set its
    methods to those that came back, with copies of their global variables.
    """

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module.partition(".")[0] != "cloudpickle" or name != "_class_setstate":
            return found
        return lambda kind, state: kind if _is_defined_here(kind) else found(kind, state)


def unpickled(body: bytes) -> Any:
    """The object of a rank's pickle. Raises any error that its classes do."""
    return _Unpickler(io.BytesIO(body)).load()


def _is_defined_here(kind: type) -> bool:
    """Whether a loaded module has this class under its name."""
    with contextlib.suppress(KeyError, AttributeError):
        return attrgetter(kind.__qualname__)(sys.modules[kind.__module__]) is kind
    return False


# --- in a rank ---


def main() -> None:
    """Run the function as this rank, in the process of its script, and answer with its result."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a cell shows lines while the function runs
    session = current()
    with join() as coordinator:
        try:
            with coordinator.all_or_none():
                facts, body = received_function(coordinator)
                for file, entry in facts["sources"].items():
                    if not Path(file).exists():  # a notebook's cell: tracebacks show its lines
                        linecache.cache[file] = entry
                # What the function imports may lie beside the caller's script, if this host has that folder.
                sys.path += [each for each in facts["path"] if each not in sys.path]
                function, args = unpickled_function(facts, body, coordinator.world.hostname)
            sys.argv[0] = facts["name"]
            try:
                result = function(*args)
            except SystemExit as end:
                if ending_of(end, has_stopped=session.stop.has_stopped).is_failure:
                    raise
                result = None
            # A result that is refused ends the other ranks, which may still save.
            session.finish()
            body = pickled_result(result, facts, coordinator.name(coordinator.world.rank))
            answer(coordinator, body, is_result=True)
        except (UserError, JobFailed, SystemExit):
            raise  # the launcher itself learns of them
        except BaseException as error:  # asyncio.CancelledError is no Exception
            with contextlib.suppress(JobFailed):  # the agent notices it as well
                answer(coordinator, pickled_error(error), is_result=False)
            raise


def received_function(coordinator: Coordinator) -> tuple[dict[str, Any], bytes]:
    """The facts about the function, and its pickle. Raises JobFailed if a stranger has sent it."""
    facts, value = coordinator.ask("function")
    if facts["mac"] != mac(coordinator.key, "function", value):
        raise coordinator.lost()
    found: tuple[dict[str, Any], bytes] = pickle.loads(b64decode(value))
    return found


def answer(coordinator: Coordinator, body: bytes, *, is_result: bool) -> None:
    """Send the answer of this rank, and wait until the launcher has it."""
    value = b64encode(body)
    proof = mac(coordinator.key, f"answer {coordinator.world.rank}", value)
    coordinator.ask("answer", value, is_result=is_result, mac=proof)


def unpickled_function(
    facts: Mapping[str, Any], body: bytes, hostname: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments."""
    cloudpickle = import_package("cloudpickle", f"mpiddp.spawn on {hostname}")
    try:
        function, args = pickle.loads(body)
    except Exception as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = f" Install {error.name} on every host."
        elif cloudpickle.__version__ != facts["cloudpickle"]:
            hint = (
                f" cloudpickle is {cloudpickle.__version__} there, and {facts['cloudpickle']} "
                "in the calling process. Install the same version."
            )
        raise UserError(
            f"{facts['name']} cannot be unpickled on {hostname}: {said(error)}.{hint}"
        ) from None
    return function, args


def pickled_result(result: object, facts: Mapping[str, Any], rank: str) -> bytes:
    """The pickle of a rank's result."""
    import cloudpickle

    name, limit = facts["name"], facts["max_result_bytes"]
    try:
        body: bytes = cloudpickle.dumps(result)
    except Exception as error:
        raise UserError(
            f"{rank}: {name} has returned an object of {type(result).__qualname__} that cannot be pickled: "
            f"{said(error)}."
        ) from None
    if len(body) > limit:
        raise UserError(
            f"{rank}: the result of {name} has {len(body)} bytes, more than max_result_bytes={limit}. "
            "Return less, write it to a file, or raise max_result_bytes."
        )
    return body


def pickled_error(error: BaseException) -> bytes:
    """The pickle of an error's traceback, and of its own pickle: b"" if it has none of a usual size."""
    frames, body = script_frames(error.__traceback__), b""
    text = "".join(traceback.format_exception(type(error), error, frames))
    with contextlib.suppress(Exception):
        import cloudpickle

        body = cloudpickle.dumps(error)
    # The caller may lack the error's class.
    return pickle.dumps((text[-_MAX_TRACEBACK:], body if len(body) <= _LARGEST_ERROR else b""))


if __name__ == "__main__":
    main()
