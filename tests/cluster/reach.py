"""Which folders the hosts show differently, so that every user there reaches Python and this code.

root's home is private to each host, yet Python or the repository may lie in it; and a checkout may
lie below a folder that only root can enter.
"""

from __future__ import annotations

import pwd
import stat
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def ways() -> list[tuple[str, list[str]]]:
    """Folders to replace, outermost first, each with the names of those it must still hold."""
    home = Path(pwd.getpwuid(0).pw_dir)
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    needed = {Path(prefix) for prefix in prefixes} | {REPOSITORY}
    needed |= {path.resolve() for path in needed}
    parents = {parent for path in needed for parent in path.parents}
    closed = {path for path in parents if not path.stat().st_mode & stat.S_IXOTH}
    return [(str(folder), _keep(folder, home, needed)) for folder in sorted(closed | {home})]


def _keep(folder: Path, home: Path, needed: set[Path]) -> list[str]:
    """Of root's home only what is needed: the hosts start with a fresh one. Else every folder."""
    if folder == home:
        inside = (path for path in needed if home in path.parents)
        return sorted({path.relative_to(home).parts[0] for path in inside})
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
