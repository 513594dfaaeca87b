"""The backend of a process group: which one is chosen, and which ones are refused.

Tests mpiddp/runtime/torch/process_group.py.
python -m pytest tests/integration/runtime/test_backends.py
"""

from __future__ import annotations

import pytest

from mpiddp.errors import UserError
from mpiddp.runtime.torch.process_group import choose_backend, device_of
from mpiddp.world import World
from tests.support.errors import error


@pytest.mark.parametrize("name", ["cpu:gloo,cuda:nccl", "GLOO", "mpi", ""])
def test_a_backend_that_no_group_of_ours_can_have(name: str) -> None:
    with pytest.raises(UserError, match=error("expected gloo", f"'{name}'", "gloo or ")):
        choose_backend(name)


def test_more_local_ranks_than_gpus() -> None:
    world = World(999, 1000, 999, 1000)
    values = (
        f"{world.hostname} ",
        " GPUs ",
        "1000 slots",
        "CUDA_VISIBLE_DEVICES",
        "--backend gloo",
    )
    with pytest.raises(UserError, match=error("GPUs but", *values)):
        device_of(world, "nccl")
