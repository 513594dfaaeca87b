"""The undivided model, trained beside the divided one on every rank: how far apart are they?"""

from __future__ import annotations

import torch
import torch.distributed as dist
from model import GPT, summed_loss
from parallel import clip_gradients, undivided
from torch import Tensor, nn

TOLERANCE = 1e-5


class Reference:
    """Trains the undivided model on the whole batch of every step, and records the largest differences.

    All of them are relative: of the loss in any step; of a parameter's gradient in the first step, as the
    norm of the difference by the norm; and of a parameter after the last step, in the same way. Roundings
    add up from step to step, so the weights of a long training differ more.

    Args:
        net: the undivided model, with the weights that the divided one began with.
        optimizer: of `net`.
        divided: the model with what `divide` did to it.
        part: what this rank has of it.
    """

    def __init__(
        self, net: GPT, optimizer: torch.optim.Optimizer, divided: nn.Module, part: nn.Module
    ) -> None:
        self._net = net
        self._optimizer = optimizer
        own = {id(each) for each in part.parameters()}
        named = divided.named_parameters()
        self._divided = {name: each for name, each in named if id(each) in own}
        self._is_first_step = True
        self._differences = {"loss": 0.0, "gradients": 0.0, "weights": 0.0}

    def step(
        self, tokens: Tensor, targets: Tensor, loss: Tensor, lr: float, highest: float
    ) -> None:
        """Train one step, and compare. A collective: ranks gather the gradients that they share.

        Args:
            loss: of the divided model in this step. Its gradients are clipped, and not yet used.
        """
        expected = summed_loss(self._net(tokens), targets) / targets.numel()
        expected.backward()
        clip_gradients(self._net, highest)
        self._record("loss", loss, expected.detach())
        plain = dict(self._net.named_parameters())
        for name, parameter in self._divided.items() if self._is_first_step else ():
            self._record("gradients", undivided(parameter.grad), plain[name].grad)
        self._is_first_step = False
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def result(self) -> dict[str, float]:
        """The largest differences on any rank. A collective."""
        plain = dict(self._net.named_parameters())
        with torch.no_grad():
            for name, parameter in self._divided.items():
                self._record("weights", undivided(parameter), plain[name])
        device = next(self._net.parameters()).device
        largest = torch.tensor(list(self._differences.values()), device=device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return dict(zip(self._differences, largest.tolist(), strict=True))

    def _record(self, what: str, ours: Tensor, theirs: Tensor) -> None:
        difference = ((ours - theirs).norm() / theirs.norm()).item()
        if not difference <= self._differences[what]:  # not a number is larger than all
            self._differences[what] = difference
