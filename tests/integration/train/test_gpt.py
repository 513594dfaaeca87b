"""examples/gpt: documents of uneven length in one batch, and mixed precision in one process.

Padded, bucketed and packed rows give each document the same loss.

Tests examples/gpt/batches.py, model.py and train.py.
"""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from examples.gpt.batches import Step, bucketed, collate, count_targets, packed, padded
from examples.gpt.model import GPT, IGNORED, Shape, summed_loss

WIDTH, RANKS, VOCABULARY = 40, 2, 11
Plan = Callable[[Sequence[int], int], list[Step]]  # from lengths and a seed
PLANS: dict[str, Plan] = {
    "padded": lambda lengths, seed: padded(lengths, 3, RANKS, seed),
    "bucketed": lambda lengths, seed: bucketed(lengths, 3, RANKS, seed),
    "packed": lambda lengths, seed: packed(lengths, 2, RANKS, WIDTH, seed),
}


def some_documents(number: int = 23, seed: int = 0) -> list[Tensor]:
    """Documents of 2 to WIDTH + 1 characters, the shortest and the longest possible ones among them."""
    draws = random.Random(seed)
    lengths = [2, WIDTH + 1, *(draws.randint(2, WIDTH + 1) for _ in range(number - 2))]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def small_gpt() -> GPT:
    """A model whose predictions depend much on what a position sees."""
    torch.manual_seed(0)
    net = GPT(Shape(VOCABULARY, layers=2, width=16, heads=2))
    torch.nn.init.normal_(net.token.weight, std=0.5)
    return net


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("number", [1, 2, 7, 23])
def test_every_document_stands_in_a_plan_once(plan, number):
    lengths = [len(each) for each in some_documents(max(2, number))][:number]
    steps = PLANS[plan](lengths, 5)
    found = [each for step in steps for rows in step for row in rows for each in row]
    assert sorted(found) == list(range(number))
    assert all(len(step) == RANKS for step in steps)
    assert steps == PLANS[plan](lengths, 5)
    if number > 7:
        assert steps != PLANS[plan](lengths, 6)


@pytest.mark.parametrize("plan", PLANS)
def test_ranks_with_unequal_targets_have_the_gradients_of_one(plan):
    """Shares of the sum by the targets of all ranks, added up. A mean of means would differ."""
    documents, net = some_documents(7), small_gpt()
    parameters = list(net.parameters())
    mean_of_means_differs = False
    for step in PLANS[plan]([len(each) for each in documents], 1):
        total = count_targets(documents, step)
        of_ranks, means = [], []
        for rows in step:
            batch = collate(documents, rows)
            loss = summed_loss(net(batch.tokens, batch.mask), batch.targets)
            of_ranks.append(torch.autograd.grad(loss / total, parameters, retain_graph=True))
            own = max(1, int((batch.targets != IGNORED).sum()))
            means.append(torch.autograd.grad(loss / own / RANKS, parameters))
        chosen = [documents[each] for rows in step for row in rows for each in row]
        alone = sum(
            F.cross_entropy(net(each[None, :-1])[0], each[1:], reduction="sum") for each in chosen
        )
        expected = torch.autograd.grad(torch.as_tensor(alone) / total, parameters)
        for gradient, *parts in zip(expected, *of_ranks, strict=True):
            assert (sum(parts) - gradient).norm() < 1e-5 * gradient.norm()
        wrong = zip(expected, *means, strict=True)
        mean_of_means_differs |= any(
            (sum(parts) - each).norm() > 1e-3 * each.norm() for each, *parts in wrong
        )
    assert mean_of_means_differs
