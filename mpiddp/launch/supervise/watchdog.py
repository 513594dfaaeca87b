"""Notice ranks that do not start, do not join or make no step, report where they are, and end the job."""

from __future__ import annotations

from collections.abc import Callable

from mpiddp.launch.supervise.agenda import Agenda
from mpiddp.launch.supervise.control_server import ControlServer, Message
from mpiddp.launch.supervise.job_state import JobState
from mpiddp.launch.supervise.limits import Limits

# Time limits for ranks to send their stacks, also after an interrupt.
STACKS_S, INTERRUPTED_S = 4.0, 1.0


class Watchdog:
    """Watches the ranks of one job.

    Args:
        server: None if the ranks cannot reach this process. Their end is then all that it learns.
        log: prints a sentence.
        end: ends the job, for the reason in a sentence.
        is_over: whether the job has failed, or stops on request. Its ranks are not reported then.
        runs_command: the job is no Python script, and may never make a step.
    """

    def __init__(
        self,
        server: ControlServer | None,
        state: JobState,
        limits: Limits,
        agenda: Agenda,
        *,
        log: Callable[[str], None],
        end: Callable[[str], None],
        is_over: Callable[[], bool],
        runs_command: bool,
    ) -> None:
        self._server = server
        self._state = state
        self._limits = limits
        self._agenda = agenda
        self._log = log
        self._end = end
        self._is_over = is_over
        self._has_no_steps_since = agenda.clock.now() if runs_command else float("inf")
        self._awaiting_stacks: list[Callable[[], None]] = []

    def begin(self) -> None:
        """mpirun has started."""
        if self._limits.start_timeout_s is not None and self._server is not None:
            self._agenda.add(self._limits.start_timeout_s, self._check_start)
        if self._limits.hang_timeout_s is not None:
            self._agenda.add(1.0, self._check_for_hangs)

    def on_message(self, message: Message) -> None:
        """React to a message that the state has noted."""
        if message.kind == "joining" and len(self._state.joining) == 1:
            timeout_s = message.facts["timeout_s"]
            self._agenda.add(timeout_s, lambda: self._check_for_missing_ranks(timeout_s))
        if self._awaiting_stacks and not self._silent_ranks:
            self._have_stacks()

    def _check_start(self) -> None:
        """End the job if no rank has started: mpirun hangs, and no other limit would end it."""
        if not self._state.started and not self._is_over():
            self._end(
                f"no rank has started in {self._limits.start_timeout_s:g} s: mpirun or one of its "
                "ssh logins hangs. If a start takes that long, raise --timeout."
            )

    def _check_for_hangs(self) -> None:
        """Without a step for too long, request the stacks of all ranks, then report the stuck ones."""
        timeout_s = self._limits.hang_timeout_s
        assert timeout_s is not None
        newest, now = self._state.newest_step_at, self._agenda.clock.now()
        if self._state.all_done or self._is_over():
            return
        if newest is None and now - self._has_no_steps_since >= timeout_s:
            self._has_no_steps_since = float("inf")
            self._log(
                f"no rank has made a step in {timeout_s:g} s. --hang-timeout watches a command only if its "
                "script calls mpiddp.should_stop() in every step."
            )
        if newest is None or now - newest < timeout_s:
            self._agenda.add(min(1.0, timeout_s), self._check_for_hangs)
            return
        self._request_stacks(lambda: self._report_hang(newest))

    def _report_hang(self, newest: float) -> None:
        if self._state.newest_step_at != newest:  # it was only slow
            self._check_for_hangs()
            return
        if self._state.all_done or self._is_over():
            return
        from mpiddp.launch.supervise.hang_report import hang_sentences

        for sentence in hang_sentences(self._state, self._limits.hang_timeout_s or 0.0):
            self._log(sentence)
        self._end("the job hung and was stopped.")

    def _check_for_missing_ranks(self, timeout_s: float) -> None:
        """If some ranks have not joined in time, request all stacks, then report the missing ranks."""
        if self._state.missing and not self._is_over():
            self._request_stacks(lambda: self._report_missing_ranks(timeout_s))

    def _report_missing_ranks(self, timeout_s: float) -> None:
        if self._state.missing and not self._is_over():
            from mpiddp.launch.supervise.hang_report import missing_sentence

            self._end(missing_sentence(self._state, timeout_s))

    # --- the stacks of the ranks ---

    def _request_stacks(self, then: Callable[[], None]) -> None:
        """Call `then` once every rank has sent its stacks, or after the time limits above."""
        self._state.stacks.clear()
        self._state.frames.clear()
        if self._server is not None:
            self._server.request_stacks()
        self._awaiting_stacks.append(then)
        if not self._silent_ranks:
            self._have_stacks()
            return
        self._agenda.add(STACKS_S, self._interrupt_silent_ranks)
        self._agenda.add(STACKS_S + INTERRUPTED_S, self._have_stacks)

    @property
    def _silent_ranks(self) -> set[int]:
        """The ranks that are connected and have not answered the request for their stacks."""
        connected = self._server.connected if self._server is not None else set()
        return connected - self._state.stacks.keys() - self._state.done

    def _interrupt_silent_ranks(self) -> None:
        if self._server is not None:
            for rank in self._silent_ranks:
                self._server.interrupt(rank)

    def _have_stacks(self) -> None:
        self._agenda.remove(self._interrupt_silent_ranks)
        self._agenda.remove(self._have_stacks)
        reports, self._awaiting_stacks = self._awaiting_stacks, []
        for report in reports:
            report()
