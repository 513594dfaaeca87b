"""Shorten torch's text about a full GPU memory: the request, the free memory, and who holds the rest."""

from __future__ import annotations

import re

_TEXT = re.compile(
    r"\b(\w+ out of memory\. Tried to allocate [\d.]+ \w+)\. GPU (\d+) has a total capacity of ([\d.]+ \w+) "
    r"of which ([\d.]+ \w+) is free\.(.*?)(#environment-variables\)|\Z)",
    re.DOTALL,
)
_OWN = re.compile(r"this process has ([\d.]+ \w+) memory in use")
_OTHER = re.compile(r"Process (\d+) has ([\d.]+ \w+) memory in use")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_NAMED = 2  # other processes, those that hold most


def shortened(text: str) -> str:
    """The text with torch's part shortened. It names the processes of this host that still run."""
    return _TEXT.sub(_short, text)


def _short(match: re.Match[str]) -> str:
    from mpiddp.hosts.gpu_health import who  # few ranks need it

    asked, gpu, total, free, rest, _ = match.groups()
    holders = [f"this process holds {amount}" for amount in _OWN.findall(rest)]
    others = sorted(_OTHER.findall(rest), key=lambda holder: _bytes(holder[1]), reverse=True)
    for pid, size in others[:_NAMED]:
        user, command = who(pid)
        holders.append(f"pid {pid}{f' of {user} ({command})' * bool(user)} {size}")
    if more := [_bytes(size) for _, size in others[_NAMED:]]:
        holders.append(f"{len(more)} more {sum(more) / _UNITS['GiB']:.2f} GiB")
    return f"{asked}: GPU {gpu} has {free} of {total} free; {', '.join(holders)}."


def _bytes(size: str) -> float:
    number, _, unit = size.partition(" ")
    return float(number) * _UNITS.get(unit, 1)
