"""What a folder needs outside of itself: the targets of its links, its Python, the folders of its .pth files.

A virtual environment of uv or pyenv is full of links to an interpreter elsewhere. A push finds them before
anything is sent.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.hosts.cluster.tree import FILE, KIND, LINK, PATH, TARGET, Row

_MAY_LEAD = ("pyvenv.cfg", ".pth")  # the ends of such files' names
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/opt/rh")


def needs(trees: Sequence[tuple[str, Sequence[Row]]]) -> list[list[str]]:
    """Paths outside of all the trees to which something in them leads: [path, what leads there].

    Args:
        trees: each folder with its rows.
    """
    found: dict[str, str] = {}
    for folder, rows in trees:
        for row in rows:
            if row[KIND] != LINK and not row[PATH].endswith(_MAY_LEAD):
                continue  # at once: an environment has ten thousands of files
            user = os.path.join(folder, row[PATH])
            for path in _leads_to(user, row):
                if os.path.exists(path):
                    # A link to python3 is right only where that is the same version.
                    found.setdefault(path, user)
                    found.setdefault(os.path.realpath(path), user)
    folders = [folder for folder, _ in trees]
    return [[path, user] for path, user in found.items() if not _is_below(path, folders)]


def _leads_to(user: str, row: Row) -> list[str]:
    """The absolute paths to which a row leads."""
    if row[KIND] == LINK:
        return [os.path.normpath(os.path.join(os.path.dirname(user), row[TARGET]))]
    name = os.path.basename(user)
    if row[KIND] != FILE or not (name == "pyvenv.cfg" or _is_path_file(user)):
        return []
    try:
        lines = Path(user).read_text(errors="replace").splitlines()
    except OSError:  # the push itself names it
        return []
    if name == "pyvenv.cfg":
        values = dict(line.partition(" = ")[::2] for line in lines)
        return [values["executable"]] if "executable" in values else []
    return [line for line in lines if line.startswith("/") and line.isprintable()]


def _is_path_file(path: str) -> bool:
    """Whether Python's `site` reads the file. The weights of a model are often called .pth, too."""
    folder = os.path.basename(os.path.dirname(path))
    return path.endswith(".pth") and folder in ("site-packages", "dist-packages")


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def has_programs(rows: Sequence[Row]) -> bool:
    """Whether there are programs that run on one kind of machine alone: libraries, or an environment."""
    names = (row[PATH].rpartition("/")[2] for row in rows)
    return any(name.endswith(".so") or ".so." in name or name == "pyvenv.cfg" for name in names)


def pythons(outside: Sequence[Sequence[str]]) -> list[str]:
    """The folders of the interpreters among the paths of `needs`.

    Raises:
        UserError: one belongs to the system, whose packages no push can install.
    """
    found: dict[str, None] = {}
    for path, user in outside:
        real = Path(path).resolve()
        if real.parent.name != "bin" or not real.name.startswith("python"):
            continue
        prefix = str(real.parent.parent)
        if _is_below(prefix, _SYSTEM):
            raise UserError(
                f"--with-python: {user} leads to {real}, which belongs to the system. "
                "Install the same Python on every host, or make the environment with one of uv "
                "or pyenv."
            )
        found[prefix] = None
    return list(found)
