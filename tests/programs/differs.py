"""Save a state in which the ranks differ, print how save() refuses it, then save a state of all ranks.

mpiddp launch -n 2 tests/programs/differs.py FOLDER
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import mpiddp

with mpiddp.process_group(backend="gloo") as world:
    rank = world.rank
    own = DeviceMesh("cpu", [rank])
    lone_shard = distribute_tensor(torch.full((4,), float(rank)), own, [Shard(0)])
    lone = {name: torch.full((2,), 3.0 + rank) for name in ("ones", "twos")}
    close = torch.arange(100.0).index_fill(0, torch.tensor([3]), 3.0 + 0.5 * rank)
    states = {
        "one element": {"weight": close},
        "a counter": {"seen": torch.tensor(1_000_000 + rank)},
        "value": {"position": 10 * rank},
        "shape": {"model": {"weight": torch.ones(2 + rank)}},
        "dtype": {"model": {"weight": torch.ones(2).to([torch.float32, torch.float16][rank])}},
        "values": {"model": lone},
        "stages": {"model": {"weight": lone_shard}},
        "sharded on one": {"model": torch.ones(4) if rank else lone_shard},
        "length": {"optimizer": {"params": list(range(rank + 1))}},
        "kind": {"optimizer": [1] if rank else {"a": 1}},
    }
    with mpiddp.Checkpoints(sys.argv[1], every=None) as checkpoints:
        checkpoints.resume()
        for step, (name, state) in enumerate(states.items(), 1):
            try:
                checkpoints.save(step, state)
            except ValueError as error:
                if rank == 1:
                    print(f"{name}: {error}", flush=True)
            assert not list(Path(sys.argv[1]).rglob("*.pt")), name
        # DDP keeps statistics of BatchNorm on each rank.
        model = DistributedDataParallel(nn.BatchNorm1d(2))
        model(torch.full((4, 2), float(rank))).sum().backward()
        models = {"model": model.state_dict(), "bare": model.module.state_dict()}
        own_keys = {"a": 5, "of 0": torch.ones(3)}
        if rank:
            own_keys = {"a": None, "of 1": [rank, torch.ones(1)]}
        checkpoints.save(20, {**models, **own_keys})
        later = torch.zeros(4).index_fill(0, torch.tensor([2]), float(rank))
        try:
            checkpoints.save(21, {"later": later})
        except ValueError as error:
            if rank == 1:
                print(f"later: {error}", flush=True)
    saved = mpiddp.load(sys.argv[1])
    assert saved.state["model"]["module.running_mean"].tolist() == [0, 0]
    assert saved.state["bare"]["running_mean"].tolist() == [0, 0]
    assert (saved.state["a"], saved.state["of 1"][0]) == (5, 1)
    assert (saved.state["of 0"].tolist(), saved.state["of 1"][1].tolist()) == ([1, 1, 1], [1])
