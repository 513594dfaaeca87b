"""The groups of a mesh, the traffic of its links, and `mpiddp mesh`.

Tests mpiddp/meshes/.
"""

import math
import re
from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.meshes.dimensions import check_sizes, parse_sizes, resolve
from mpiddp.meshes.layout import Layout
from mpiddp.meshes.traffic import Training, traffic
from tests.support.errors import error, refusal

FIXED = settings(max_examples=300, deadline=None, derandomize=True, database=None)


def block(counts: list[int]) -> list[str]:
    """Ranks host by host, as mpiddp launch and torchrun number them."""
    return [f"h{host}" for host, count in enumerate(counts) for _ in range(count)]


@dataclass(frozen=True)
class Case:
    counts: list[int]
    sizes: dict[str, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Hosts with unequal slots, and a mesh that fits them."""
    tp = draw(st.integers(1, 4))
    counts = [tp * blocks for blocks in draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))]
    left, sizes = sum(counts) // tp, {"tp": tp}
    for name in ("cp", "dp"):
        divisors = [each for each in range(1, left + 1) if left % each == 0]
        sizes[name] = draw(st.sampled_from(divisors))
        left //= sizes[name]
    sizes["pp"] = left
    return Case(counts, resolve(sizes, block(counts)))


@FIXED
@given(cases())
def test_any_mesh_has_every_rank_once_and_tp_inside_hosts(case):
    """Of the dimensions from the fastest on, those that divide every host send nothing over the network."""
    layout = Layout(case.sizes, tuple(block(case.counts)))
    layout.require_tp_inside_hosts()
    for position, (name, size) in enumerate(case.sizes.items()):
        groups = layout.groups(name)
        assert sorted(chain(*groups)) == list(range(len(layout.hosts)))
        for group in groups:
            assert list(group) == sorted(group)  # as torch sorts them
            coordinates = [layout.coordinates_of(rank)[position] for rank in group]
            assert coordinates == list(range(size))
        width = math.prod(list(case.sizes.values())[position:])
        if all(count % width == 0 for count in case.counts):
            assert all(len(layout.hosts_of(group)) == 1 for group in groups)


@pytest.mark.parametrize("letters", ["ababaa", "abba"])
def test_ranks_that_are_not_numbered_host_by_host(letters):
    layout = Layout({"dp": len(letters) // 2, "tp": 2}, tuple(letters))
    values = ("tp=2 ", "ranks 0, 1,", "a and b", "mpiddp launch", "mpirun --map-by slot")
    assert re.fullmatch(error("which are", *values), refusal(layout.require_tp_inside_hosts))
    Layout({"dp": len(letters), "tp": 1}, tuple(letters)).require_tp_inside_hosts()


HOSTS = block([8] * 64)


@pytest.mark.parametrize(
    ("requested", "expected"),
    [
        ("dp=32 tp=8 pp=2", {"pp": 2, "dp": 32, "tp": 8}),
        ("tp=8", {"dp": 64, "tp": 8}),
        ("tp=8,pp=-1,dp=4", {"pp": 16, "dp": 4, "tp": 8}),
        ("TP=2 pp=-1", {"pp": 256, "tp": 2}),
        ("", {"dp": 512}),
        ("dp_shard=8 dp_replicate=64", {"dp_replicate": 64, "dp_shard": 8}),
        ("cp=2 tp=4 ep=2", {"dp": 32, "ep": 2, "cp": 2, "tp": 4}),
    ],
)
def test_sizes(requested, expected):
    found = resolve(parse_sizes(requested.split()), HOSTS)
    assert list(found.items()) == list(expected.items())


def test_bad_sizes_of_a_script():
    for size in (0, -2, 1.5, "2", None):
        said = refusal(lambda size=size: check_sizes({"tp": size}))  # type: ignore[misc]
        assert said.startswith(f"tp={size!r}: expected a whole number, 1 or more, or -1")
    assert 'Did you mean "dp_shard"?' in refusal(lambda: check_sizes({"dp_shards": 2}))


def of(layout: Layout, training: Training) -> dict[str, tuple[float, float]]:
    return {each.dimension: (each.inside, each.network) for each in traffic(layout, training)}


def test_a_ring_crosses_each_hosts_network_once():
    """Two hosts of two GPUs, all of them in one group: in each host one GPU sends inside, one outside."""
    (sent,) = traffic(Layout({"dp": 4}, tuple(block([2, 2]))), Training(params=100, value_bytes=4))
    volume = 2 * 3 / 4 * 400
    assert (sent.inside, sent.network) == (volume, volume)


def test_a_stage_between_two_others_sends_both_ways():
    training = Training(layers=3, hidden=10, seq=10, micro_batches=2)
    (sent,) = traffic(Layout({"pp": 3}, tuple(block([1, 1, 1]))), training)
    assert sent.network == 800


def test_sharded_data_parallelism():
    training = Training(params=800, value_bytes=2, micro_batches=2)
    layout = Layout({"dp_replicate": 2, "dp_shard": 4}, tuple(block([4, 4])))
    found = of(layout, training)
    assert found["dp_shard"] == (pytest.approx(2 * 3 * 3 / 4 * 1600), 0)
    assert found["dp_replicate"] == (0, pytest.approx(4 * 2 * (2 * 1 / 2) * 1600 / 4))
