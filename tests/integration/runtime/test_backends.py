"""The backend of a process group: which one is chosen, and which ones are refused.

Tests mpiddp/runtime/torch/process_group.py.
python -m pytest tests/integration/runtime/test_backends.py
"""

from __future__ import annotations

import pytest
import torch

from mpiddp.errors import UserError
from mpiddp.runtime.torch.process_group import choose_backend


@pytest.mark.parametrize("name", ["cpu:gloo,cuda:nccl", "GLOO", "mpi", ""])
def test_a_backend_that_no_group_of_ours_can_have(name: str) -> None:
    with pytest.raises(UserError, match=f"^backend '{name}': expected gloo or "):
        choose_backend(name)


def test_without_a_gpu_it_is_gloo() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU")
    assert choose_backend(None) == choose_backend("gloo") == "gloo"
    with pytest.raises(UserError, match=r"^--backend nccl needs a GPU"):
        choose_backend("nccl")
