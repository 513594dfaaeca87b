"""A small GPT: from characters to the logits of the characters that follow them.

    net = GPT(Shape(vocabulary=103))
    logits = net(tokens)                                   # [B, T] → [B, T, 103]
    loss = summed_loss(logits, targets) / targets.numel()  # nats per character

Blocks that normalize first, rotary positions, no biases, and one table for both ends. Positions are computed
and not stored, so DistributedDataParallel finds no buffers that it would have to send.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT. `width` is a multiple of 2 × `heads`: rotary positions turn pairs of numbers."""

    vocabulary: int
    layers: int = 3
    width: int = 128
    heads: int = 4


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self._initialize(shape)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at every position: int64 [B, T] → [B, T, vocabulary]."""
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)

    def _initialize(self, shape: Shape) -> None:
        """Logits near 0, so that the first loss is about ln(vocabulary).

        What a block adds is scaled down by the number of additions, so that the sum's variance does not
        depend on the depth: Radford et al., 2019, section 2.3.
        """
        for name, weight in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(weight, std=(2 * shape.layers * weight.shape[1]) ** -0.5)
            elif weight.ndim > 1:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        nn.init.normal_(self.token.weight, std=0.02)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        # The rows of the weight are ordered by head, then q, k, v. So a part of the rows is a number of
        # whole heads, and tensor parallelism needs no other forward than this one.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, -1, 3, self.head_size)
        qkv = heads.permute(3, 0, 2, 1, 4)  # [3, B, heads, T, head_size]
        (q, k), v = rotated(qkv[:2]), qkv[2]
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        added: Tensor = self.out(seen.transpose(1, 2).reshape(batch, length, -1))
        return added


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # The square of ReLU: So et al., 2021, arXiv:2109.08668. On CPUs it is cheaper than GELU too.
        added: Tensor = self.down(F.relu(self.up(x)).square())
        return added


def rotated(x: Tensor) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) by angles that grow with the position: [..., T, D], D even.

    Rotary positions: Su et al., 2021, arXiv:2104.09864. The product of two turned vectors depends on the
    distance of their positions only.
    """
    length, size = x.shape[-2:]
    powers = torch.arange(0, size, 2, device=x.device) / size
    angles = torch.outer(torch.arange(length, device=x.device), 10_000.0**-powers)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of -ln p over all targets [B, T], in nats.

    It is a sum, because the ranks may hold unequal numbers of targets: divide by the number over all ranks.
    """
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


@torch.no_grad()
def sample(net: GPT, start: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """`start` [T] and `count` tokens that the model draws after it: [T + count]. On any device."""
    tokens = start
    for _ in range(count):
        logits = net(tokens[None, -context:])[0, -1].float()
        drawn = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)
        tokens = torch.cat([tokens, drawn.to(tokens.device)])
    return tokens


def parameter_groups(net: nn.Module, decay: float) -> list[dict[str, object]]:
    """The groups of an optimizer: matrices decay towards 0, the norms' scales do not."""
    matrices = [weight for weight in net.parameters() if weight.ndim > 1]
    scales = [weight for weight in net.parameters() if weight.ndim == 1]
    return [{"params": matrices, "weight_decay": decay}, {"params": scales, "weight_decay": 0.0}]


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Grow for the first 5 % of the steps, then fall along a cosine to a tenth. Steps count from 1."""
    warmup = max(1, steps // 20)
    if step <= warmup:
        return highest * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return highest * (0.55 + 0.45 * math.cos(math.pi * progress))
