"""What a process tells of the collectives that it has called.

Tests mpiddp/runtime/collectives.py.
python -m pytest tests/integration/runtime/test_collectives.py
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mpiddp.protocol.channel import LINE_LIMIT, encode, is_valid
from mpiddp.runtime.collectives import calls
from tests.support.place import eventually


@pytest.fixture(autouse=True)
def group():
    """This process as the only rank of a job."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def told() -> dict[str, list[tuple[int, str, bool]]]:
    """By group: the number, the kind and the end of each call."""
    facts = calls()
    assert facts is not None
    assert is_valid("calls", facts)
    assert len(encode("calls", **facts)) < LINE_LIMIT / 2
    assert all(at <= facts["now_us"] for each in facts["groups"] for _, _, at, _ in each["calls"])
    return {
        each["name"]: [
            (number, each["kinds"][kind], over) for number, kind, _, over in each["calls"]
        ]
        for each in facts["groups"]
    }


def test_the_calls_of_a_group_and_their_sizes():
    dist.all_reduce(torch.ones(2, 3))
    dist.broadcast(torch.ones(4, dtype=torch.bfloat16), 0)
    dist.barrier()
    (made,) = told().values()
    assert [kind for _, kind, _ in made] == [
        "all_reduce (float32, 6)",
        "broadcast (bfloat16, 4)",
        "barrier",
    ]
    first = made[0][0]
    assert [number for number, _, _ in made] == [first, first + 1, first + 2]
    # A thread of gloo notes the end.
    eventually(lambda: all(over for (made,) in [told().values()] for _, _, over in made))


def test_a_group_is_remembered_while_others_fill_torchs_record():
    """Which has 2,000 calls, 256 under mpiddp; and a line has a limit."""
    groups = [dist.new_group([0]) for _ in range(20)]
    for each in groups:
        for _ in range(200):
            dist.all_reduce(torch.ones(1), group=each)
        told()
    found = told()
    assert len(found) == 16
    assert [len(made) for made in found.values()] == [128] * 16
    dist.destroy_process_group(groups[-1])
    assert f"{groups[-1].group_name}:gloo" in found.keys() - told().keys()
