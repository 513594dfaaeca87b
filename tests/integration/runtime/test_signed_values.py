"""A value of the store counts only under its key and with its secret.

Tests mpiddp/runtime/job/signed_store.py, mpiddp/runtime/job/failure_watch.py, mpiddp/runtime/job/stop.py.
python -m pytest tests/integration/runtime/test_signed_values.py
"""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from mpiddp.runtime.job.signed_store import SignedStore, whole_number


def test_a_value_counts_only_under_its_key_and_with_its_secret() -> None:
    store = HashStore()
    own, other = SignedStore(store, "secret"), SignedStore(store, "another")
    own.set("a", "1")
    assert own.get("a") == "1"
    assert other.get("a") is None
    store.set("b", store.get("a"))
    assert own.get("b") is None
    store.set("a", "1")
    assert own.get("a") is None
    store.set("a", b"\xff" * 40)
    assert own.get("a") is None
    assert own.get("missing") is None
    assert own.get_all(["a", "missing"]) is None


def test_wait_returns_what_is_there_in_time() -> None:
    store = HashStore()
    own = SignedStore(store, "secret")
    own.set("a", "1")
    store.set("b", "forged")
    assert own.wait(["a"], 60) == {"a": "1"}
    assert own.wait(["a", "b", "c"], 0.05) == {"a": "1"}


def test_the_first_of_the_ranks_counts_not_a_stranger() -> None:
    store = HashStore()
    own = SignedStore(store, "secret")
    store.set("first", "5")
    assert own.set_if_missing("first", "1") == "1"
    assert own.set_if_missing("first", "0") == "1"


@pytest.mark.parametrize("text", ["", "-1", "256", "x", "²", "1.0", "9" * 5000, None])
def test_whole_number_refuses(text: str | None) -> None:
    assert whole_number(text, 1, 255) is None


def test_whole_number() -> None:
    assert whole_number("255", 1, 255) == 255
