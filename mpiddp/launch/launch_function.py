"""The launcher of `mpiddp.spawn`: like `mpiddp launch`, for a function of the process that started it.

`mpiddp launch-function N` gets options and function over the socket with the file descriptor N, and sends
the ranks' answers and the outcome back. When the caller is gone, the job stops as on SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from typing import Any

from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, STOPPED, JobFailed, UserError
from mpiddp.launch import log
from mpiddp.launch.exchange import Exchange, messages_over
from mpiddp.launch.job import run
from mpiddp.launch.options import parse_options
from mpiddp.launch.output import open_closed_streams
from mpiddp.launch.variables import parse_exports
from mpiddp.launch.verdict import Outcome
from mpiddp.protocol.channel import encode
from mpiddp.text import all_of
from mpiddp.world import leave_enclosing_job

_JOB = ("-m", "mpiddp.runtime.function")


def main(argv: list[str]) -> int:
    """Launch the job of the caller at the other end of the socket `argv[0]`. The exit codes are launch's."""
    started_at = time.time()
    open_closed_streams()
    # The caller may ignore it, as a shell's background process does, and still send it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    caller = socket.socket(fileno=int(argv[0]))
    caller.set_inheritable(False)
    try:
        call, function = next(messages_over(caller))
    except (OSError, StopIteration):  # the caller has ended
        return FAILED
    threading.Thread(target=_end_with, args=(caller,), daemon=True).start()
    exchange = Exchange(function, call["max_result_bytes"])
    try:
        outcome = _launch(call, exchange, started_at)
    except UserError as error:
        outcome = Outcome(BAD_INPUT, str(error))
    except JobFailed as error:
        outcome = Outcome(FAILED, str(error))
    except KeyboardInterrupt:  # nothing has started yet
        outcome = Outcome(INTERRUPTED, "interrupted.")
    with contextlib.suppress(OSError):  # the caller has ended
        _report(outcome, exchange, caller)
    return outcome.code


def _launch(call: dict[str, Any], exchange: Exchange, started_at: float) -> Outcome:
    leave_enclosing_job(os.environ)
    options = parse_options([*call["options"], *_JOB])
    # Those of `env=`, which are on no command line.
    given = parse_exports([f"{name}={value}" for name, value in call["env"].items()], {})
    options = replace(options, variables={**options.variables, **given})
    outcome = run(options, started_at, exchange)
    if outcome.known_cause:  # the caller's exception has the verdict
        log.info(outcome.known_cause)
    return _final(outcome, exchange)


def _final(outcome: Outcome, exchange: Exchange) -> Outcome:
    """The outcome: a job without the result of a rank has failed."""
    missing = [rank for rank in range(exchange.world_size) if rank not in exchange.results]
    if outcome.code in (DONE, STOPPED) and missing:
        ranks = all_of([f"rank {rank}" for rank in missing])
        return outcome._replace(code=FAILED, sentence=f"{ranks} ended without a result.")
    return outcome


def _report(outcome: Outcome, exchange: Exchange, caller: socket.socket) -> None:
    """Send the caller the results, or the error of the rank that failed first, and then the outcome."""
    rank, host = (outcome.first.rank, outcome.first.host) if outcome.first else (None, "")
    answers = exchange.results
    if outcome.code not in (DONE, STOPPED):
        answers = {each: body for each, body in exchange.errors.items() if each == rank}
    for each, body in answers.items():
        caller.sendall(encode("answer", body, rank=each))
    final = {"code": outcome.code, "sentence": outcome.sentence, "rank": rank, "host": host}
    caller.sendall(encode("outcome", b"", **final))


def _end_with(caller: socket.socket) -> None:
    """Stop the job when the caller has ended, however it did."""
    with contextlib.suppress(OSError):
        caller.recv(1)  # it sends nothing more
    os.kill(os.getpid(), signal.SIGTERM)
