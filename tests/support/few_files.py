"""A process that may open no more files, as at the limit of `ulimit -n`.

python -c 'from tests.support.few_files import *; files_left(1).__enter__(); open("/"), open("/dev/null")'
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_left(count: int) -> Iterator[None]:
    """Within the body, this process may open `count` more files. One more fails with EMFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(count + 1)]
    for file in opened:
        os.close(file)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (opened[-1], hard)
    )  # the lowest free ones come first
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
