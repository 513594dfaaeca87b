"""`mpiddp hosts history` and `mpiddp hosts forget`: what the launcher has written down of each host.

mpiddp hosts history hosts.txt
mpiddp hosts history hosts.txt gpu17
mpiddp hosts forget hosts.txt gpu17
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from mpiddp.errors import DONE, FAILED, UserError
from mpiddp.hosts.history import STEPS, Event, Files, History
from mpiddp.text import align_columns, all_of, counted, escaped, listed, size_text

VERBS = {
    "history": "Print what earlier jobs have shown of each host, or every event of one",
    "forget": "Let no earlier event of a host count, or of any host",
}
_LEAST_BYTES = 1e5  # a figure below is a number of matrix products
_COLUMNS = ("host", "in the last jobs", "latest failure")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", help="the hostfile (default: jobs that had none, such as with -H)"
    )
    parser.add_argument("host", nargs="?", help="one host, by its name in the hostfile")


def main(options: argparse.Namespace) -> int:
    """Run a verb of `VERBS`. Returns 1 if nothing is known of the hosts, else 0.

    Raises:
        UserError: no file can be written.
    """
    file, host = options.file, options.host
    if host is None and file is not None and not os.path.lexists(file):
        file, host = None, file
    files = Files.of(file, os.environ)
    history = files.read()
    for line in history.broken:
        print(f"{escaped(line)} is no line of a history, and is skipped.", file=sys.stderr)
    hosts = [host.lower()] if host else history.hosts
    known = [each for each in hosts if history.of(each)]
    if not known:
        where = all_of([escaped(str(path)) for path in files.existing]) or "any file"
        print(
            f"nothing is known of {f'a host {escaped(host)}' if host else 'any host'} in {where}."
        )
        return FAILED
    if options.verb == "history":
        print(_events(history, known[0]) if host else _table(history, known))
        print(f"from {all_of([escaped(str(path)) for path in files.existing])}")
    elif files.append(Event(time.time(), forgotten=tuple(known))) is None:
        raise UserError("no file of the history can be written. To forget all, remove them.")
    else:
        print(f"forgot {listed([escaped(each) for each in known])}.")
    return DONE


def _table(history: History, hosts: list[str]) -> str:
    records = [history.record(host) for host in hosts]
    rows = [
        (each.host, each.summary, f"{_time(each.failed_at)}  {each.reason}" if each.reason else "")
        for each in records
    ]
    return align_columns([_COLUMNS, *([escaped(cell) for cell in row] for row in rows)])


def _events(history: History, host: str) -> str:
    rows = []
    for event in history.of(host):
        reason = event.failed.get(host)
        if host in event.figures:
            what = f"measured: {_figures(event, host)}"
        elif reason is None:
            what = f"took part, with {counted(len(event.hosts) - 1, 'other host')}"
        else:
            what = f"{'ended the job' if host in event.hosts else 'did not answer'}: {reason}"
        if STEPS in event.slow.get(host, {}):
            what += f", and held them up: {100 * (1 - event.slow[host][STEPS]):.0f} % slower"
        rows.append((_time(event.at), escaped(what)))
    return align_columns(rows)


def _figures(event: Event, host: str) -> str:
    slow = event.slow.get(host, {})
    found = []
    for what, value in event.figures[host].items():
        part = f" ({100 * slow[what]:.0f} % of the others')" if what in slow else ""
        amount = size_text(value) if value >= _LEAST_BYTES else f"{value:.0f}"
        found.append(f"{what} {amount}/s{part}")
    return ", ".join(found)


def _time(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
