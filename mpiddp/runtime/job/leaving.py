"""How this process ends: an error says once why the rank fails, and a success leaves the job.

Whoever notices an end comes here, with the error that was caught, or None:

    noticed by                          function       after a success      after a failure
    the main program of a script        `of_script`    leaves               says why, and shows the error as python does
    a process group, when it is left    `of_group`     finishes, leaves     says a sentence, and raises SystemExit
    atexit, in a script of a command    `of_command`   –                    says why; python has shown the error
    atexit, in a rank by hand           `by_hand`      leaves               – (its parent sees the exit code)
    the channel's thread, by hand       `watch`        –                    ends with the rank that has failed

A script only says how it ends. Its agent, which sees the end, decides how the rank goes on
(`mpiddp.runtime.rank_attempt`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from mpiddp.errors import FAILED, JobFailed, fault, print_error
from mpiddp.protocol.channel import digest
from mpiddp.protocol.variables import ERROR_FILE
from mpiddp.runtime.job.coordinator import GRACE_S, Coordinator
from mpiddp.runtime.job.ending import Ending, Refused, ending_of, record

if TYPE_CHECKING:
    from mpiddp.runtime.job.progress import Progress
    from mpiddp.runtime.job.stopping import StopRequest

    class Session(Protocol):
        """What an end needs of the `mpiddp.runtime.job.session.Session`."""

        env: Mapping[str, str]
        rank: int
        is_shown: bool
        is_member: bool
        torch_store: object
        coordinator: Coordinator
        progress: Progress
        stop: StopRequest

        @property
        def is_current(self) -> bool: ...
        @property
        def is_by_hand(self) -> bool: ...
        def tell_agent(self, kind: str, **facts: object) -> bool: ...
        def ask_agent(self, question: str, **facts: object) -> dict[str, Any]: ...


EXIT_UNKNOWN = SystemExit(FAILED)  # a script has exited, and only its parent knows the code
_OUR_FOLDER = str(Path(__file__).parents[1])  # the frames of its files lead to a script


class End:
    """The end of the process that has this session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.error: BaseException | None = None  # has ended the script, or its process group

    def of(self, error: BaseException | None) -> Ending:
        """What this error is for a script, which may end early because it was asked to."""
        return ending_of(error, has_stopped=self._session.stop.has_stopped)

    # --- who notices an end ---

    def of_script(self) -> int | str | None:
        """End a script as python does, with `error`. Returns the argument of `sys.exit`."""
        error, ending = self.error, self.of(self.error)
        if not ending.is_failure:
            self._session.tell_agent("left")
            if not self._session.is_member:  # otherwise a handler of atexit leaves
                self._leave(serves=self._session.torch_store is not None)
        else:
            assert error is not None
            with _handlers_wait():
                is_shown = self.say(error)
            if ending.traceback:  # otherwise a sentence says it all
                frames = script_frames(error.__traceback__)
                sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
                if is_shown:
                    _show(error.with_traceback(frames))
        if isinstance(error, SystemExit):
            # Python flushes the script's open files only if nothing but sys.last_value keeps its frames.
            error.__traceback__ = None
            return error.code
        return ending.code

    def of_group(self, error: BaseException | None = None) -> None:
        """Leave a process group. Raises SystemExit for a UserError or a JobFailed, of which this says the sentence."""
        if not self._session.is_current:
            return
        ending, is_by_hand = self.of(error), self._session.is_by_hand
        if error is EXIT_UNKNOWN or not ending.is_failure:  # many scripts end with sys.exit(main())
            try:
                self._session.progress.finish()
                self._leave(
                    serves=self._session.torch_store is not None and error is not EXIT_UNKNOWN
                )
                return
            except (JobFailed, OSError) as failure:
                error = JobFailed(str(failure))
                ending = self.of(error)
        if is_by_hand:
            self.error = error
        if error is None or ending.traceback:  # Python prints a traceback itself
            return
        if not isinstance(error, SystemExit):
            self.say(error)
            raise SystemExit(ending.code) from None
        if not is_by_hand:
            self.say(error)

    def of_group_begins(self, error: BaseException) -> bool:
        """Whether this error fails the rank. Then the agent learns it before the group is destroyed.

        Once it is destroyed, the other ranks fail as well.
        """
        fails = (
            self._session.is_current
            and self.of(error).is_failure
            and not isinstance(error, Refused)
        )
        if fails and not self._session.is_by_hand:
            self._claim(error)
        return fails

    def of_command(self) -> None:
        """Say which error has ended the script of a command. Python has printed it."""
        error = getattr(sys, "last_value", None)
        if error is not None and self._session.is_current:  # false in a forked child
            self.say(error, is_printed=True)

    def by_hand(self) -> None:
        """Leave by hand, unless an error ends this process. The script has caught any other one."""
        fails = isinstance(self.error, SystemExit) or getattr(sys, "last_value", None)
        self.error = None  # its frames would keep the script's files open
        if self._session.is_current and not fails:
            self._session.coordinator.send("leave")

    def watch(self) -> None:
        """Agree on a stop, or end with the rank that has failed. By hand, the thread that receives calls this."""
        ranks = self._session.coordinator
        self._session.stop.agree()
        if ranks.code_of_failure or ranks.is_lost:
            time.sleep(GRACE_S)
            if self._session.is_member:
                exit_now(ranks.code_of_end())

    def tell_over(self) -> None:
        """Tell the agent that all handlers of atexit have run. Python takes long to clear its modules."""
        error, self.error = self.error, None  # its frames would keep the script's files open
        if error is not None and (ending := ending_of(error)).is_failure:
            flush()
            self._session.tell_agent("over", code=ending.code)

    # --- what they do ---

    def _leave(self, *, serves: bool) -> None:
        """Leave the job after a success, see `Coordinator.leave`. All ranks must call this."""
        has_stopped = self._session.stop.has_stopped
        if has_stopped:
            self._session.progress.count_saves(0)
        # The first rank that exits with a code other than 0 ends the others, which may still save.
        self._session.coordinator.leave(waits=has_stopped or serves)

    def say(self, error: BaseException, *, is_printed: bool = False) -> bool:
        """Say why this process fails: tell it the agent, and print what nobody else prints.

        `is_printed`: Python has shown the error. Returns whether it is to be shown.
        """
        session, ending = self._session, ending_of(error)
        # A save in flight goes on after sys.exit(), because the agent ends the others. A claim ends it.
        is_first, is_same = (True, False) if isinstance(error, SystemExit) else self._claim(error)
        if ending.follows and is_first and not is_printed:
            # A rank that the kernel has killed claims no first failure.
            is_first = not session.ask_agent("lost_connection")
        self._record(ending)
        is_by_hand, has_launcher = session.is_by_hand, session.coordinator.has_launcher
        is_sentence = ending.is_refusal or (ending.is_verdict and is_by_hand)
        # A launcher prints it once for all.
        if is_first and is_sentence and not (is_printed or has_launcher):
            print_error(ending.error)
        is_shown = self._is_shown(error, ending, is_first=is_first, is_same=is_same)
        if not (is_shown or is_printed):
            session.tell_agent("hidden", text=ending.facts["traceback"])
        return is_shown

    def _is_shown(
        self, error: BaseException, ending: Ending, *, is_first: bool, is_same: bool
    ) -> bool:
        """Whether the terminal gets this error, or only the rank's file.

        Errors of connections follow from that of the first rank to fail, and would hide it. Ctrl-C interrupts all
        ranks, so rank 0 shows where. Of equal errors, the first rank shows its own.
        """
        if isinstance(error, KeyboardInterrupt) and self._session.rank > 0:
            return False
        return is_first or not (ending.follows or is_same)

    def _record(self, ending: Ending) -> None:
        """Give the agent the reason, both by a message and in the file: a full disk takes no file."""
        if ending.error:
            self._session.tell_agent("failed", ending=Ending(**ending.facts))
        if not self._session.is_by_hand:
            record(ending, self._session.env.get(ERROR_FILE, ""))

    def _claim(self, error: BaseException) -> tuple[bool, bool]:
        """Whether this rank is the first to fail, and whether the first, another one, has the same error.

        Errors are the same if their classes, their texts and the lines that raised them are equal.
        """
        session, like = self._session, ""
        with contextlib.suppress(Exception):  # the __str__ of the error may fail
            # A Ctrl-C interrupts each rank elsewhere. A hook of the script's own, as of wandb, may do more than print.
            if session.is_shown and isinstance(error, Exception) and _hook() is sys.__excepthook__:
                like = digest(fault(error).encode(errors="replace")).hex()
        answer = {} if session.coordinator.connection else session.ask_agent("claim", like=like)
        is_first, first = answer.get("first") or session.coordinator.claim_first_failure(like)
        return is_first, not is_first and like != "" and like == first


