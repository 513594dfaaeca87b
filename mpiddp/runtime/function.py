"""One rank of `mpiddp.spawn` runs the caller's function, and answers with its result.

It is the module that `mpiddp launch` runs on every rank. The function comes from the launcher, and the answer
goes back to it, over the connection of the rank's script: see `mpiddp.launch.exchange`.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import pickle
import sys
import traceback
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpiddp.errors import JobFailed, UserError, import_package
from mpiddp.protocol.channel import value_mac
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import ending_of
from mpiddp.runtime.job.session import current
from mpiddp.runtime.join import join
from mpiddp.runtime.script import script_frames

_MAX_TRACEBACK = 1 << 15  # characters
_LARGEST_ERROR = 32 << 20  # bytes of the pickle of an exception


def main() -> None:
    """Run the function as this rank, in the process of its script, and answer with its result."""
    for stream in (sys.stdout, sys.stderr):  # a cell shows lines while the function runs
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    session = current()
    with join() as coordinator:
        world = coordinator.world
        try:
            with coordinator.all_or_none():
                facts, body = received_function(coordinator)
                for file, text in facts["sources"].items():
                    if not Path(file).exists():  # a notebook's cell: tracebacks show its lines
                        lines = text.splitlines(keepends=True)
                        linecache.cache[file] = (len(text), None, lines, file)
                # What the function imports may lie beside the caller's script, if this host has that folder.
                sys.path += [each for each in facts["path"] if each not in sys.path]
                function, args = unpickled(facts, body, world.hostname)
            sys.argv[0] = facts["name"]
            try:
                result = function(*args)
            except SystemExit as end:
                if ending_of(end, has_stopped=session.stop.has_stopped).is_failure:
                    raise
                result = None
            # A result that is refused ends the other ranks, which may still save.
            session.finish()
            body = pickled_result(result, facts, f"rank {world.rank} on {world.hostname}")
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
    if facts["mac"] != value_mac(coordinator.key, "function", value):
        raise coordinator.lost()
    found, body = json.loads(value)
    return found, b64decode(body)


def answer(coordinator: Coordinator, body: bytes, *, is_result: bool) -> None:
    """Send the answer of this rank, and wait until the launcher has it."""
    value = b64encode(body)
    mac = value_mac(coordinator.key, f"answer {coordinator.world.rank}", value)
    coordinator.ask("answer", value, is_result=is_result, mac=mac)


def unpickled(
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
            f"{facts['name']} cannot be unpickled on {hostname}: {_said(error)}.{hint}"
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
            f"{_said(error)}."
        ) from None
    if len(body) > limit:
        raise UserError(
            f"{rank}: the result of {name} has {len(body)} bytes, more than max_result_bytes={limit}. "
            "Return less, write it to a file, or raise max_result_bytes."
        )
    return body


def pickled_error(error: BaseException) -> bytes:
    """The pickle of an exception's traceback, and of the pickle of the exception.

    The latter is b"" if it has none of a usual size. The caller may lack its class.
    """
    frames, body = script_frames(error.__traceback__), b""
    text = "".join(traceback.format_exception(type(error), error, frames))
    with contextlib.suppress(Exception):
        import cloudpickle

        body = cloudpickle.dumps(error)
    return pickle.dumps((text[-_MAX_TRACEBACK:], body if len(body) <= _LARGEST_ERROR else b""))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}"


if __name__ == "__main__":
    main()
