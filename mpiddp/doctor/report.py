"""The lines of `mpiddp doctor`: what each check has found, and how they are printed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from mpiddp.text import counted, escaped

OK, WARN, FAIL, UNKNOWN = "ok", "warn", "fail", "unknown"
_ORDER = (FAIL, WARN, UNKNOWN, OK)

Found = tuple[str, str, str]  # one of the four words, the fact, and what fixes it ("" for nothing)


@dataclass(frozen=True)
class Line:
    """One result of a check."""

    check: str
    status: str
    fact: str
    fix: str = ""


def results(check: str, found: Iterable[Found], ok_text: str) -> list[Line]:
    """The lines of a check; `ok_text` is the fact where it has found nothing."""
    return [Line(check, *each) for each in found] or [Line(check, OK, ok_text)]


def text(lines: Sequence[Line], hosts: int, seconds: float) -> str:
    """The summary, then what is not ok, then the rest."""
    counts = {status: sum(line.status == status for line in lines) for status in _ORDER}
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    rows = [f"{counted(hosts, 'host')}, {said}, in {seconds:.1f} s"]
    width = max((len(line.check) for line in lines), default=0)
    for line in sorted(lines, key=lambda line: _ORDER.index(line.status)):
        rows.append(f"{line.status:<7}  {line.check:<{width}}  {escaped(line.fact)}")
        if line.fix:
            rows.append(f"{'':<7}  {'':<{width}}  → {escaped(line.fix)}")
    return "\n".join(rows)


def as_json(lines: Sequence[Line], hosts: Sequence[str], seconds: float) -> str:
    """The same for programs: hosts, seconds, status (the worst), lines."""
    worst = min((line.status for line in lines), key=_ORDER.index, default=OK)
    rows = [asdict(line) for line in lines]
    content = {"hosts": hosts, "seconds": round(seconds, 2), "status": worst, "lines": rows}
    return json.dumps(content, indent=1)
