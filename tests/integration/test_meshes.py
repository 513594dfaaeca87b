"""The groups of a mesh, the traffic of its links, and `mpiddp mesh`.

Tests mpiddp/meshes/.
python -m pytest tests/integration/test_meshes.py
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp.errors import UserError
from mpiddp.meshes import main
from mpiddp.meshes.dimensions import check_sizes, parse_sizes, resolve
from mpiddp.meshes.layout import Layout
from mpiddp.meshes.report import bytes_text, compact, shortened
from mpiddp.meshes.traffic import Training, traffic
from tests.support.errors import error

FIXED = settings(max_examples=300, deadline=None, derandomize=True, database=None)


# --- the layout ---


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
        sizes[name] = draw(
            st.sampled_from([each for each in range(1, left + 1) if left % each == 0])
        )
        left //= sizes[name]
    sizes["pp"] = left
    return Case(counts, resolve(sizes, block(counts)))


def check(layout: Layout) -> None:
    """Each dimension's groups hold every rank once, and tp stays inside hosts."""
    everyone = list(range(len(layout.hosts)))
    for name, size in layout.sizes.items():
        groups = layout.groups(name)
        assert {len(group) for group in groups} == {size}
        assert sorted(rank for group in groups for rank in group) == everyone
    for group in layout.groups("tp") if "tp" in layout.sizes else ():
        assert len({layout.hosts[rank] for rank in group}) == 1


@FIXED
@given(cases())
def test_any_mesh_has_every_rank_once_and_tp_inside_hosts(case: Case) -> None:
    """Of the dimensions from the fastest on, those that divide every host send nothing over the network."""
    layout = Layout(case.sizes, tuple(block(case.counts)))
    check(layout)
    layout.require_tp_inside_hosts()
    for name in reversed(list(case.sizes)):
        width = math.prod(list(case.sizes.values())[list(case.sizes).index(name) :])
        if all(count % width == 0 for count in case.counts):
            assert all(len(layout.hosts_of(group)) == 1 for group in layout.groups(name))


@FIXED
@given(cases())
def test_coordinates_are_positions_in_the_groups(case: Case) -> None:
    layout = Layout(case.sizes, tuple(block(case.counts)))
    for position, name in enumerate(case.sizes):
        for group in layout.groups(name):
            assert list(group) == sorted(group)  # as torch sorts them
            found = [layout.coordinates_of(rank)[position] for rank in group]
            assert found == list(range(len(group)))


