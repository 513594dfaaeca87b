"""The pickle of a function, with what it needs from the caller's own modules.

cloudpickle pickles what `__main__` and a notebook define by value, and the rest by name. The other hosts have
the installed packages, but not the files beside the caller's script. So these modules are pickled by value.
"""

from __future__ import annotations

import functools
import inspect
import io
import linecache
import pickle
import sys
from base64 import b64encode
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from mpiddp.errors import UserError, import_package
from mpiddp.protocol.channel import encode_value

_INSTALLED = frozenset({"site-packages", "dist-packages"})  # folders of packages


def pickled_call(
    function: Callable[..., Any], args: tuple[Any, ...], max_result_bytes: int
) -> bytes:
    """The function and its arguments for `mpiddp.runtime.function`, with what it has to know of them."""
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
            f"{type(error).__name__}: {str(error).rstrip('.')}. Create it within the "
            "function."
        ) from error
    finally:
        for module in own:
            with suppress(ValueError):  # another thread has
                cloudpickle.unregister_pickle_by_value(module)
    facts = {
        "name": name,
        "cloudpickle": cloudpickle.__version__,
        "max_result_bytes": max_result_bytes,
        "sources": _sources(function),
        "path": [str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)],
    }
    return encode_value([facts, b64encode(body).decode()])


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
    found: object = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function; of a partial one, that of its function; else the type's name."""
    inner = _inner(function)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def _inner(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _sources(function: Callable[..., Any]) -> dict[str, str]:
    """The lines of the function's file or cell, for tracebacks on hosts that do not have it."""
    code = getattr(inspect.unwrap(_inner(function)), "__code__", None)
    if code is None:
        return {}
    return {code.co_filename: "".join(linecache.getlines(code.co_filename))}


def _own_modules() -> list[ModuleType]:
    """The loaded modules of Python files below the script's folder, or a notebook's working folder."""
    folder, others, found = Path(sys.path[0]).resolve(), {"mpiddp", *sys.stdlib_module_names}, []
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or ".").resolve()
        is_own = path.suffix == ".py" and path.is_relative_to(folder)
        if not is_own or _INSTALLED & set(path.parts) or name.partition(".")[0] in others:
            continue
        if name == module.__name__ != "__main__":
            found.append(module)
    return found
