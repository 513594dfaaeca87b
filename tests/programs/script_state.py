"""Save a model, an optimizer, schedulers and nested values; or resume them and compare.

    python tests/programs/script_state.py FOLDER

The first run prints the random numbers that it draws after its save, and the second those that it draws
after its resume.
"""

import json
import math
import os
import random
import sys
from collections import Counter, OrderedDict

import numpy as np
import torch
from torch.optim import lr_scheduler

import mpiddp
from tests.support.training import unequal

NESTED = {
    "plain": {"epoch": 3, "name": "a", "best": 0.1, "done": False, "none": None, "big": 1 << 100},
    "floats": [math.inf, -0.0, 1e-320],
    "nested": [1, (2, "three"), {0: "a", 1.5: [torch.ones(2)]}],
    "dicts": {"ordered": OrderedDict(a=1), "counter": Counter("aab")},
    "half": torch.arange(3).half(),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).view(2, 3).T,
    "complex": torch.complex(torch.ones(2), torch.zeros(2)),
    "a/b": 2,
    "é x": 4,
}


def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    parts = [
        lr_scheduler.ConstantLR(optimizer),
        lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
    ]
    return model, optimizer, lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


def numbers():
    return [random.random(), np.random.rand(), torch.rand(()).item(), random.gauss(0, 1)]


model, optimizer, schedule = build(seed=os.getpid())
checkpoints = mpiddp.Checkpoints(sys.argv[1])
saved = checkpoints.resume()
if saved is None:
    for _ in range(2):
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
        schedule.step()
    random.gauss(0, 1)  # keeps a second number
    weight, history = torch.zeros(1_000_000), [1]
    states = {"model": model, "optimizer": optimizer, "schedule": schedule}
    states = {name: each.state_dict() for name, each in states.items()}
    with torch.inference_mode():
        checkpoints.save(1, {**NESTED, **states, "weight": weight, "history": history})
    weight.fill_(1)  # while a thread writes
    history.append(2)
    print(json.dumps([numbers(), sum(map(float, model.state_dict()["0.weight"].flatten()))]))
else:
    drawn = numbers()
    for key, value in NESTED.items():
        assert unequal(saved.state[key], value) == [], key
        assert getattr(saved.state[key], "dtype", None) == getattr(value, "dtype", None)
    assert saved.state["weight"].sum() == 0, "the training has changed what was saved"
    assert saved.state["history"] == [1]
    saved.load_into(model=model, optimizer=optimizer, schedule=schedule)
    assert unequal(optimizer.state_dict(), saved.state["optimizer"]) == []
    assert schedule.state_dict()["last_epoch"] == 2
    print(json.dumps([drawn, sum(map(float, model.state_dict()["0.weight"].flatten()))]))