@pytest.mark.parametrize("letters", ["ababaa", "abba"])
def test_ranks_that_are_not_numbered_host_by_host(letters: str) -> None:
    layout = Layout({"dp": len(letters) // 2, "tp": 2}, tuple(letters))
    values = ("tp=2 ", "ranks 0, 1,", "a and b", "mpiddp launch", "mpirun --map-by slot")
    assert re.fullmatch(error("which are", *values), refusal(layout.require_tp_inside_hosts))
    Layout({"dp": len(letters), "tp": 1}, tuple(letters)).require_tp_inside_hosts()


def test_tp_across_hosts() -> None:
    hosts = block([4, 2])
    sizes = resolve({"tp": 3}, hosts, tp_across_hosts=True)
    assert Layout(sizes, tuple(hosts)).groups("tp") == [(0, 1, 2), (3, 4, 5)]


# --- sizes ---


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


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
def test_sizes(requested: str, expected: dict[str, int]) -> None:
    found = resolve(parse_sizes(requested.split()), HOSTS)
    assert list(found.items()) == list(expected.items())


@pytest.mark.parametrize(
    ("requested", "hosts_of_ranks", "id", "values"),
    [
        (
            "dp=32 tp=8 pp=2",
            HOSTS[:256],
            "needs",
            [
                "dp=32 tp=8 pp=2 ",
                "512 GPUs",
                "32 hosts × 8 GPUs = 256",
                "; dp=16 tp=8 pp=2 fits.",
            ],
        ),
        (
            "dp=32 tp=8",
            HOSTS,
            "needs",
            ["dp=32 tp=8 ", "256 GPUs", "64 hosts × 8 GPUs = 512", "; dp=64 tp=8 fits."],
        ),
        (
            "dp=64 tp=6",
            HOSTS,
            ";",
            ["tp=6 ", "hosts of 8 GPUs", "; dp=64 tp=8 fits."],
        ),
        (
            "tp=6 pp=3",
            HOSTS[:16],
            ";",
            ["tp=6 ", "hosts of 8 GPUs", "; tp=8 pp=2 dp=1 fits."],
        ),
        ("tp=16", HOSTS, ";", ["tp=16 ", "hosts of 8 GPUs", "; tp=8 dp=64 fits."]),
        (
            "tp=4",
            block([4, 2]),
            ";",
            ["tp=4 ", "h1, ", "2 GPUs", "; tp=2 dp=3 fits."],
        ),
        (
            "tp=4",
            block([4, 2, 6]),
            ";",
            ["tp=4 ", "h1, ", "2 GPUs (2 hosts ", "; tp=2 dp=6 fits."],
        ),
        (
            "dp=2 tp=2",
            block([4, 2]),
            "needs",
            ["dp=2 tp=2 ", "4 GPUs", "2 hosts (h0 4, h1 2) = 6", "; dp=3 tp=2 fits."],
        ),
        (
            "pp=3 dp=-1",
            HOSTS,
            "needs",
            [
                "pp=3 dp=-1 ",
                "a multiple of 3 GPUs",
                "64 hosts × 8 GPUs = 512",
                "; pp=4 dp=128 fits.",
            ],
        ),
        (
            "tp=-1",
            HOSTS,
            "leaves tp=",
            ["tp=-1 ", "tp=512", "64 hosts × 8 GPUs = 512", "; tp=8 dp=64 fits."],
        ),
        ("dp=-1 tp=-1", HOSTS, "only one", ["-1", "dp and tp"]),
        (
            "pp=999999999 dp=999999999 tp=8",
            HOSTS,
            "needs",
            [
                "pp=999999999 dp=999999999 tp=8 ",
                "7999999984000000008 GPUs",
                "64 hosts × 8 GPUs = 512",
                "; pp=64 dp=1 tp=8 fits.",
            ],
        ),
    ],
)
def test_sizes_that_do_not_fit(
    requested: str, hosts_of_ranks: list[str], id: str, values: list[str]
) -> None:
    said = refusal(lambda: resolve(parse_sizes(requested.split()), hosts_of_ranks))
    assert re.fullmatch(error(id, *values), said), said


@pytest.mark.parametrize(
    ("requested", "layers", "id", "values"),
    [
        ("pp=16", 4, "some stages", ["pp=16 ", "--layers 4: ", "; pp=4 dp=128 fits."]),
        (
            "pp=-1 dp=4 tp=8",
            12,
            "some stages",
            ["pp=-1 dp=4 tp=8 ", "pp=16", "--layers 12: ", "; pp=8 dp=8 tp=8 fits."],
        ),
        (
            "pp=5 tp=8",
            3,
            "needs",
            [
                "pp=5 tp=8 ",
                "a multiple of 40 GPUs",
                "64 hosts × 8 GPUs = 512",
                "; pp=2 tp=8 dp=32 fits.",
            ],
        ),
    ],
)
def test_more_stages_than_layers(requested: str, layers: int, id: str, values: list[str]) -> None:
    said = refusal(lambda: resolve(parse_sizes(requested.split()), HOSTS, layers=layers))
    assert re.fullmatch(error(id, *values), said), said


@FIXED
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=5),
    st.dictionaries(
        st.sampled_from(["pp", "dp", "dp_shard", "cp", "tp"]),
        st.integers(-1, 20).filter(bool),
        max_size=4,
    ),
    st.integers(0, 6),
)
def test_the_nearest_sizes_fit(counts: list[int], requested: dict[str, int], layers: int) -> None:
    hosts = block(counts)
    try:
        assert math.prod(resolve(requested, hosts, layers=layers).values()) == len(hosts)
        return
    except UserError as refused:
        sentence = str(refused)
    if whole := re.search(r"; ((?:[a-z_]+=[0-9]+ ?)+) fits\.$", sentence):
        sizes = resolve(parse_sizes(whole[1].split()), hosts, layers=layers)
        check(Layout(sizes, tuple(hosts)))
    else:
        assert re.fullmatch(error("only one", "-1"), sentence)


NAMES = "pp, dp_replicate, dp, dp_shard, ep, cp, tp."


@pytest.mark.parametrize(
    ("text", "id", "values"),
    [
        ("tp", "dimension and", ['"tp"', "dp=32 tp=8 pp=2"]),
        ("=8", "dimension and", ['"=8"', "dp=32 tp=8 pp=2"]),
        ("dp_shards=8", "a dimension", ['"dp_shards"', '"dp_shard"?', NAMES]),
        ("width=8", "a dimension", ['"width"', NAMES]),
        ("tp=8 tp=4", "given twice", ["tp ", "tp=8 ", "tp=4"]),
        ("tp=0", "for what", ["tp=0: ", "1 or more", "-1 "]),
        ("tp=-2", "for what", ["tp=-2: ", "1 or more", "-1 "]),
        ("tp=two", "for what", ["tp=two: ", "1 or more", "-1 "]),
        (
            "tp=9999999999",
            "for what",
            ["tp=9999999999: ", "1 or more", "less than 1000000000", "-1 "],
        ),
    ],
)
def test_bad_sizes(text: str, id: str, values: list[str]) -> None:
    assert re.fullmatch(error(id, *values), refusal(lambda: parse_sizes(text.split())))


