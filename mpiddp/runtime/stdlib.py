"""Python's own modules, for code of mpiddp that runs in the process of somebody's script.

    traceback = own("traceback")

A script's folder comes first on sys.path. If it has a traceback.py, `import traceback` would run that, which the script
itself may never import; and if Python's own came first, the script's `import traceback` would find that.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

_FOLDER = os.path.dirname(os.__file__)  # noqa: PTH120 - pathlib may not be loaded yet
_PATH = [_FOLDER, os.path.join(_FOLDER, "lib-dynload")]  # noqa: PTH118
_loaded: dict[str, ModuleType] = {}


def own(name: str) -> Any:
    """Python's own module `name`, imported late. It takes no name from a module of the user's."""
    if name not in _loaded:
        module = sys.modules.get(name)
        _loaded[name] = module if module is not None and _is_own(module) else _imported(name)
    return _loaded[name]


def _imported(name: str) -> ModuleType:
    path, modules = sys.path, dict(sys.modules)
    sys.path = [*_PATH]  # a script may have put anything on its own
    for each in [each for each in modules if "." not in each and _hides(each, modules[each])]:
        del sys.modules[each]  # what is imported may need Python's own, too
    try:
        __import__(name)
        module = sys.modules[name]
    finally:
        sys.path = path
        for new in [each for each in sys.modules if sys.modules[each] is not modules.get(each)]:
            if new not in modules and _is_of_user(new, path):
                del sys.modules[new]
        sys.modules.update(modules)
    return module


def _hides(name: str, module: ModuleType) -> bool:
    """Whether a module of the user's has the place of one of Python's own."""
    own_file = os.path.join(_FOLDER, f"{name}.py")  # noqa: PTH118
    return not _is_own(module) and os.path.exists(own_file)  # noqa: PTH110


def _is_own(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return not isinstance(file, str) or (file.startswith(_FOLDER) and "-packages" not in file)


def _is_of_user(name: str, path: list[str]) -> bool:
    """Whether a folder before Python's own has a module of this name."""
    folders = [folder for folder in path if isinstance(folder, str)]
    before = folders[: folders.index(_FOLDER) if _FOLDER in folders else len(folders)]
    places = (os.path.join(folder, name) for folder in before)  # noqa: PTH118
    return any(os.path.exists(f"{place}.py") or os.path.isdir(place) for place in places)  # noqa: PTH110, PTH112
