"""What a process tells of the collectives that it has called."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from mpiddp.protocol.channel import LINE_LIMIT, encode, is_valid
from mpiddp.runtime.collectives import calls
from tests.support.patience import PATIENCE_S, eventually
from tests.support.ranks import ROOT


@pytest.fixture(autouse=True)
def group():
    """This process as the only rank of a job."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def told() -> dict[str, list[tuple[int, str, bool]]]:
    """By group: the number, the kind and the end of each call."""
    facts = calls()
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
    assert [len(made) for made in found.values()] == [128 // 20] * 20
    dist.destroy_process_group(groups[-1])
    assert f"{groups[-1].group_name}:gloo" in found.keys() - told().keys()


@pytest.mark.parametrize("record", [b"", b"\x80\x04.", b"cno_such_module\nname\n."])
def test_a_record_of_another_form_is_none(monkeypatch, record):
    """It is private to torch, so a later torch may have another one. The thread that reads it goes on."""
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_fr_trace", lambda *_: record, raising=False)
    assert calls() is None


TWO_RANKS = """
import sys, torch, torch.distributed as dist
from mpiddp.runtime.collectives import calls

def told():
    groups = calls()["groups"]
    return {each["name"]: [(n, over) for n, _, _, over in each["calls"]][-1:] for each in groups}

rank, numbers = int(sys.argv[1]), torch.ones(4)
store = dist.FileStore(sys.argv[2])

def meet(prefix):
    dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=rank, world_size=2)

def reduce_late():  # rank 1 comes once rank 0 has looked
    if rank == 1:
        store.get(f"look {dist.get_world_size()} {meeting}")
        dist.all_reduce(numbers)
    else:
        work = dist.all_reduce(numbers, async_op=True)
        print(told())
        store.set(f"look {dist.get_world_size()} {meeting}", "")
        work.wait()

meeting = 1
meet("first")
own = [dist.new_group([each]) for each in range(2)][rank]
for _ in range(3):
    dist.all_reduce(numbers)
reduce_late()
for _ in range(300):
    dist.all_reduce(numbers, group=own)
if rank == 0:
    print({name: made for name, made in told().items() if name == "0:gloo"})
dist.destroy_process_group()
meeting = 2
meet("second")
print(told())
reduce_late()
dist.barrier()
"""


def test_what_a_group_has_called_is_not_told_of_another_time(tmp_path):
    """A call ends although torch's record has lost it. A later group of the same name begins anew."""
    command = [sys.executable, "-c", TWO_RANKS]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), tmp_path / "store"], cwd=ROOT, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "TORCH_FR_BUFFER_SIZE": "256"},
        )
        for rank in range(2)
    ]  # fmt: skip
    first, second = (rank.communicate(timeout=PATIENCE_S)[0].splitlines() for rank in ranks)
    assert first == [
        "{'0:gloo': [(4, False)]}",  # rank 1 has not come
        "{'0:gloo': [(4, True)]}",
        "{}",
        "{'0:gloo': [(1, False)]}",
    ]
    assert second == ["{}"]
