"""What happens when a script imports torch or an MPI: a finder waits for the script's own import.

    sys.meta_path.insert(0, AtImport(["torch"], frozen_torch))

So nothing is imported before the script's first line, and nothing has to be known of the script before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it would load five modules before a script's first line
    from importlib.machinery import ModuleSpec

_MANY = 200_000  # objects of a script: to go through them takes longer than it saves


class AtImport:
    """Surrounds the first import of one of these modules. Other finders find it.

    `around()` is entered before the module is made, and left when its code has run. If that fails, the next
    import is the first one. A forked child is no script, so nothing happens there.
    """

    def __init__(
        self, names: Sequence[str], around: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.names, self._around, self._process = names, around, os.getpid()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.names or os.getpid() != self._process:
            return None
        names, self.names = self.names, ()  # another finder may ask all others, and so this one
        try:
            finds = [
                getattr(finder, "find_spec", None) for finder in sys.meta_path
            ]  # an old one has None
            spec = next(filter(None, (find(name, path, target) for find in finds if find)), None)
        finally:
            self.names = names
        if spec is not None and spec.loader is not None:
            self._surround(spec.loader)
        return spec

    def _surround(self, loader: object) -> None:
        """Let this loader enter and leave. It belongs to this import alone."""
        create, run = loader.create_module, loader.exec_module  # type: ignore[attr-defined]
        stack = ExitStack()

        def create_module(spec: ModuleSpec) -> ModuleType | None:
            stack.enter_context(self._around())
            return create(spec)  # type: ignore[no-any-return]

        def exec_module(module: ModuleType) -> None:
            del loader.create_module, loader.exec_module  # type: ignore[attr-defined]
            with stack:
                for _ in _steps(run, module):
                    pass
            self.names = ()

        loader.create_module, loader.exec_module = create_module, exec_module  # type: ignore[attr-defined]


def _steps(run: Callable[[ModuleType], None], module: ModuleType) -> Iterator[None]:
    """Run the module's code in a generator, whose frame does not keep those of its callers.

    torch keeps a frame of its import, and with it all frames below: those of the script and its variables.
    """
    run(module)
    yield


@contextmanager
def frozen_torch() -> Iterator[None]:
    """Garbage collections skip all that the script's `import torch`, which is the body, makes.

    torch's modules live as long as the process. Otherwise the collector visits their 250,000 objects while
    they are made, in each full collection of the training, and several times when the process ends: a third
    of the processor time of a short rank. The objects of the script are collected as ever.
    """
    import gc

    was_enabled, before = gc.isenabled(), gc.get_objects()
    gc.disable()
    try:
        yield
        if len(before) < _MANY:
            _freeze_all_but(before)
    finally:
        if was_enabled:
            gc.enable()


def _freeze_all_but(objects: Iterable[object]) -> None:
    import ctypes
    import gc

    # gc.freeze() takes all that the collector tracks. https://docs.python.org/3/c-api/gcsupport.html
    untrack, track = ctypes.pythonapi.PyObject_GC_UnTrack, ctypes.pythonapi.PyObject_GC_Track
    for function in (untrack, track):
        function.argtypes, function.restype = [ctypes.py_object], None
    for thing in objects:
        untrack(thing)
    gc.freeze()
    for thing in objects:
        if not gc.is_tracked(thing):
            track(thing)
