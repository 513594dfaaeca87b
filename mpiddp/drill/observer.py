"""What a rank of a drill records of its script, which stays as it is, and the faults that hit from within.

The start of a rank imports this module by the name in MPIDDP_OBSERVER and calls `observe`. It appends one
line of JSON per event to a file of its own in the folder MPIDDP_DRILL: the state before the first step,
each step, each save. See `mpiddp.drill.records` for what reads it.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mpiddp.drill.faults import Plan, PlannedFault
from mpiddp.drill.records import file_of, position
from mpiddp.errors import UserError
from mpiddp.protocol.variables import DRILL


def observe() -> None:
    """Record this rank from now on. The rank has joined, and its script has not begun."""
    folder = Path(os.environ[DRILL])
    if not (folder / "plan.json").is_file():
        raise UserError(
            f"mpiddp drill: {socket.gethostname()} does not see {folder}. Name a new folder that all hosts "
            "share: --work DIR"
        )
    observer = _Observer(folder, int(os.environ["RANK"]), Plan.read(folder))
    register_optimizer_step_pre_hook(observer.before_step)
    register_optimizer_step_post_hook(observer.after_step)
    nn.modules.module.register_module_forward_pre_hook(observer.before_forward)
    _watch_saves(observer)
    _watch_batches(observer)


class _Observer:
    def __init__(self, folder: Path, rank: int, plan: Plan) -> None:
        self.folder, self.rank, self.plan = folder, rank, plan
        self.fault = PlannedFault(plan, folder, rank)
        # The samples of the newest batch, until the model is called. A script may get batches to skip them.
        # If it gets them ahead, the newest is another one in all runs alike, and still tells orders apart.
        self.batch: list[int] = []
        self._samples: list[int] = []  # of this step
        self.step = 0  # of the run: that of the resume until the first one of this process
        self._optimizer: Optimizer | None = None  # the first one that makes a step
        self._model: nn.Module | None = None  # the first that is called
        self._first_buffers = ""
        # The step at which a thread began to write into this folder.
        self._begun: dict[Path, int] = {}
        self._file = file_of(folder, rank, time.time_ns()).open("w", buffering=1, encoding="utf-8")

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        """Remember the outermost module of the first forward pass. A call of it takes the newest batch."""
        if self._model is None:
            self._model = module
            self._first_buffers = _digest(list(module.buffers()))
        if module is self._model and torch.is_grad_enabled():
            self._samples += self.batch
            self.batch = []

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._optimizer is not None:
            return
        self._optimizer = optimizer
        model = list(self._model.parameters()) if self._model is not None else []
        of_model = {id(parameter) for parameter in model}
        parameters = list(_parameters(optimizer))
        state = self._state(optimizer) | {"buffers": self._first_buffers}
        self._write(
            kind="first",
            **state,
            # A model may be divided or wrapped so that it has other parameters; then none is known.
            is_of_model=not of_model or any(id(each) in of_model for each in parameters),
        )
        self.step = position(self.folder, self.rank, state["weights"])

    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if optimizer is not self._optimizer:
            return
        self.step += 1
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        samples = self._samples or self.batch  # another model than the first one may be called
        self._samples, self.batch = [], []
        self._write(kind="step", rates=rates, samples=samples, **self._state(optimizer))
        self.fault.after_step(self.step)
        if self.plan.last and self.step >= self.plan.last:
            raise SystemExit(0)

    def saving(self, path: str, write: Callable[[bytes], object] | None, data: bytes) -> None:
        """Before a save. `write` puts a part of the file in its place, for faults in the middle of it.

        A save that a fault breaks is not recorded: nothing can resume from it.
        """
        in_thread = path and threading.current_thread() is not threading.main_thread()
        # While a thread writes the files of a save, the training goes on.
        step = self._begun.setdefault(Path(path).parent, self.step) if in_thread else self.step
        if write is not None:
            self.fault.in_save(step, write, data)
        self._write(kind="save", step=step, path=path, in_handler=_in_handler())

    def _state(self, optimizer: Optimizer) -> dict[str, Any]:
        parameters = list(_parameters(optimizer))
        own = [optimizer.state.get(parameter, {}) for parameter in parameters]
        held = [state[key] for state in own for key in sorted(state, key=str)]
        buffers = list(self._model.buffers()) if self._model is not None else []
        return {
            "weights": _digest(parameters),
            "optimizer": _digest(held) if held else "",
            "buffers": _digest(buffers),
            "random": _random_digest(),
        }

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _digest(values: list[Any]) -> str:
    """A hash of the bits of tensors, and of other values as they print."""
    found = hashlib.blake2b(digest_size=8)
    for value in values:
        if not isinstance(value, torch.Tensor):
            found.update(repr(value).encode())
            continue
        local = value.to_local() if hasattr(value, "to_local") else value  # of a sharded tensor
        tensor = local.detach().cpu().contiguous()
        if size := tensor.numel() * tensor.element_size():
            found.update((ctypes.c_char * size).from_address(tensor.data_ptr()))
    return found.hexdigest()


def _random_digest() -> str:
    states: list[Any] = [torch.get_rng_state(), random.getstate()]
    if numpy := sys.modules.get("numpy"):
        states.append([str(each) for each in numpy.random.get_state()])
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return _digest(states)


def _in_handler() -> bool:
    """Whether a handler of a signal is on the stack of this thread."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    codes = [getattr(signal.getsignal(number), "__code__", None) for number in numbers]
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and any(frame.f_code in codes for frame, _ in traceback.walk_stack(None))


def _watch_saves(observer: _Observer) -> None:
    save = torch.save

    def observed(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        is_path = isinstance(f, (str, os.PathLike))
        name = f if is_path else getattr(f, "name", "")
        path = os.path.realpath(name) if isinstance(name, (str, os.PathLike)) and name else ""
        data, write = b"", None
        if observer.plan.row.is_of_save and (path or not observer.plan.in_files):
            save(obj, copy := io.BytesIO(), *args, **kwargs)
            data = copy.getvalue()
            write = Path(f).write_bytes if is_path else f.write
        observer.saving(path, write, data)
        save(obj, f, *args, **kwargs)

    torch.save = observed  # this process is a rehearsal; nothing else replaces functions of torch


def _watch_batches(observer: _Observer) -> None:
    """Note the numbers of the samples of each batch when the script gets it.

    A loader's workers have later batches already. A batch for an evaluation does not count.
    """
    from torch.utils.data import dataloader

    Loader: Any = dataloader._BaseDataLoaderIter
    reset, draw, deliver = Loader._reset, Loader._next_index, Loader.__next__

    def reset_drawn(self: Any, *args: Any, **kwargs: Any) -> None:
        self._drill_drawn = []  # what a `break` has left of the epoch before is never delivered
        reset(self, *args, **kwargs)

    def next_index(self: Any) -> Any:
        drawn = draw(self)
        self.__dict__.setdefault("_drill_drawn", []).append(drawn)
        return drawn

    def deliver_next(self: Any) -> Any:
        batch = deliver(self)
        numbers = self._drill_drawn.pop(0) if self._drill_drawn else []
        if torch.is_grad_enabled():
            many = numbers if isinstance(numbers, (list, tuple)) else [numbers]
            observer.batch = [int(each) for each in many if each is not None]
        return batch

    Loader._reset, Loader._next_index, Loader.__next__ = reset_drawn, next_index, deliver_next
