"""The variables of this shell that reach the ranks on other hosts: those of a list, and no secret.

tests/promises/test_variables.py has the command line for each MPI.
python -m pytest tests/unit/launch/test_allow_list.py
"""

from __future__ import annotations

import pytest

from mpiddp.launch.starters.environment import (
    ALLOWED,
    ALLOWED_BEGINNINGS,
    SECRET_WORDS,
    forwarded,
    is_secret,
)

PASSED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_DEVICE_ORDER"),
    *("NCCL_DEBUG", "NCCL_IB_PKEY", "TORCH_LOGS", "PYTORCH_CUDA_ALLOC_CONF", "GLOO_SOCKET_IFNAME"),
    *("OMP_NUM_THREADS", "HIP_PLATFORM", "ROCR_X", "RCCL_X", "ZE_X", "ONEAPI_DEVICE_SELECTOR"),
    *("UCX_TLS", "FI_PROVIDER", "HF_HOME", "MPIDDP_DATA", "MPI4PY_LIBMPI"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
NOT_PASSED = ("HOME", "USER", "LD_PRELOAD", "PYTHONHASHSEED", "WANDB_MODE", "AWS_REGION", "PWD")
SECRETS = (
    *("HF_TOKEN", "NCCL_SECRET", "UCX_KEY", "TORCH_PASSWORD", "FI_CREDENTIALS", "HF_AUTH"),
    *("MPIDDP_COOKIE", "OMP_SESSION", "TORCH_DSN", "hf_token"),
)


@pytest.mark.parametrize("name", PASSED)
def test_a_variable_of_the_allow_list_reaches_the_ranks(name: str) -> None:
    assert forwarded({name: "1"}, {}) == {name: "1"}


@pytest.mark.parametrize("name", [*NOT_PASSED, *SECRETS])
def test_another_variable_or_a_secret_stays_here(name: str) -> None:
    assert forwarded({name: "1"}, {}) == {}


@pytest.mark.parametrize("name", SECRETS)
def test_the_words_of_a_secret(name: str) -> None:
    assert is_secret(name)


def test_the_tables_above_are_complete() -> None:
    """A row that is added or removed has to be added or removed here."""
    assert (len(ALLOWED), len(ALLOWED_BEGINNINGS)) == (9, 14)
    assert len(SECRET_WORDS) == 9
