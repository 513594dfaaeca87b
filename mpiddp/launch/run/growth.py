"""Growth (`--grow`): look for hosts that can join a running job, and stop its ranks for a restart on them."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from functools import partial

from mpiddp.launch.judge.events import Announcement, Phase, Record, Stop
from mpiddp.launch.plan.job_plan import search_once
from mpiddp.launch.run.attempt import Attempt, Watcher
from mpiddp.protocol.server import Event


def ask_in_thread(
    ask: Callable[[], list[str]], every_s: float, record: Record, phase: Phase
) -> list[str]:
    """Ask in a thread during this phase, because files, names and logins to hosts may hang.

    The answers grow the list.
    """
    answers = list[str]()

    def run() -> None:
        while record.phase <= phase:
            time.sleep(every_s)
            if record.phase is phase:
                answers.extend(ask())

    threading.Thread(target=run, daemon=True).start()
    return answers


class Growth(Watcher):
    """The search of one attempt, as long as all of its ranks run."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt)
        plan = attempt.agents.plan
        self._sentences = list[str]()  # about hosts that can join
        if attempt.turn.grows and (every_s := plan.options.grow_s) is not None:
            search = partial(search_once, plan, plan.past.doubts)
            self._sentences = ask_in_thread(search, every_s, self.record, Phase.RUNNING)

    def on_event(self, event: Event) -> None:
        """A rank has made its last step. From now on, the others have limited time."""
        is_first = event.kind == "stopped" and self.record.phase is Phase.RUNNING
        if is_first and self.record.stop is Stop.TO_GROW:
            self.attempt.note("grace")

    def look(self, now: float) -> None:
        """Stop all ranks after their present steps, if hosts can join and no step would be lost."""
        record, announced = self.record, self.record.announcement
        if not (record.runs and self._sentences):
            return
        sentence, why_not = self._sentences.pop(), ""
        most = announced.max_ranks or record.world_size + 1
        if record.stop or record.done or record.world_size >= most:
            return
        if len(record.latest["supports_stop"]) < record.world_size:
            why_not = "not every rank has called mpiddp.should_stop()"
        elif announced == Announcement():
            why_not = "the script has announced nothing that resumes it (mpiddp.announce)"
        if why_not:
            self.output.log(f"{sentence}, but {why_not}, so the job continues without a restart.")
            return
        self.output.log(f"{sentence}: stopping to restart.")
        number = int(signal.SIGTERM)
        self.attempt.note("stop", by=Stop.TO_GROW.name, reason=sentence, signal=number)
        self.server.ask(self.server.connected, "stop", signal=number)