@pytest.mark.parametrize(
    ("size", "id", "shown"),
    [
        (0, "expected", "tp=0: "),
        (-2, "expected", "tp=-2: "),
        (True, "whole number", "tp=True: "),
        (1.0, "whole number", "tp=1.0: "),
        ("2", "whole number", "tp='2': "),
        (None, "whole number", "tp=None: "),
        pytest.param(10**5000, "expected", "tp=10^5000: ", id="huge"),
    ],
)
def test_bad_sizes_of_a_script(size: object, id: str, shown: str) -> None:
    said = refusal(lambda: check_sizes({"tp": size}))
    assert said.startswith(shown)
    assert re.fullmatch(error(id, "1 to 999999999, or -1"), said), said


def test_an_unknown_name_of_a_script() -> None:
    said = refusal(lambda: check_sizes({"tensor": 2}))
    assert re.fullmatch(error("a dimension", '"tensor"', NAMES), said), said


# --- traffic ---

GPT = Training(params=7e9, layers=32, hidden=4096, seq=4096, micro_batches=16)


def of(layout: Layout, training: Training) -> dict[str, tuple[float, float]]:
    return {
        each.dimension: (each.most_inside, each.most_network) for each in traffic(layout, training)
    }


def test_the_traffic_of_64_hosts() -> None:
    """By hand, from the formulas of docs/parallelism.md."""
    layout = Layout({"pp": 2, "dp": 32, "tp": 8}, tuple(HOSTS))
    found = of(layout, GPT)
    activations = 4096 * 4096 * 2  # one sample in bf16
    assert found["tp"] == (pytest.approx(4 * (2 * 7 / 8) * activations * 16 * 16), 0)
    gradients = 7e9 * 2 / 16
    assert found["dp"] == (0, pytest.approx(8 * 2 * 31 / 32 * gradients))
    assert found["pp"] == (0, pytest.approx(8 * activations * 16))


def test_a_ring_crosses_each_hosts_network_once() -> None:
    """Two hosts of two GPUs, all of them in one group: in each host one GPU sends inside, one outside."""
    (sent,) = traffic(Layout({"dp": 4}, tuple(block([2, 2]))), Training(params=100, value_bytes=4))
    volume = 2 * 3 / 4 * 400
    assert sent.inside == {0: volume, 2: volume}
    assert sent.network == {"h0": volume, "h1": volume}


def test_a_stage_between_two_others_sends_both_ways() -> None:
    training = Training(layers=3, hidden=10, seq=10, micro_batches=2)
    (sent,) = traffic(Layout({"pp": 3}, tuple(block([1, 1, 1]))), training)
    assert sent.network == {"h0": 400, "h1": 800, "h2": 400}


def test_sharded_data_parallelism() -> None:
    training = Training(params=800, value_bytes=2, micro_batches=2)
    layout = Layout({"dp_replicate": 2, "dp_shard": 4}, tuple(block([4, 4])))
    found = of(layout, training)
    assert found["dp_shard"] == (pytest.approx(2 * 3 * 3 / 4 * 1600), 0)
    assert found["dp_replicate"] == (0, pytest.approx(4 * 2 * (2 * 1 / 2) * 1600 / 4))
    everything = Layout({"dp": 8}, tuple(block([4, 4])))
    plain = of(everything, Training(params=800))["dp"]
    sharded = of(everything, Training(params=800, fsdp=True))["dp"]
    assert [later / first for later, first in zip(sharded, plain, strict=True)] == pytest.approx(
        [1.5] * 2
    )


# --- text ---


def test_compact() -> None:
    assert compact(range(8)) == "0-7"
    assert compact(range(0, 256, 8)) == "0-248:8"
    assert compact([0, 1, 2, 8, 9, 10]) == "0-2,8-10"
    assert compact([5]) == "5"
    assert compact([0, 256]) == "0,256"
    assert compact([4, 1]) == "4,1"
    assert compact([2**each for each in range(10)]) == "1,2,4,8,…,512 (10 ranks)"
    assert shortened(list("abcde")) == list("abcde")
    assert shortened(list("abcdef")) == ["a", "b", "c", "…", "f"]
    assert shortened(list("abcdef"), all_entries=True) == list("abcdef")


def test_bytes() -> None:
    numbers = (0, 7, 999, 1000, 99_949, 999_600, 1.7e9, 17.85e9, 123e12, 5e21)
    expected = "0, 7 B, 999 B, 1.00 kB, 99.9 kB, 1.00 MB, 1.70 GB, 17.9 GB, 123 TB, 5,000 EB"
    assert ", ".join(map(bytes_text, numbers)) == expected


