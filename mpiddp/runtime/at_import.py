"""What happens when a script imports torch or an MPI: a finder waits for the script's own import.

    sys.meta_path.insert(0, AtImport(["torch"], frozen_torch))

So nothing is imported before the script's first line, and nothing has to be known of the script before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it would load five modules before a script's first line
    from importlib.machinery import ModuleSpec

_MANY = 200_000  # objects of a script, of which some may become garbage


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
            kind = _SurroundedNew if hasattr(spec.loader, "exec_module") else _SurroundedOld
            spec.loader = kind(spec.loader, self._around, self._has_run)
        return spec

    def _has_run(self) -> None:
        self.names = ()


class _Surrounded:
    """What the two kinds of loaders below share. `own` is the module's own loader, which may be anybody's object."""

    def __init__(
        self,
        own: Any,
        around: Callable[[], AbstractContextManager[None]],
        has_run: Callable[[], None],
    ) -> None:
        self._own, self._around, self._has_run, self._stack = own, around, has_run, ExitStack()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


class _SurroundedNew(_Surrounded):
    """Loads the module as its own loader does, and gives that back before the code runs."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        self._stack.enter_context(self._around())
        create = getattr(self._own, "create_module", None)
        try:
            return create(spec) if create else None
        except BaseException:
            self._stack.__exit__(*sys.exc_info())
            raise

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._own
        with self._stack:
            for _ in _steps(self._own.exec_module, module):
                pass
        self._has_run()


class _SurroundedOld(_Surrounded):
    """The same for a loader that has `load_module` alone, which Python 3.10 and 3.11 take."""

    def load_module(self, name: str) -> ModuleType:
        with self._around():
            module: ModuleType = self._own.load_module(name)
        self._has_run()
        return module


def _steps(run: Callable[[ModuleType], None], module: ModuleType) -> Iterator[None]:
    """Run the module's code in a generator, whose frame does not keep those of its callers.

    torch keeps a frame of its import, and with it all frames below: those of the script and its variables.
    """
    run(module)
    yield


@contextmanager
def frozen_torch() -> Iterator[None]:
    """Garbage collections skip the objects that the script's `import torch` has made.

    torch's modules live as long as the process. Otherwise the collector visits their 250,000 objects while
    they are made, in each full collection of the training, and several times when the process ends: a third
    of the processor time of a short rank. The objects that the script has made before are skipped as well, unless
    they are many.
    """
    import gc

    was_enabled, are_few = gc.isenabled(), len(gc.get_objects()) < _MANY
    gc.disable()
    try:
        yield
        if are_few:
            gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
