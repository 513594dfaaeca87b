"""The ranks of alone.py make their steps together, so that those that do not fail are its victims.

mpiddp launch -H localhost:3 tests/programs/one_fails.py HOW [FOLDER]
"""

import sys

import torch
import torch.distributed as dist
from alone import main

import mpiddp


def any_rank(ends: bool) -> bool:
    count = torch.tensor([float(ends)])
    dist.all_reduce(count)
    return bool(count)


if __name__ == "__main__":
    with mpiddp.process_group(backend="gloo"):
        code = main(any_rank)
    sys.exit(code)
