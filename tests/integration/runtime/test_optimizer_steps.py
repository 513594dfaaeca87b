"""The steps of a script that tells none, by its optimizers.

Tests mpiddp/runtime/script.py.
python -m pytest tests/integration/runtime/test_optimizer_steps.py
"""

from __future__ import annotations

import subprocess
import sys

from tests.support.patience import PATIENCE_S

FOLDS_AND_A_GAN = """
import torch
from mpiddp.runtime.script import _report_optimizer_steps

told = []
_report_optimizer_steps(told.append)
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
for fold in range(3):
    optimizer = torch.optim.SGD([parameter])
    for step in range(2):
        optimizer.step()
print(told)
told.clear()
both = [torch.optim.SGD([parameter]) for _ in range(2)]
for step in range(2):
    for optimizer in both:
        optimizer.step()
print(told)
"""


def test_a_later_optimizer_goes_on_and_two_of_one_step_count_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FOLDS_AND_A_GAN],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout == "[1, 2, 2, 3, 3, 4]\n[4, 4, 5, 5]\n"
