"""`mpiddp top`: the ranks of a job, redrawn every second on a terminal, or printed once."""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import sys
import termios
import textwrap
import threading
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mpiddp.arguments import OneSentenceParser
from mpiddp.errors import UserError
from mpiddp.hosts.gpus import answer
from mpiddp.hosts.names import is_this_host
from mpiddp.text import did_you_mean
from mpiddp.watch.jobs import Job, find_job
from mpiddp.watch.stacks import stacks_text
from mpiddp.watch.table import COLUMNS, Facts, head_lines, hosts_of, rank_lines, shown_ranks

_EVERY_S, _GPUS_EVERY_S = 1.0, 5.0
_KEYS = "q: quit  s: sort  h: host  a rank's number and Enter: its stack"
# A screen of its own, without a cursor, and with lines that the terminal does not wrap.
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l", "\x1b[?7h\x1b[?25h\x1b[?1049l"
# A line is erased before it is written: after a full one, the cursor is still on its last character.
_HOME, _ERASE_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[2K", "\x1b[J"
# Of nvidia-smi: who uses which GPU, and how busy each is.
_QUERIES = ("--query-compute-apps=pid,gpu_uuid,used_gpu_memory", "--query-gpu=uuid,utilization.gpu")
_ANSWER_S = 10.0


def main(argv: list[str]) -> int:
    """Run `mpiddp top ARGV`. Raises UserError for bad usage, no such job or host, or no answer."""
    options = _parse(argv)
    job = find_job(options.job)
    facts = job.now()
    if options.host and options.host not in hosts_of(facts):
        hint = did_you_mean(options.host, hosts_of(facts))
        raise UserError(f"--host {options.host}: the job has no such host.{hint}")
    is_terminal = os.isatty(0) and os.isatty(1) and os.environ.get("TERM", "dumb") != "dumb"
    if options.once or not is_terminal:
        ranks = shown_ranks(facts, options.sort, options.host)
        print("\n".join([*head_lines(facts), *rank_lines(ranks, gpus_of(ranks))]))
        return 0
    with _screen():
        why = _Top(job, options.sort, options.host).watch()
    print(why)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = OneSentenceParser(
        prog="mpiddp top",
        description="Watch the ranks of a job: steps per second, own and waiting time of a step, CPU, "
        "memory, seconds since the last step, GPU and last line. Keys: q quits, s sorts by the next column, "
        "h shows the next host, a rank's number and Enter its stack.",
        allow_abbrev=False,
    )
    parser.add_argument("job", nargs="?", metavar="JOB", help="pid or name (default: the only job)")
    parser.add_argument("--once", action="store_true", help="print it once, as without a terminal")
    parser.add_argument("--sort", choices=COLUMNS, default="rank", help="the column to sort by")
    parser.add_argument("--host", default="", help="only the ranks of this host")
    return parser.parse_args(argv)


@contextmanager
def _screen() -> Iterator[None]:
    before = termios.tcgetattr(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    print(_ENTER, end="", flush=True)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
        print(_LEAVE, end="", flush=True)


class _Top:
    """What the terminal shows, and what its keys change."""

    def __init__(self, job: Job, sort: str, host: str) -> None:
        self._job = job
        self._sort, self._host = sort, host
        self._typed = ""  # of a rank's number
        self._facts: Facts = {"ranks": []}
        self._gpus: dict[int, str] = {}

    def watch(self) -> str:
        """Redraw until the user or the job has ended it. Returns why."""
        threading.Thread(target=self._ask_gpus, daemon=True).start()
        try:
            while True:
                self._facts = self._job.now()
                _show(*self._lines())
                keys = _keys(_EVERY_S)
                if "q" in keys:
                    return f"job {self._job.title} goes on."
                for key in keys:
                    self._press(key)
        except UserError as error:
            return str(error)

    def _lines(self) -> tuple[list[str], list[str]]:
        shown = f"sorted by {self._sort}, {self._host or 'all hosts'}  {_KEYS} {self._typed}"
        ranks = shown_ranks(self._facts, self._sort, self._host)
        return [*head_lines(self._facts), shown], [
            "",
            *rank_lines(ranks, self._gpus, shutil.get_terminal_size().columns),
        ]

    def _press(self, key: str) -> None:
        if key == "s":
            self._sort = _next(list(COLUMNS), self._sort)
        elif key == "h":
            self._host = _next(["", *hosts_of(self._facts)], self._host)
        elif key in ("\x7f", "\b"):
            self._typed = self._typed[:-1]
        elif key.isdecimal():
            self._typed += key
        elif key in ("\n", "\r") and self._typed:
            rank, self._typed = int(self._typed[:9]), ""
            try:
                sentence, _, stacks = stacks_text(self._job, rank).partition("\n\n")
            except UserError as error:  # no such rank; one of no job ends the loop at its next turn
                sentence, stacks = str(error), ""
            main_thread = stacks.partition("\n\n")[0].split("\n")
            _show([sentence, "any key: back"], ["", *main_thread], shows_end=True)
            _keys(None)

    def _ask_gpus(self) -> None:
        pause = threading.Event()
        while not pause.wait(_GPUS_EVERY_S if self._gpus else _EVERY_S):
            self._gpus = gpus_of(self._facts["ranks"])


def _next(values: list[str], value: str) -> str:
    return values[(values.index(value) + 1) % len(values)] if value in values else values[0]


def _show(prose: list[str], table: list[str], *, shows_end: bool = False) -> None:
    """Fill the terminal, as large as it is now: prose is wrapped, and a table's lines are cut.

    Args:
        shows_end: of a table with too many lines, show the last ones.
    """
    tty.setcbreak(0)  # again, because a shell changes it after Ctrl-Z
    size = shutil.get_terminal_size()
    wrapped = [part for line in prose for part in textwrap.wrap(line, size.columns) or [""]]
    room = max(size.lines - len(wrapped), 0)
    kept = table[max(len(table) - room, 0) :] if shows_end else table[:room]
    lines = [*wrapped[: size.lines], *(line[: size.columns] for line in kept)]
    text = "\r\n".join(f"{_ERASE_LINE}{line}" for line in lines)
    below = f"\r\n{_END_OF_SCREEN}" if len(lines) < size.lines else ""
    print(f"{_HOME}{text}{below}", end="", flush=True)


def _keys(within_s: float | None) -> str:
    """What is typed in time, "" for nothing. A terminal that has gone types q."""
    if not select.select([0], [], [], within_s)[0]:
        return ""
    return os.read(0, 64).decode(errors="replace") or "q"


def gpus_of(ranks: Sequence[Facts]) -> dict[int, str]:
    """ "87% 12.3 GB" for each rank of this machine that uses a GPU: how busy it is, and the rank's memory."""
    pids = {rank["pid"]: rank["rank"] for rank in ranks if is_this_host(rank["host"])}
    processes, gpus = map(_rows, _QUERIES)
    busy = {row[0]: row[1] for row in gpus if len(row) == 2}
    found = {}
    for pid, uuid, megabytes in (row for row in processes if len(row) == 3):
        if pid.isdigit() and int(pid) in pids:
            memory = f" {int(megabytes) / 1024:.1f} GB" if megabytes.isdigit() else ""
            found[pids[int(pid)]] = f"{busy.get(uuid, '?')}%{memory}"
    return found


def _rows(query: str) -> list[list[str]]:
    """The cells of each line of nvidia-smi's table; [] without it, or without an answer."""
    arguments = (query, "--format=csv,noheader,nounits")
    text = answer("nvidia-smi", arguments, os.environ.get("PATH"), _ANSWER_S) or ""
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
