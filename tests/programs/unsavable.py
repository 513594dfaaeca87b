"""Print where each state of some that cannot be saved has something foreign."""

import re
import sys

import numpy as np
import torch

import mpiddp

for state in (
    {"lr": np.float64(1)},
    {"a": {"b": [np.ones(2)]}},
    {"model": torch.nn.Linear(1, 1)},
    {"seen": {1}},
):
    try:
        mpiddp.Checkpoints(sys.argv[1]).save(1, state)
    except TypeError as error:
        print(re.sub(r": .*?\b(\w+(\.\w+)*(?<!save))\. .*", r": \1", str(error)))
