"""Time two or more commands in alternation. Each runs as a whole process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpiddp.bench.jobs import Finished, run
from mpiddp.bench.report import markdown
from mpiddp.bench.rounds import ratios, turns
from mpiddp.text import percentile


@dataclass(frozen=True)
class Command:
    """A command with its directory and environment (None: those of this process)."""

    argv: Sequence[str]
    cwd: Path | None = None
    env: Mapping[str, str] | None = field(default=None, repr=False)


def alternate(
    commands: Mapping[str, Command], rounds: int, *, timeout_s: float, warmup: int = 1
) -> dict[str, list[Finished]]:
    """Run each command once in every round, and leave out the warm-up rounds.

    Raises:
        BenchJobFailed: a command did not succeed within `timeout_s`.
    """
    found: dict[str, list[Finished]] = {name: [] for name in commands}
    for number, name in turns(list(commands), rounds, warmup):
        each = commands[name]
        finished = run(each.argv, timeout_s=timeout_s, env=each.env, cwd=each.cwd)
        if number > 0:
            found[name].append(finished)
    return found


def comparison(seconds: Mapping[str, Sequence[float]], base: str) -> str:
    """Medians in ms, and the median of each round's ratio to the base."""
    rows = [
        [
            name,
            f"{percentile(each, 50) * 1e3:.1f}",
            f"{min(each) * 1e3:.1f}",
            f"{percentile(ratios(each, seconds[base]), 50):.3f}",
        ]
        for name, each in seconds.items()
    ]
    return markdown(("command", "median ms", "lowest ms", f"to {base}"), rows)
