"""Growth (`--grow`): look for hosts that can join a running job, and stop its ranks for a restart on them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial

from mpiddp.launch.judge.events import Announcement, Record, Stop
from mpiddp.launch.plan.job_plan import search_once
from mpiddp.launch.run.agents import Agents, Turn


def ask_in_thread(
    ask: Callable[[], list[str]], every_s: float | None, is_over: threading.Event
) -> list[str]:
    """Ask in a thread, because files, names and logins to hosts may hang. Its answers grow the list."""
    answers = list[str]()

    def run() -> None:
        while not is_over.wait(every_s):
            answers.extend(ask())

    threading.Thread(target=run, daemon=True).start()
    return answers


class Growth:
    """The search of one attempt, which begins once all of its ranks have joined."""

    def __init__(
        self, agents: Agents, turn: Turn, record: Record, is_over: threading.Event
    ) -> None:
        self._record, self._output, self._server = record, agents.output, agents.server
        search = partial(search_once, agents.plan, turn.avoided)
        self._sentences = ask_in_thread(search, agents.plan.options.grow_s, is_over)

    def see(self, now: float) -> None:
        """Stop all ranks after their present steps, if hosts can join and no step would be lost."""
        if not self._sentences:
            return
        sentence, why_not = self._sentences.pop(), ""
        record, announced = self._record, self._record.announcement
        most = announced.max_ranks or record.world_size + 1
        if record.stop or record.done or record.world_size >= most:
            return
        if len(record.latest["supports_stop"]) < record.world_size:
            why_not = "not every rank has called mpiddp.should_stop()"
        elif announced == Announcement():
            why_not = "the script has announced nothing that resumes it (mpiddp.announce)"
        if why_not:
            self._output.log(f"{sentence}, but {why_not}, so the job continues without a restart.")
        else:
            self._output.log(f"{sentence}: stopping to restart.")
            number = int(signal.SIGTERM)
            record.note("stop", by=Stop.TO_GROW.name, reason=sentence, signal=number)
            self._server.ask(self._server.connected, "stop", signal=number)
