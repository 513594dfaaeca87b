"""How often the kernel has killed a process of a control group because its memory limit was reached.

A rank tells its group and the group's count when it starts. The launcher sends this source to the host of a
rank that was killed, and compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class OomKills:
    """The kills of one control group since it exists.

    Attributes:
        count: how many processes the kernel has killed for lack of memory.
        limit_bytes: the group's limit of memory, None for no limit.
    """

    count: int
    limit_bytes: int | None


def group_of(
    pid: int | str = "self", proc: Path = Path("/proc"), mount: Path = _MOUNT
) -> Path | None:
    """The folder of the process's control group of memory, which outlives the process."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
        groups = [line.split(":", 2) for line in lines]
        for _, controllers, path in groups:
            if controllers == "memory":  # cgroup v1
                return mount / "memory" / path.lstrip("/")
        for _, controllers, path in groups:
            if not controllers:  # cgroup v2
                return mount / path.lstrip("/")
    except (OSError, ValueError):
        pass
    return None


def kills_in(folder: Path) -> OomKills | None:
    """The kills of a group, or None where the kernel does not tell."""
    try:
        return _kills(folder, "memory.events", "memory.max")
    except (OSError, ValueError):
        pass
    try:
        return _kills(folder, "memory.oom_control", "memory.limit_in_bytes")
    except (OSError, ValueError):
        return None


def _kills(folder: Path, events: str, limit: str) -> OomKills | None:
    counts = dict(line.split() for line in (folder / events).read_text().splitlines())
    text = (folder / limit).read_text().strip()
    no_limit = text == "max" or int(text) > 1 << 60  # v1 writes the largest number of pages
    return (
        OomKills(int(counts["oom_kill"]), None if no_limit else int(text))
        if "oom_kill" in counts
        else None
    )
