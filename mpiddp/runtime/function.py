"""`mpiddp run-function`: one rank of `mpiddp.spawn` runs the caller's function, and returns its result.

The agents have met, as for a script. The function comes from the launcher, and the answer goes back to it,
over connections that prove the job's secret: see `mpiddp.launch.exchange`.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpiddp.errors import JobFailed, UserError, missing_package
from mpiddp.protocol.messages import ANSWER, FUNCTION, GO, notice_silence
from mpiddp.protocol.payload import Payload, receive_payload, send_payload
from mpiddp.runtime.job.connect import Server, connect_to_launcher
from mpiddp.runtime.job.ending import Refused, ending_of
from mpiddp.runtime.job.session import Session
from mpiddp.runtime.join import join
from mpiddp.runtime.script import Go, script_frames
from mpiddp.world import World

_MAX_TRACEBACK = 1 << 20  # characters


def main(argv: list[str]) -> int:
    """Be the agent of a rank that runs the function. `argv` follows the function's name in sys.argv.

    Raises:
        UserError: `mpiddp.spawn` has not started this process.
    """
    from mpiddp.runtime.agent import run_function as run_agent

    return run_agent(argv)


def run_function(session: Session, go: Go) -> None:
    """Run the function as this rank, in the process of its script, and answer with its result."""
    assert go.caller is not None
    for stream in (sys.stdout, sys.stderr):  # a cell shows lines while the function runs
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with join() as coordinator:
        caller = Caller(Server(*go.caller), coordinator.world)
        with caller.reporting_errors():
            with coordinator.all_or_none():
                payload = caller.function()
                facts = payload.facts
                check_python(facts, coordinator.world.hostname)
                _show_lines_of(facts["sources"])
                # What the function imports may lie beside the caller's script, if this host has that folder.
                sys.path += [each for each in facts["path"] if each not in sys.path]
                function, args = unpickled(payload, coordinator.world.hostname)
            sys.argv[0] = facts["name"]
            try:
                result = function(*args)
            except SystemExit as end:
                if ending_of(end, has_stopped=session.stop.has_stopped).is_failure:
                    raise
                result = None
            # A result that is refused ends the other ranks, which may still save.
            session.finish()
            world = coordinator.world
            body = pickled_result(result, facts, f"rank {world.rank} on {world.hostname}")
            caller.answer({"kind": "result"}, body)


class Caller:
    """The process that has called `mpiddp.spawn`, by way of the launcher."""

    def __init__(self, launcher: Server, world: World) -> None:
        self._launcher = launcher
        self._world = world
        self._max_bytes = 0  # of an answer's body, once the function is there

    def function(self) -> Payload:
        """The function, pickled, with facts about it.

        Raises:
            JobFailed: the launcher cannot be reached.
        """
        with self._connected(FUNCTION) as connection:
            connection.sendall(GO)
            payload = receive_payload(connection, self._launcher.key, FUNCTION)
        self._max_bytes = payload.facts["max_result_bytes"]
        return payload

    def answer(self, facts: dict[str, Any], body: bytes = b"") -> None:
        """Send the answer of this rank, and wait until the launcher has it.

        Raises:
            JobFailed: the launcher cannot be reached.
        """
        with self._connected(ANSWER) as connection:
            purpose = f"{ANSWER} {self._world.rank}"
            send_payload(connection, Payload(facts, body), self._launcher.key, purpose)
            if connection.recv(len(GO)) != GO:
                raise ConnectionError("the launcher has closed the connection")

    @contextlib.contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Send the caller an error of the body before the ranks end because of it.

        The launcher itself learns of a JobFailed and of an exit code.
        """
        try:
            yield
        except (UserError, Refused) as refusal:
            sentence = refusal.sentence if isinstance(refusal, Refused) else str(refusal)
            with contextlib.suppress(JobFailed):  # the other connection notices it as well
                self.answer({"kind": "refusal", "sentence": sentence})
            raise
        except (JobFailed, SystemExit):
            raise
        except BaseException as error:  # asyncio.CancelledError is no Exception
            with contextlib.suppress(JobFailed):
                self.answer(
                    {"kind": "exception", "traceback": _traceback(error)},
                    pickled_error(error, self._max_bytes),
                )
            raise

    @contextlib.contextmanager
    def _connected(self, kind: str) -> Iterator[socket.socket]:
        connection = connect_to_launcher(self._launcher, self._world, kind).connection
        with connection:
            notice_silence(connection, is_read_slowly=True)
            try:
                yield connection
            except (OSError, ValueError) as error:
                raise JobFailed(
                    f"rank {self._world.rank} on {self._world.hostname} has lost the launcher during the "
                    f"transfer of its {kind}: {error}."
                ) from None


def check_python(facts: Mapping[str, Any], hostname: str) -> None:
    """Raise UserError if the function's bytecode is that of another Python than this one."""
    theirs, own = tuple(facts["python"]), sys.version_info[:2]
    if theirs != own:
        raise UserError(
            f"{hostname} runs Python {own[0]}.{own[1]} ({sys.executable}), but mpiddp.spawn was called by "
            f"Python {theirs[0]}.{theirs[1]}, whose functions it cannot run. Install Python "
            f"{theirs[0]}.{theirs[1]} there, at the same path."
        )


def unpickled(payload: Payload, hostname: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments.

    Raises:
        UserError: cloudpickle, or a module that the function needs, is missing here.
    """
    name = payload.facts["name"]
    try:
        import cloudpickle
    except ModuleNotFoundError as error:
        if error.name != "cloudpickle":
            raise
        raise UserError(missing_package(f"mpiddp.spawn on {hostname}", "cloudpickle")) from None
    try:
        function, args = pickle.loads(payload.body)
    except Exception as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError):
            hint = f" Install {error.name} on every host."
        elif cloudpickle.__version__ != payload.facts["cloudpickle"]:
            hint = (
                f" cloudpickle is {cloudpickle.__version__} there, and {payload.facts['cloudpickle']} "
                "in the calling process. Install the same version."
            )
        raise UserError(
            f"{name} cannot be unpickled on {hostname}: {_said(error)}.{hint}"
        ) from None
    return function, args


def pickled_result(result: object, facts: Mapping[str, Any], rank: str) -> bytes:
    """The pickle of a rank's result.

    Raises:
        UserError: it cannot be pickled, or is larger than max_result_bytes.
    """
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


def pickled_error(error: BaseException, limit: int) -> bytes:
    """The pickle of an exception, without its traceback; b"" if it has none within the limit."""
    with contextlib.suppress(Exception):
        import cloudpickle

        body: bytes = cloudpickle.dumps(error)
        return body if len(body) <= limit else b""
    return b""


def _traceback(error: BaseException) -> str:
    import traceback  # takes 5 ms, and few ranks need it

    frames = script_frames(error.__traceback__)
    return "".join(traceback.format_exception(type(error), error, frames))[-_MAX_TRACEBACK:]


def _show_lines_of(sources: Mapping[str, str]) -> None:
    """Let tracebacks show the lines of files that this host does not have: a notebook's cells."""
    for file, text in sources.items():
        if not Path(file).exists():
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).rstrip('.')}"