# --- mpiddp mesh ---


def run(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert main.main(line.split()) == 0
    return capsys.readouterr().out


BIG = "--hosts 64 --gpus 8 dp=32 tp=8 pp=2"
MODEL = "--params 7B --layers 32 --hidden 4096 --seq 4096 --micro-batches 16"


def test_512_gpus_fit_on_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, f"{BIG} {MODEL}")
    assert shown.startswith("64 hosts × 8 GPUs = 512 ranks: pp=2 dp=32 tp=8\n")
    assert len(shown.splitlines()) < 26
    assert max(map(len, shown.splitlines())) <= 110
    for piece in (
        "host1   8-15     0   1   0-7",
        "host63  504-511  1   31  0-7",
        "tp: 64 groups of 8 ranks, each inside 1 host\n  0-7  8-15  16-23  …  504-511",
        "dp: 16 groups of 32 ranks, each over 32 hosts\n  0-248:8  1-249:8  2-250:8  …  263-511:8",
        "pp: 256 groups of 2 ranks, each over 2 hosts\n  0,256  1,257  2,258  …  255,511",
        "One step is 16 micro-batches of 1 sample of 4,096 tokens; 7,000,000,000 parameters",
    ):
        assert piece in shown, shown
    sent = shown.partition("sent in one step")[2].splitlines()[1:5]
    assert [line.split()[:5] for line in sent] == [
        ["tp", "60.1", "GB", "0", "all-reduce"],
        ["dp", "0", "13.6", "GB", "all-reduce"],
        ["pp", "0", "4.29", "GB", "activations"],
        ["all", "60.1", "GB", "17.9", "GB"],
    ]


def test_all_groups(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, f"{BIG} --all").splitlines()
    assert len([line for line in lines if line.startswith("host")]) == 1 + 64
    assert len([line for line in lines if line.startswith("  ")]) == 64 + 16 + 256


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, f"{BIG} --params 7e9 --json"))
    assert found["mesh"] == {"pp": 2, "dp": 32, "tp": 8}
    assert sum(found["hosts"].values()) == 512
    assert sorted(chain(*found["dimensions"]["dp"]["groups"])) == list(range(512))
    assert found["dimensions"]["dp"]["network_bytes_per_host"] == pytest.approx(13.5625e9)
    assert "network_bytes_per_host" not in found["dimensions"]["tp"]
    assert set(found["network_bytes_by_host"]) == set(found["hosts"])


def test_the_traffic_of_each_gpu_and_host(capsys: pytest.CaptureFixture[str]) -> None:
    """One ring over both hosts: in each host, one GPU sends over the network and the others inside."""
    line = "-H node1:4,node2:2 dp=6 --params 1.2e9"
    found = json.loads(run(capsys, f"{line} --json"))
    assert found["inside_bytes_by_gpu"] == pytest.approx([4e9, 4e9, 4e9, 0, 4e9, 0])
    assert found["network_bytes_by_host"] == pytest.approx({"node1": 4e9, "node2": 4e9})
    rows = [re.split("  +", row) for row in run(capsys, f"{line} --all").splitlines()[2:5]]
    assert rows == [
        ["host", "ranks", "dp", "NVLink, per GPU", "network, per host"],
        ["node1", "0-3", "0-3", "0 to 4.00 GB", "4.00 GB"],
        ["node2", "4,5", "4,5", "0 to 4.00 GB", "4.00 GB"],
    ]


def test_named_hosts_with_unequal_slots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("node1 slots=4\nnode2 slots=2\nnode3 slots=0\n")
    shown = run(capsys, f"--hostfile {file} tp=2")
    assert shown == run(capsys, "-H node1:4,node2:2 tp=2")
    assert shown.startswith("2 hosts (node1 4, node2 2) = 6 ranks: dp=3 tp=2\n")
    assert "node2  4,5    2    0,1" in shown
    assert "dp: 2 groups of 3 ranks, each over 2 hosts\n  0-4:2  1-5:2" in shown


def test_gpus_of_hosts_without_a_slot_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "-H a,b --gpus 4 tp=4") == run(capsys, "-H a:4,b:4 tp=4")


def test_the_hosts_of_an_allocation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_TASKS_PER_NODE": "4(x2)",
        "SLURM_NTASKS": "8",
    }.items():
        monkeypatch.setenv(name, value)
    assert run(capsys, "tp=4") == run(capsys, "-H n1:4,n2:4 tp=4")


def test_what_is_missing_for_a_figure(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, "--hosts 2 tp=4 cp=2 --params 1e9")
    assert "all-reduce of activations: add --layers, --hidden and --seq" in shown
    assert re.search(r"cp +no estimate +no estimate  exchange of keys and values", shown)
