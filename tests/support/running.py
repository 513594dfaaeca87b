"""The processes of this machine that run."""

from __future__ import annotations

from pathlib import Path


def running(argument: str) -> list[str]:
    """The command lines of this machine's processes that have this argument."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if argument in arguments:
            found.append(" ".join(arguments))
    return found


def descendants(ancestor: int) -> list[int]:
    """The processes that this one has started, and those that they have."""
    found = [ancestor]
    for pid in found:
        children = Path(f"/proc/{pid}/task").glob("*/children")
        found += [int(child) for file in children for child in file.read_text().split()]
    return found[1:]
