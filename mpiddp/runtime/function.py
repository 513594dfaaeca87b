"""The function of `mpiddp.spawn` in a rank, which runs it and answers with its result.

It is the module that `mpiddp launch` runs on every rank. Function and answer travel over the connection of
the rank's script to the launcher, see `mpiddp.launch.run.control.Exchange`.
"""

from __future__ import annotations

import contextlib
import linecache
import pickle
import sys
import traceback
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

from mpiddp.errors import JobFailed, UserError, import_package
from mpiddp.hosts.program_files import is_local
from mpiddp.protocol.channel import mac
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.leaving import script_frames
from mpiddp.runtime.job.session import current
from mpiddp.runtime.join import join

_MAX_TRACEBACK, _LARGEST_ERROR = 1 << 15, 32 << 20  # characters, and bytes of the pickled exception


def named(error: Exception) -> str:
    """Python's name of an error and its text, to go on with a full stop."""
    return f"{type(error).__name__}: {str(error).rstrip('.')}"


def main() -> None:
    """Run the function as this rank, in the process of its script, and answer with its result."""
    session = current()
    with join() as coordinator:
        try:
            with coordinator.all_or_none():
                facts, call = received_call(coordinator)
            sys.argv[0] = facts["name"]
            try:
                result = call()
            except SystemExit as end:
                if session.end.of(end).is_failure:
                    raise
                result = None
            # A result that is refused ends the other ranks, which may still save.
            session.progress.finish()
            rank = coordinator.name(coordinator.world.rank)
            answer(coordinator, pickled_result(result, facts["name"], rank), is_result=True)
        except (UserError, JobFailed, SystemExit):
            raise  # the launcher itself learns of them
        except BaseException as error:  # asyncio.CancelledError is no Exception
            with contextlib.suppress(JobFailed):  # the agent notices it as well
                answer(coordinator, pickled_error(error), is_result=False)
            raise


def received_call(coordinator: Coordinator) -> tuple[dict[str, Any], Callable[[], Any]]:
    """The facts about the function, and the call of it. That of a stranger is not unpickled."""
    import_package("cloudpickle", f"mpiddp.spawn on {coordinator.world.hostname}")
    answered, value = coordinator.ask("function")
    if answered["mac"] != mac(coordinator.server.key, mac("", "function", value)):
        raise coordinator.lost()
    facts, body = pickle.loads(b64decode(value))
    linecache.cache.update(facts["source"])  # tracebacks show its lines
    sys.path[:0] = filter(is_local, facts["path"])
    sys.path += [folder for folder in facts["path"] if folder not in sys.path]
    try:
        return facts, pickle.loads(body)
    except Exception as error:
        fix = ""
        if isinstance(error, ModuleNotFoundError):
            fix = (
                f"copy it to every host, or call cloudpickle.register_pickle_by_value({error.name})"
            )
        where = coordinator.world.hostname
        raise UserError(
            f"{facts['name']} cannot be unpickled on {where}: {named(error)}.", fix=fix
        ) from None


def answer(coordinator: Coordinator, body: bytes, *, is_result: bool) -> None:
    """Send the answer of this rank, and wait until the launcher has it."""
    value = b64encode(body)
    proof = mac(coordinator.server.key, "answer", value)
    coordinator.ask("answer", value, is_result=is_result, mac=proof)


def pickled_result(result: object, name: str, rank: str) -> bytes:
    """The pickle of what the function of this name has returned."""
    import cloudpickle

    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise UserError(
            f"{rank}: {name} has returned an object of {type(result).__qualname__} that cannot be pickled: "
            f"{named(error)}."
        ) from None


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
