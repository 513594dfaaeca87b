"""The real CIFAR-10 for tests, fetched once into the program's own data folder."""

import functools
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.train.data import cifar10_fetch
from mpiddp.train.data.cifar10_files import BIN_FOLDER
from mpiddp.train.data.datasets import DATASETS, find
from mpiddp.train.opening import default_data_dir
from tests.support.cluster.needs import lacking


def fetched_cifar10() -> Path:
    """The data folder with CIFAR-10. Skips the test, with the reason, if no source answers."""
    outcome = _fetch_once()
    if isinstance(outcome, UserError):
        lacking(f"this test needs the real data: {outcome}")
    return outcome


def official_batches() -> Path:
    """The folder of CIFAR-10's six batches in the binary layout, fetched as above."""
    found = find(DATASETS["cifar10"], [fetched_cifar10()])
    if found is None or found[1].folder != BIN_FOLDER:
        lacking(f"this test needs {BIN_FOLDER}, and another layout is cached")
    return found[0]


@functools.cache
def _fetch_once() -> Path | UserError:
    folder = default_data_dir()
    try:
        if find(DATASETS["cifar10"], [folder]) is None:
            cifar10_fetch.fetch(folder, print)
    except UserError as error:
        return error
    return folder
