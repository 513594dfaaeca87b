"""The folders that the hosts replace, so that every user can read Python and this repository.

root's home is private to each host, but Python or the repository may be in it. A checkout may also be in a
folder that only root can enter.
"""

from __future__ import annotations

import pwd
import stat
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def replaced_folders() -> list[tuple[str, list[str]]]:
    """The folders to replace, outermost first, each with the names of the subfolders to keep."""
    home = Path(pwd.getpwuid(0).pw_dir)
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix)
    needed = {Path(prefix) for prefix in prefixes} | {REPOSITORY}
    needed |= {path.resolve() for path in needed}
    parents = {parent for path in needed for parent in path.parents}
    closed = {path for path in parents if not path.stat().st_mode & stat.S_IXOTH}
    return [(str(folder), _keep(folder, home, needed)) for folder in sorted(closed | {home})]


def _keep(folder: Path, home: Path, needed: set[Path]) -> list[str]:
    """The subfolders to keep: in root's home only the needed ones, elsewhere all."""
    if folder == home:
        inside = (path for path in needed if home in path.parents)
        return sorted({path.relative_to(home).parts[0] for path in inside})
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
