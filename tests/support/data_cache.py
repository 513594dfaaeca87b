"""The real CIFAR-10 for tests, fetched once into the program's own data folder."""

import functools
from pathlib import Path

from mpiddp.errors import JobFailed
from mpiddp.train import cifar10
from mpiddp.train.datasets import default_data_dir
from tests.support.cluster.needs import lacking


@functools.cache
def fetched_cifar10() -> Path:
    """The data folder with CIFAR-10. Skips the test, with the reason, if no source answers."""
    folder = default_data_dir()
    try:
        if cifar10.find(folder) is None:
            cifar10.fetch(folder, print)
    except JobFailed as error:
        lacking(f"this test needs the real data: {error}")
    return folder
