"""The observer of a drill: it records the script of a rank, and lets the fault hit from within.

A rank imports this module by its name in MPIDDP_OBSERVER, and calls `observe` before the script. The observer
writes a line of JSON for each event into a file in the folder MPIDDP_DRILL: the state before the first step,
each step, each torch.save. `mpiddp.drill.history` reads them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mpiddp.checkpoints.fit import bare_name
from mpiddp.drill.faults import FIRED, PLAN, FaultPlan
from mpiddp.drill.history import RATE, History, find, read_attempts
from mpiddp.errors import UserError
from mpiddp.protocol.variables import DRILL
from mpiddp.runtime.torch.divergence import digest

_SETTLE_S = 0.5  # before the fault, so that a save beside the training can end
_SLOW_S = 0.05  # of each step after the fault, so that a short script lives until the signal


def observe() -> None:
    """Record this rank from now on."""
    folder = Path(os.environ[DRILL])
    if not (folder / PLAN).is_file():
        sentence = f"mpiddp drill: {socket.gethostname()} does not see {folder}."
        raise UserError(sentence, fix="--work DIR, a new folder that all hosts share")
    plan = FaultPlan(**json.loads((folder / PLAN).read_text(encoding="utf-8")))
    if plan.folder:
        os.chdir(plan.folder)
    observer = _Observer(folder, int(os.environ["RANK"]), plan)
    register_optimizer_step_pre_hook(observer.before_step)
    register_optimizer_step_post_hook(observer.after_step)
    nn.modules.module.register_module_forward_pre_hook(observer.before_forward)
    save = torch.save

    def observed(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        observer.saves(f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", ""))
        save(obj, f, *args, **kwargs)

    torch.save = observed  # this process is a rehearsal; nothing else replaces functions of torch


class _Observer:
    def __init__(self, folder: Path, rank: int, plan: FaultPlan) -> None:
        self._folder, self._rank, self._plan = folder, rank, plan
        # The fault hits once in all attempts.
        self._is_over = not plan.hits or (folder / FIRED).exists()
        self._step = 0  # the latest step of the run; at first the step of the resume
        self._optimizer: Optimizer | None = None  # the first optimizer that makes a step
        self._model: nn.Module | None = None  # the first module that is called
        self._first_buffers: dict[str, str] = {}  # before a forward pass changes BatchNorm's
        file = folder / f"rank_{rank}_{time.time_ns()}.jsonl"
        self._file = file.open("w", buffering=1, encoding="utf-8")

    def before_forward(self, module: nn.Module, inputs: object) -> None:
        """Remember the outermost module of the first forward pass."""
        if self._model is None:
            self._model = module
            self._first_buffers = self._buffers()

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if self._optimizer is not None:
            return
        self._optimizer = optimizer
        state = self._state(optimizer)
        state["entries"] |= self._first_buffers
        self._write(**state)
        earlier = History(read_attempts(self._folder, self._rank)[:-1])
        self._step = find(earlier.steps, state) or 0

    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if optimizer is not self._optimizer:
            return
        self._step += 1
        state = self._state(optimizer)
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        state["entries"] = {RATE: str(rates)} | state["entries"]
        self._write(**state)
        if not self._is_over and self._step >= self._plan.step:
            self._hit()
        if self._plan.last and self._step >= self._plan.last:
            raise SystemExit(0)

    def _hit(self) -> None:
        """Let the fault hit at its step. The steps after it are slow, until the signal arrives."""
        if (self._step, self._rank) == (self._plan.step, self._plan.rank):
            time.sleep(_SETTLE_S)
            (self._folder / FIRED).touch()
            if self._plan.kills:
                os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(_SLOW_S)

    def saves(self, name: Any) -> None:
        path = os.path.realpath(name) if isinstance(name, (str, os.PathLike)) and name else ""
        self._write(step=self._step, path=path)

    def _state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The digest of each entry of the training's state, causes before effects, and of all weights."""
        named = self._model.named_parameters() if self._model is not None else ()
        names = {id(parameter): bare_name(name) for name, parameter in named}
        moments, weights = {}, {}
        groups = (group["params"] for group in optimizer.param_groups)
        for number, parameter in enumerate(parameter for group in groups for parameter in group):
            name = names.get(id(parameter), f"parameter {number}")
            for key, value in optimizer.state.get(parameter, {}).items():
                moments[f"the optimizer's {key} of {name}"] = _digest(value)
            weights[name] = _digest(parameter)
        of_all_weights = sha256(" ".join(weights.values()).encode()).hexdigest()
        return {"entries": {**moments, **self._buffers(), **weights}, "weights": of_all_weights}

    def _buffers(self) -> dict[str, str]:
        # Rank 0 is enough, because DDP sends its buffers to all before each forward pass.
        named = self._model.named_buffers() if self._model is not None and not self._rank else ()
        return {f"the buffer {bare_name(name)}": _digest(buffer) for name, buffer in named}

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")


def _digest(value: Any) -> str:
    """A digest of the bits of a tensor, or the text of another value."""
    return f"{int(digest(value)):x}" if isinstance(value, torch.Tensor) else repr(value)
