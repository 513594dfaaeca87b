"""The files of a program: its own, and the modules that it imports from outside the installed packages.

    files_of("script", "train.py", "/home/me/project", import_folders())

`mpiddp launch` and `mpiddp doctor` compare them between hosts, and `mpiddp.spawn` ships them. This module
travels to the hosts as source. It needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

_NAMES = rb"(\([^)]*\)|(?:[^\n#;\\]|\\\n)*)"
# A line end in place of ^ halves its time: a package may have 50 MB.
_IMPORT = re.compile(
    rb"[\n;:][ \t]*(?:import[ \t]+%b|from[ \t]+([\w.]+)[ \t]+import\b[ \t]*%b)" % (_NAMES, _NAMES)
)
_RENAMED = re.compile(rb"\bas\s+\w+")
_NAME = re.compile(rb"\w[\w.]*")
_OURS = "mpiddp"  # whose versions the doctor compares
_PYTHON = os.path.dirname(os.__file__) + os.sep


def python_path(env: Mapping[str, str]) -> list[str]:
    """The folders of PYTHONPATH, which the ranks on every host have."""
    return [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]


def import_folders() -> list[str]:
    """Where this Python finds modules that nobody has installed: PYTHONPATH, and editable installs.

    The working folder is none of them, unless PYTHONPATH names it: a script has its own folder instead.
    """
    here = os.getcwd()
    folders = [os.path.abspath(folder) for folder in python_path(os.environ)]
    folders += [folder for folder in sys.path if folder not in ("", here)]
    return [folder for folder in dict.fromkeys(folders) if is_local(folder)]


def is_local(folder: str) -> bool:
    """Whether modules of this folder are the user's own: neither Python's nor of installed packages."""
    is_installed = "-packages" in folder or f"{folder}/".startswith(_PYTHON)
    return Path(folder).is_dir() and not is_installed


def files_of(
    kind: str, name: str, folder: str, others: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """The files of a script, or of a module: each with its SHA-256, "" where it cannot be read.

    They are in the order in which they are found, so the first one that differs explains later ones. A file's
    name is relative to the folder of the script, or of python -m, if it lies below it.

    Args:
        kind: "script", "module", or another one, which has no files.
        name: the script's path, or the module's name.
        folder: the working folder.
        others: where else modules are imported from, see `import_folders`.
    """
    from hashlib import sha256  # takes 5 ms of each rank, which needs it on several hosts only

    base, sources = _sources(kind, name, folder, others)
    files = []
    for path, text in sources.items():
        is_below = base in path.parents
        digest = "" if text is None else sha256(text).hexdigest()
        files.append((str(path.relative_to(base) if is_below else path), digest))
    return files


def texts_of(kind: str, name: str, folder: str, others: Sequence[str] = ()) -> list[bytes]:
    """The contents of the same files, the program's own first."""
    sources = _sources(kind, name, folder, others)[1].values()
    return [text for text in sources if text is not None]


def _sources(
    kind: str, name: str, folder: str, others: Sequence[str]
) -> tuple[Path, dict[Path, bytes | None]]:
    base = Path(folder)
    start: list[Path] = []
    if kind == "script":
        start = [Path(os.path.realpath(base / name))]  # its folder is where a link leads
        start = [start[0] / "__main__.py"] if Path(start[0]).is_dir() else start
        base = start[0].parent
    folders = [base, *map(Path, others)]
    if kind == "module":
        start = modules_at(name, folders)
    return base, sources_of(start, folders)


def sources_of(start: Iterable[Path], folders: Sequence[Path]) -> dict[Path, bytes | None]:
    """These files, and those that they import from `folders`, as far as their lines show it."""
    texts: dict[Path, bytes | None] = {}
    seen: set[tuple[str, str]] = set()
    todo = list(start)
    paths = set(todo)
    for path in todo:  # which grows
        texts[path] = None
        try:
            texts[path] = text = path.read_bytes()
        except OSError:  # Python will say why, if the program ever imports it
            continue
        for name in sorted(imported_by(text)):
            module = name.lstrip(".")
            level = len(name) - len(module)  # relative to its package
            package = str(path).rsplit(os.sep, level)[0] if level else ""
            if (package, module) not in seen:
                seen.add((package, module))
                new = modules_at(module, [Path(package)] if package else folders, paths)
                todo += [path for path in dict.fromkeys(new) if path not in paths]
                paths.update(new)
    return texts


def modules_at(name: str, folders: Iterable[Path], known: Collection[Path] = ()) -> list[Path]:
    """The files of a module or package, and of the packages above it, in the first folder that has it.

    A package counts as a whole, unless it is known. A folder without an __init__.py may hold data: only its
    own modules count.
    """
    parts = name.split(".")
    if parts[0] == _OURS:
        return []
    found: list[Path] = []
    for folder in folders:
        for count in range(1, len(parts) + 1):
            package = folder.joinpath(*parts[:count])
            if (init := package / "__init__.py") in known:
                return found
            if Path(init).is_file():  # unlike Path's, it raises nothing
                return [*found, *sorted(package.rglob("*.py"))]
            if Path(module := package.with_suffix(".py")).is_file():
                return [*found, module]
            found += sorted(package.glob("*.py"))
    return found


def imported_by(text: bytes) -> set[str]:
    """The modules that a file imports, and what may be one, such as "a.b" for "from a import b".

    The names of a package's own modules begin with a dot for each level, as in its lines.
    """
    found = set()
    for plain, package, names in _IMPORT.findall(b"\n" + text):
        inner = _NAME.findall(_RENAMED.sub(b"", plain or names))
        start = package.decode("ascii", "replace")
        found |= {start} if start.strip(".") else set()
        between = "" if not start or start.endswith(".") else "."
        found |= {f"{start}{between}{each.decode('utf-8', 'replace')}" for each in inner}
    return found
