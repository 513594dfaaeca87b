"""From the first host to all: who sends to whom, in threads.

The first host sends to few hosts, and few bytes, at once. From `TREE_FROM` hosts on, each host that has the
folders passes them on, to one host at a time, so that no link carries them more than a few times. A host
that cannot log in to the others passes on nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from mpiddp.hosts.cluster import connection, receive, rsync, transfer, tree
from mpiddp.hosts.cluster.connection import FIRST, START, Failed, Lost, Peer
from mpiddp.hosts.cluster.transfer import LOGIN_BYTES, Lacks, offer, send, size_of
from mpiddp.hosts.cluster.tree import Row
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.sources import program_with
from mpiddp.hosts.ssh import shell_command
from mpiddp.hosts.ssh_complaints import login_failed

TREE_FROM = 4  # hosts
_PROGRESS_S = 0.2

# The program has its own text, since it may pass the folders on.
_PROGRAM = "PROGRAM = %a\nexec(PROGRAM)"
_BEGIN = f"sys.modules[{receive.__name__!r}].main(({_PROGRAM!r} % PROGRAM).encode())"


def receiving_program() -> bytes:
    """The program of a push on a host: the modules of both ends."""
    text = program_with((tree, rsync, connection, transfer, receive), _BEGIN, first=FIRST)
    return (_PROGRAM % text).encode()


@dataclass(frozen=True)
class Content:
    """What all hosts are to have: the header of the push, and the rows of each of its trees."""

    header: dict[str, Any]
    rows: list[list[Row]]


@dataclass
class Target:
    """A host, and what it lacks, once it was asked."""

    host: Host
    peer: Peer
    lacks: Lacks = field(default_factory=dict)

    @classmethod
    def connect(cls, host: Host) -> Target:
        return cls(host, connect(host))

    def read_ahead(self, named: list[dict[str, Any]]) -> None:
        """Let the host read these folders, before it is asked. Raises Failed if it cannot be reached."""
        with sentences(self.host):
            self.peer.ask({"read": named})

    def ask(self, content: Content) -> None:
        """Raises Failed if the host cannot take the folders, or cannot be reached."""
        with sentences(self.host):
            self.lacks = offer(self.peer, content.header, content.rows)

    def bytes(self, content: Content) -> int:
        return size_of(content.rows, self.lacks)


def connect(host: Host) -> Peer:
    return Peer(shell_command(host, START), receiving_program())


@contextlib.contextmanager
def sentences(host: Host) -> Iterator[None]:
    """Turns the end of a connection to `host` into Failed, with ssh's reason."""
    try:
        yield
    except Lost as error:
        raise Failed(_why_lost(host, error)) from None


def _why_lost(host: Host, lost: Lost) -> str:
    if lost.has_begun:
        last = lost.stderr.strip().splitlines()[-1:] or [f"exit code {lost.exit_code}"]
        return f"the connection was lost ({last[0].rstrip('.')}). Run it again: it continues."
    missing = "python3 is missing there. Install it: a push needs no more."
    limit_s = connection.LOGIN_S
    return login_failed(host, lost.exit_code, lost.stderr, limit_s=limit_s, missing=missing)


class FanOut:
    """One push to all targets. `failures` has a sentence for each host that did not get the folders."""

    def __init__(self, content: Content, targets: Sequence[Target]) -> None:
        self._content, self._targets = content, targets
        self._waiting = deque(targets)
        self._passing_on = 0
        self._left: set[Future[None]] = set()  # what the threads still do
        self._is_stopped = False
        self._change = threading.Condition()
        self._peers = [target.peer for target in targets]
        self.failures: dict[Host, str] = {}
        self.done: list[Host] = []
        self.sent = 0
        self.found = 0  # of these bytes, how many the hosts had, in older states of the files

    @property
    def is_over(self) -> bool:
        return len(self.done) + len(self.failures) == len(self._targets)

    def run(self, progress: Callable[[FanOut], None]) -> None:
        """Send to all. Calls `progress` a few times each second, from this thread."""
        most = max(target.bytes(self._content) for target in self._targets)
        is_tree = len(self._targets) >= TREE_FROM and most >= LOGIN_BYTES
        with ThreadPoolExecutor(len(self._targets) + 1) as pool:
            try:
                with self._change:
                    if is_tree:
                        self._left.add(pool.submit(self._serve, pool, None))
                    else:
                        self._left |= {pool.submit(self._send, each) for each in self._targets}
                while self._left:
                    ended, _ = wait(self._left, _PROGRESS_S)
                    for future in ended:
                        future.result()
                    with self._change:
                        self._left -= ended
                    progress(self)
            except BaseException:  # Ctrl-C: end all connections, so that the threads end
                with self._change:
                    self._is_stopped = True
                    for peer in self._peers:
                        peer.process.kill()
                raise

    def _report(self, count: int, found: int = 0) -> None:
        with self._change:
            self.sent += count
            self.found += found

    def _serve(self, pool: ThreadPoolExecutor, source: Target | None) -> None:
        """Send to one waiting host after the other, from `source`, or from here."""
        while target := self._next(from_here=source is None):
            if source is None:
                self._send(target)
            elif not self._pass_on(source, target):
                return
            if target.host in self.done:
                with self._change:
                    self._left.add(pool.submit(self._serve, pool, target))

    def _next(self, *, from_here: bool) -> Target | None:
        """A waiting host, or None. From here it waits for those that others cannot reach."""
        with self._change:
            while from_here and not self._waiting and self._passing_on:
                self._change.wait()
            if self._is_stopped or not self._waiting:
                return None
            self._passing_on += not from_here
            return self._waiting.popleft()

    def _end(self, target: Target, failure: str = "") -> None:
        with self._change:
            if failure:
                self.failures[target.host] = failure
            else:
                self.done.append(target.host)

    def _send(self, target: Target) -> None:
        """Send from here."""
        try:
            with sentences(target.host):
                if target.peer.process.poll() is not None:  # another host was to pass it on
                    target = self._connected(target.host)
                    target.ask(self._content)
                content = self._content
                if lacks := target.lacks:
                    found = send(target.peer, content.header, content.rows, lacks, self._report)
                    self._report(0, found)
            self._end(target)
        except Failed as failure:
            self._end(target, str(failure))
        finally:
            target.peer.close()

    def _connected(self, host: Host) -> Target:
        target = Target.connect(host)
        with self._change:
            self._peers.append(target.peer)
        return target

    def _pass_on(self, source: Target, target: Target) -> bool:
        """Let `source` send to `target`. False if it cannot reach it: then the target waits again."""
        target.peer.close()
        reached = True
        peer = self._connected(source.host).peer
        try:
            peer.ask({"pass_on": shell_command(target.host, START), "header": self._content.header})
            while True:
                message = peer.answer()
                self._report(message.get("sent", 0), message.get("found", 0))
                if "done" in message:
                    self._end(target)
                    break
                if "lost" in message:
                    reached = False
                    break
        except Failed as failure:
            self._end(target, str(failure))
        except Lost:
            reached = False
        finally:
            peer.close()
            with self._change:
                self._passing_on -= 1
                if not reached:
                    self._waiting.append(target)
                self._change.notify_all()
        return reached