def exit_now(code: object) -> NoReturn:
    """End the process with this code, without the remaining handlers of atexit."""
    flush()
    os._exit(code if isinstance(code, int) else 1)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have closed or replaced it
            stream.flush()


def _hook() -> Any:
    """The hook that prints the error of the script, without torch's, which only adds the rank and calls it."""
    hook: Any = sys.excepthook
    while hook.__module__ == "torch.distributed.distributed_c10d":
        hook = dict(zip(hook.__code__.co_freevars, hook.__closure__, strict=True))[
            "old_hook"
        ].cell_contents
    return hook


def _show(error: BaseException) -> None:
    """Print the error that ends the script as python does, also if the script's own hook fails."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as second:
        second.__traceback__ = script_frames(second.__traceback__)
        for title, shown in (
            ("Error in sys.excepthook", second),
            ("\nOriginal exception was", error),
        ):
            print(f"{title}:", file=sys.stderr)
            sys.__excepthook__(type(shown), shown, shown.__traceback__)


@contextlib.contextmanager
def _handlers_wait() -> Iterator[None]:
    """Let the script's handlers of signals wait for those of atexit, where their errors are no cause.

    That of DataLoader raises one when a worker ends, often just after the error that ends the script.
    """
    numbers = signal.valid_signals()
    handlers = {n: handler for n in numbers if callable(handler := signal.getsignal(n))}
    for number in handlers:
        signal.signal(number, lambda number, _: atexit.register(signal.raise_signal, number))
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def script_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that lead to the script."""
    while traceback and traceback.tb_frame.f_code.co_filename.startswith(("<frozen ", _OUR_FOLDER)):
        traceback = traceback.tb_next
    return traceback
