"""Warn once of a DistributedSampler without set_epoch, which gives every epoch the same order.

torch.utils.data is not imported for this: the sampler is watched once the script has imported it. A pass
costs a lookup. The third pass of a sampler warns, if no set_epoch was ever called: a script may look at one
batch before it trains. Passes within torch.no_grad() do not count: an evaluation may keep its order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from mpiddp.runtime.log import log

_MODULE = "torch.utils.data.distributed"
_WARNS_AT_PASS = 3
_PASSES = "_mpiddp_passes"  # an attribute of a sampler: its epoch, and its passes in it


def watch_samplers() -> None:
    """Watch torch's DistributedSampler from its import on."""
    if _MODULE in sys.modules:
        _watch(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(MetaPathFinder):
    """Calls `_watch` with the sampler's module once it is imported. Finds nothing itself."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_watch(module: ModuleType) -> None:
                execute(module)
                _watch(module)

            spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        return spec


def _watch(module: ModuleType) -> None:
    sampler: Any = module.DistributedSampler
    iterate: Callable[[Any], Iterator[int]] = sampler.__iter__
    set_epoch: Callable[[Any, int], None] = sampler.set_epoch

    def stop_watching() -> None:
        sampler.__iter__, sampler.set_epoch = iterate, set_epoch

    @functools.wraps(set_epoch)
    def set_epoch_and_stop(self: Any, epoch: int) -> None:
        stop_watching()
        set_epoch(self, epoch)

    @functools.wraps(iterate)
    def count_and_iterate(self: Any) -> Iterator[int]:
        if self.shuffle and _trains():
            epoch, passes = vars(self).get(_PASSES, (self.epoch, 0))
            # A subclass may have a set_epoch of its own.
            passes = passes + 1 if epoch == self.epoch else 1
            vars(self)[_PASSES] = (self.epoch, passes)
            if passes == _WARNS_AT_PASS:
                stop_watching()
                _warn()
        return iterate(self)

    sampler.__iter__, sampler.set_epoch = count_and_iterate, set_epoch_and_stop


def _trains() -> bool:
    import torch

    return torch.is_grad_enabled()


def _warn() -> None:
    log.warning(
        "warning: a DistributedSampler begins its third pass, and set_epoch was never called: every epoch "
        "has the same order. Call sampler.set_epoch(epoch) before each epoch."
    )
