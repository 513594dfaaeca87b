"""The modules that came with a function of `mpiddp.spawn`. Python imports them as if their files were here.

Each has the path that it has on the caller's host. What else lies in its folder is found there, if this host
has the folder: a compiled module, or a data file.
"""

from __future__ import annotations

import os
import pickle
import sys
import zlib
from collections.abc import Mapping, Sequence
from importlib import machinery
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from mpiddp.protocol.variables import MODULES

_FOUND_HERE = (
    (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
)
_sources: dict[str, bytes] = {}  # by path
_folders: set[str] = set()  # above them


def packed(sources: Mapping[str, bytes]) -> bytes:
    return zlib.compress(pickle.dumps(sources))


def install(sources: bytes, path: Sequence[str] = ()) -> None:
    """Let this process import the packed sources. `path` is the caller's sys.path."""
    _sources.update(pickle.loads(zlib.decompress(sources)))
    _folders.update(str(folder) for file in _sources for folder in Path(file).parents)
    sys.path[:0] = [folder for folder in path if folder in _folders]
    sys.path += [folder for folder in path if folder not in sys.path]
    sys.path_hooks.insert(0, _Folder)
    sys.path_importer_cache.clear()


def share(sources: bytes) -> None:
    """Keep them for the children of multiprocessing that do not begin as a copy of this process."""
    file = os.memfd_create("mpiddp-modules")  # nothing of it is left after the end of this process
    Path(f"/proc/self/fd/{file}").write_bytes(sources)
    os.environ[MODULES] = f"/proc/{os.getpid()}/fd/{file}"


class _Folder(machinery.FileFinder):
    """Finds the modules of one folder, as Python's own finder does."""

    def __init__(self, path: str) -> None:
        if path not in _folders:
            raise ImportError  # Python's own finder is the next
        super().__init__(path, *_FOUND_HERE)

    def find_spec(
        self, fullname: str, target: ModuleType | None = None
    ) -> machinery.ModuleSpec | None:
        stem = str(Path(self.path, fullname.rpartition(".")[2]))
        for file, inner in ((f"{stem}/__init__.py", [stem]), (f"{stem}.py", None)):
            if file in _sources:
                loader = _Loader(fullname, file)
                return spec_from_file_location(
                    fullname, loader=loader, submodule_search_locations=inner
                )
        spec = super().find_spec(fullname, target)
        if spec is None and stem in _folders:  # a package without an __init__.py
            spec = machinery.ModuleSpec(fullname, None, is_package=True)
            spec.submodule_search_locations = [stem]
        return spec


class _Loader(machinery.SourceFileLoader):
    def get_data(self, path: str) -> bytes:
        return _sources[path] if path in _sources else super().get_data(path)

    def path_stats(self, path: str) -> NoReturn:
        raise OSError  # so that no bytecode is read or written
