"""`mpiddp ps` and `mpiddp top`: the jobs of this user on this machine, and the ranks of one.

mpiddp ps
mpiddp top 4711     # redrawn every second on a terminal, or printed once
"""

from __future__ import annotations

import os
import shutil
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpiddp.arguments import OneSentenceParser, Option
from mpiddp.errors import DONE, INTERRUPTED, UserError
from mpiddp.protocol.channel import VIEW_JOB
from mpiddp.text import align_columns, as_json, counted, duration, escaped, seconds, size_text
from mpiddp.watch.detached import waiting_jobs
from mpiddp.watch.running_jobs import (
    Facts,
    RunningJob,
    find_job,
    hosts_of,
    job_parser,
    running_jobs,
)

_EVERY_S = 1.0
_HOME, _ERASE_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[2K", "\x1b[J"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}/s"


# The columns: the name of the fact, and the function that makes its text.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "rank": ("rank", str),
    "host": ("host", escaped),
    "pid": ("pid", str),
    "state": ("state", escaped),
    "step": ("step", str),
    "rate": ("rate", _rate),
    "own": ("own_s", seconds),
    "wait": ("wait_s", seconds),
    "cpu": ("cores", "{:.0%}".format),
    "memory": ("memory", size_text),
    "gpu": ("gpu_use", "{:.0f}%".format),
    "gpu-memory": ("gpu_memory", size_text),
    "temp": ("gpu_temperature", "{} °C".format),
    "slowed": ("gpu_slowed", escaped),
    "ago": ("ago_s", duration),
}
# Shown if a rank has such a fact: the process of a script, and of GPUs.
_IF_KNOWN = ("pid", "gpu", "gpu-memory", "temp", "slowed")


def ps(argv: list[str]) -> int:
    """Run `mpiddp ps ARGV`. Raises UserError for bad usage."""
    parser = OneSentenceParser(
        prog="mpiddp ps", description="List your jobs whose mpiddp launch runs on this machine."
    )
    Option("--json", help="print them as JSON, with their ranks").add_to(parser)
    options = parser.parse_args(argv)
    jobs, waiting = running_jobs(), waiting_jobs()
    if options.json:
        rows = [
            {"pid": job.pid or None, "name": job.name, **(job.facts or {"phase": job.silence})}
            for job in jobs
        ]
        rows += [
            {"pid": job.pid, "name": job.name, "phase": "waiting", "error": why}
            for job, why in waiting
        ]
        print(as_json("ps", {"jobs": rows}))
        return DONE
    lines = [f"{job.title} waits: {escaped(why)}" for job, why in waiting]
    if jobs:
        lines.insert(0, job_lines(jobs))
    print("\n".join(lines) or "no job of yours runs on this machine.")
    return DONE


def job_lines(jobs: list[RunningJob]) -> str:
    rows = [["PID", "NAME", "HOSTS", "RANKS", "STEP", "RATE", "STATE", "AGE"]]
    for job in jobs:
        facts, pid = job.facts, str(job.pid or "-")
        if not facts:
            rows.append([pid, escaped(job.name), "-", "-", "-", "-", job.silence, "-"])
            continue
        hosts = hosts_of(facts)
        more = f" +{len(hosts) - 2}" if len(hosts) > 2 else ""
        places = [job.name, ",".join(hosts[:2]) + more, str(len(facts["ranks"]))]
        step = "-" if facts["step"] is None else str(facts["step"])
        state = [step, _rate(facts["rate"]), facts["phase"], duration(facts["age_s"])]
        rows.append([pid, *map(escaped, [*places, *state])])
    return align_columns(rows, right=(0, 3, 4, 5))


def top(argv: list[str]) -> int:
    """Run `mpiddp top ARGV`. Raises UserError for bad usage, no such job, or no answer."""
    parser = job_parser(
        "top",
        "Watch the ranks of a job until Ctrl-C: steps per second, compute and waiting time of a step, CPU, "
        "memory, seconds since the last step, and last line.",
        Option("--once", help="print it once, as without a terminal"),
    )
    options = parser.parse_args(argv)
    job = find_job(options.job)
    facts = job.ask(VIEW_JOB)
    is_drawn = not options.once and os.isatty(1) and os.environ.get("TERM", "dumb") != "dumb"
    try:
        while is_drawn:
            _draw(facts)
            time.sleep(_EVERY_S)
            try:
                facts = job.ask(VIEW_JOB)
            except UserError:
                if not job.path.exists():  # perhaps between the question and its answer
                    raise job.ended_meanwhile from None
                facts = {**facts, "phase": job.silence}  # as at a restart
        print("\n".join([*head_lines(facts), *rank_lines(facts["ranks"])]))
    except KeyboardInterrupt:
        print()
        return INTERRUPTED
    except UserError as error:
        print(f"\n{error}")
    return DONE


def _draw(facts: Facts) -> None:
    """Fill the terminal, whose size may change. The head is wrapped, and the table's lines are cut."""
    size = shutil.get_terminal_size()
    wrapped = [part for line in head_lines(facts) for part in textwrap.wrap(line, size.columns)]
    table = [line[: size.columns] for line in rank_lines(facts["ranks"])]
    # Write over the last drawing, because a terminal that is cleared first would flicker.
    text = "".join(
        f"{_ERASE_LINE}{line}\n"
        for line in [*wrapped, "Ctrl-C ends this view, and not the job.", *table][: size.lines - 1]
    )
    print(f"{_HOME}{text}{_END_OF_SCREEN}", end="", flush=True)


def head_lines(facts: Facts) -> list[str]:
    loss = facts.get("loss")  # a launcher of an older version has none
    loss_text = f"{loss:.4g}" if isinstance(loss, float) else escaped(str(loss))
    parts = [
        f"{escaped(facts['name'])} (pid {facts['pid']})",
        escaped(facts["phase"]),
        f"{counted(len(facts['ranks']), 'rank')} on {counted(len(hosts_of(facts)), 'host')}",
        *([] if facts["step"] is None else [f"step {facts['step']}, {_rate(facts['rate'])}"]),
        *([] if loss is None else [f"loss {loss_text}"]),
        f"attempt {facts['attempt']}",
        duration(facts["age_s"]),
    ]
    sentences = (facts.get(name) for name in ("silent_hosts", "straggler", "idle_gpus"))
    return [", ".join(parts), *(escaped(sentence) for sentence in sentences if sentence)]


def rank_lines(ranks: Sequence[Facts]) -> list[str]:
    """The table of ranks, with a line of names above it."""
    shown = {
        name: (fact, text)
        for name, (fact, text) in COLUMNS.items()
        if name not in _IF_KNOWN or any(fact in rank for rank in ranks)
    }
    rows = [[*map(str.upper, shown), "LAST LINE"]]
    for rank in ranks:
        facts = [(rank.get(fact), text) for fact, text in shown.values()]
        cells = ["-" if value is None else text(value) for value, text in facts]
        rows.append([*cells, escaped(rank["line"])])
    right = [index for index, name in enumerate(shown) if name not in ("host", "state", "slowed")]
    return align_columns(rows, right=right).split("\n")
