"""Shorten torch's text about a full GPU memory: the request, the free memory, and who holds the rest."""

from __future__ import annotations

import re

_TEXT = re.compile(
    r"\b(\w+ out of memory\. Tried to allocate [\d.]+ \w+)\. GPU (\d+) has a total capacity of ([\d.]+ \w+) "
    r"of which ([\d.]+ \w+) is free\.(.*?)(#environment-variables\)|\Z)",
    re.DOTALL,
)
_OWN = re.compile(r"this process has ([\d.]+ \w+) memory in use")
_OTHER = re.compile(r"Process (\d+) has ([\d.]+) (bytes|[KMG]iB) memory in use")
_UNITS, _NAMED = ("bytes", "KiB", "MiB", "GiB"), 2  # other processes, those that hold most


def shortened(text: str) -> str:
    """The text with torch's part shortened. It names the processes of this host that still run."""
    return _TEXT.sub(_short, text)


def _short(match: re.Match[str]) -> str:
    from mpiddp.hosts.gpu_health import who  # few ranks need it

    asked, gpu, total, free, rest, _ = match.groups()
    holders = [f"this process holds {amount}" for amount in _OWN.findall(rest)]
    others = sorted(
        _OTHER.findall(rest), key=lambda row: (_UNITS.index(row[2]), float(row[1])), reverse=True
    )
    for pid, size, unit in others[:_NAMED]:
        user, command, _ = who(pid)
        holders.append(f"pid {pid}{f' of {user} ({command})' * bool(user)} {size} {unit}")
    holders += [f"{len(others) - _NAMED} more"] * (len(others) > _NAMED)
    return f"{asked}: GPU {gpu} has {free} of {total} free; {', '.join(holders)}."
