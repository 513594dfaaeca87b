"""Stop the ranks after the same step, on request of the user, or to restart the job on more hosts.

A rank that does not stop in time ends with the others. While a rank saves, it has longer.
"""

from __future__ import annotations

from collections.abc import Callable

from mpiddp.launch.supervise.agenda import Agenda
from mpiddp.launch.supervise.control_server import ControlServer, Message
from mpiddp.launch.supervise.job_state import JobState
from mpiddp.launch.supervise.limits import Limits


class Stopping:
    """The requests to stop one job.

    `requests` counts those of the user: the second one kills the ranks. `grows`: this launcher has
    requested a stop, in order to restart on more hosts. `limit`: the time limit that the ranks exceeded.

    Args:
        log: prints a sentence.
        stop_mpirun: ends mpirun, and all ranks with it.
        end: ends the job as one that has failed, for the reason in a sentence.
        is_ending: whether mpirun is being ended already.
    """

    def __init__(
        self,
        server: ControlServer | None,
        state: JobState,
        limits: Limits,
        agenda: Agenda,
        *,
        log: Callable[[str], None],
        stop_mpirun: Callable[[], None],
        end: Callable[[str], None],
        is_ending: Callable[[], bool],
    ) -> None:
        self.requests = 0
        self.grows = False
        self.limit = ""
        self._server = server
        self._state = state
        self._limits = limits
        self._agenda = agenda
        self._log = log
        self._stop_mpirun = stop_mpirun
        self._end = end
        self._is_ending = is_ending
        self._since = 0.0
        self._says_saving = False

    @property
    def is_under_way(self) -> bool:
        """Whether the ranks have no more steps to make. One that grows makes steps until they agree."""
        return bool(self.requests or (self.grows and self._state.stopped))

    def request(self, reason: str) -> None:
        """The user's first request: stop all ranks, within the time limits."""
        self.requests = max(self.requests, 1)
        if self._server is None or not self._server.has_ranks:
            self._stop_mpirun()
            return
        self._send(self._server)
        self._begin_grace()
        if self._state.supports_stop:
            self._log(
                f"{reason}: the ranks are saving and stopping; another signal kills them at once."
            )

    def request_growth(self) -> None:
        """Stop all ranks after their present steps, however long these take."""
        assert self._server is not None
        self.grows = True
        self._send(self._server)

    def on_message(self, message: Message) -> None:
        """React to a message that the state has noted."""
        if message.kind == "started" and self.requests and self._server is not None:
            self._server.request_stop(message.rank)
        if message.kind == "stopped" and self.grows and len(self._state.stopped) == 1:
            self._begin_grace()  # the others are in the same step

    def _send(self, server: ControlServer) -> None:
        for rank in server.connected:
            server.request_stop(rank)

    def _begin_grace(self) -> None:
        self._since = self._agenda.clock.now()
        self._agenda.remove(self._check_grace)
        self._agenda.add(self._limits.grace_s, self._check_grace)

    def _check_grace(self) -> None:
        """End the ranks that have not stopped in time. A rank that saves has longer."""
        if self._is_ending():
            return
        grace_s, save_grace_s = self._limits.grace_s, self._limits.save_grace_s
        now = self._agenda.clock.now()
        since_stop = now - self._since
        since_save = now - max(self._state.last_saved_at, self._since)
        saving = sorted(self._state.saving)
        if saving and since_stop < save_grace_s:
            if not self._says_saving:
                self._says_saving = True
                self._log(
                    f"{self._state.names(saving)} {'is' if len(saving) == 1 else 'are'} still saving; "
                    f"waiting for at most {save_grace_s:g} s (--save-grace)."
                )
            self._agenda.add(min(1.0, save_grace_s - since_stop), self._check_grace)
        elif not saving and since_save < grace_s:  # after a save, a rank still has to leave
            self._agenda.add(grace_s - since_save, self._check_grace)
        else:
            self._exceed(saving)

    def _exceed(self, saving: list[int]) -> None:
        grace_s, save_grace_s = self._limits.grace_s, self._limits.save_grace_s
        late = saving or [r for r in sorted(self._state.started) if r not in self._state.done]
        self.limit = (
            f"{self._state.names(late)} {'was' if len(late) == 1 else 'were'} still saving "
            f"{save_grace_s:g} s after the request (--save-grace)"
            if saving
            else f"{self._state.names(late)} had not stopped {grace_s:g} s after the request "
            "(--grace)"
        )
        if self.requests:
            self._stop_mpirun()
        else:
            self._end(f"{self.limit}.")
