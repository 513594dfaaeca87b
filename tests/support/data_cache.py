"""The real CIFAR-10 for tests, fetched once into the program's own data folder."""

import functools
from pathlib import Path

from mpiddp.errors import JobFailed
from mpiddp.train import cifar10
from mpiddp.train.datasets import default_data_dir
from tests.support.cluster.needs import lacking


def fetched_cifar10() -> Path:
    """The data folder with CIFAR-10. Skips the test, with the reason, if no source answers."""
    outcome = _fetch_once()
    if isinstance(outcome, JobFailed):
        lacking(f"this test needs the real data: {outcome}")
    return outcome


def official_batches() -> Path:
    """The folder of CIFAR-10's six batches in the binary layout, fetched as above."""
    found = cifar10.find(fetched_cifar10())
    if found is None or not (found / "test_batch.bin").exists():
        lacking(f"this test needs {cifar10.BIN_FOLDER}, and another layout is cached")
    return found


@functools.cache
def _fetch_once() -> Path | JobFailed:
    folder = default_data_dir()
    try:
        if cifar10.find(folder) is None:
            cifar10.fetch(folder, print)
    except JobFailed as error:
        return error
    return folder
