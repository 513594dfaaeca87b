"""The files of a program: its own, and the modules that it imports from outside the installed packages.

    files_of("script", "train.py", "/home/me/project", import_folders())

`mpiddp launch` and `mpiddp doctor` compare them between hosts. This module travels to the hosts as source. It
needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

_NAMES = rb"(\([^)]*\)|(?:[^\n#;\\]|\\\n)*)"
# A line end is searched instead of ^, which takes half the time: a package may have 50 MB.
_IMPORT = re.compile(
    rb"[\n;:][ \t]*(?:import[ \t]+%b|from[ \t]+([\w.]+)[ \t]+import\b[ \t]*%b)" % (_NAMES, _NAMES)
)
_RENAMED = re.compile(rb"\bas\s+\w+")
_NAME = re.compile(rb"\w[\w.]*")
_OURS = "mpiddp"  # the doctor compares its versions instead
_PYTHON = os.path.dirname(os.__file__) + os.sep


def python_path(env: Mapping[str, str]) -> list[str]:
    """The folders of PYTHONPATH, which the ranks on every host have."""
    return [folder for folder in env.get("PYTHONPATH", "").split(os.pathsep) if folder]


def import_folders() -> list[str]:
    """The folders of PYTHONPATH and of editable installs, where this Python finds modules of the user.

    The working folder counts only if PYTHONPATH names it, because Python finds a script's modules beside it.
    """
    here = os.getcwd()
    folders = [os.path.abspath(folder) for folder in python_path(os.environ)]
    folders += [folder for folder in sys.path if folder not in ("", here)]
    return [folder for folder in dict.fromkeys(folders) if is_local(folder)]


def is_local(folder: str) -> bool:
    """Whether this folder has modules of the user: neither Python's own nor installed packages."""
    is_installed = "-packages" in folder or f"{folder}/".startswith(_PYTHON)
    return Path(folder).is_dir() and not is_installed


def files_of(
    kind: str, name: str, folder: str, others: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """The files of a script or a module, each with its SHA-256 ("" if it cannot be read).

    A file comes before those that it imports, so the first file that differs explains later ones. The name of
    a file in the folder of the script, or of python -m, is relative to this folder.

    `kind` is "script" or "module" (another one has no files), `name` the script's path or the module's name,
    `folder` the working folder. `others` are further folders of modules, see `import_folders`.
    """
    from hashlib import sha256  # takes 5 ms of each rank, and a job on one host does not need it

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
    """The folder of a program, and its files with those that they import, as far as their lines show it."""
    base = Path(folder)
    todo: list[Path] = []
    if kind == "script":
        script = Path(os.path.realpath(base / name))  # modules lie beside a link's target
        todo = [script / "__main__.py" if script.is_dir() else script]
        base = todo[0].parent
    folders = [base, *map(Path, others)]
    if kind == "module":
        todo = _modules_at(name, folders)
    texts: dict[Path, bytes | None] = {}
    seen: set[tuple[str, str]] = set()
    paths = set(todo)
    for path in todo:  # the loop adds further files to it
        texts[path] = None
        try:
            texts[path] = text = path.read_bytes()
        except OSError:  # Python will say why, if the program ever imports it
            continue
        for imported in sorted(_imported_by(text)):
            module = imported.lstrip(".")
            level = len(imported) - len(module)  # relative to its package
            package = str(path).rsplit(os.sep, level)[0] if level else ""
            if (package, module) not in seen:
                seen.add((package, module))
                new = _modules_at(module, [Path(package)] if package else folders, paths)
                todo += [path for path in dict.fromkeys(new) if path not in paths]
                paths.update(new)
    return base, texts


def _modules_at(name: str, folders: Iterable[Path], taken: Collection[Path] = ()) -> list[Path]:
    """The files of a module or package, and of the packages above it, in the first folder that has it.

    All modules of a package count, unless its __init__.py is among `taken`. Of a folder without an
    __init__.py, only the modules in it count, because it may hold data.
    """
    parts = name.split(".")
    if parts[0] == _OURS:
        return []
    files: list[Path] = []
    for folder in folders:
        for count in range(1, len(parts) + 1):
            package = folder.joinpath(*parts[:count])
            if (init := package / "__init__.py") in taken:
                return files
            if Path(init).is_file():  # unlike Path's, it raises nothing
                return [*files, *sorted(package.rglob("*.py"))]
            if Path(module := package.with_suffix(".py")).is_file():
                return [*files, module]
            files += sorted(package.glob("*.py"))
    return files


def _imported_by(text: bytes) -> set[str]:
    """The names of modules that a file may import: for "from a import b", both "a" and "a.b".

    A relative import keeps its dots: for "from . import b", the name is ".b".
    """
    modules = set()
    for plain, package, names in _IMPORT.findall(b"\n" + text):
        inner = _NAME.findall(_RENAMED.sub(b"", plain or names))
        start = package.decode("ascii", "replace")
        modules |= {start} if start.strip(".") else set()
        between = "" if not start or start.endswith(".") else "."
        modules |= {f"{start}{between}{name.decode('utf-8', 'replace')}" for name in inner}
    return modules
