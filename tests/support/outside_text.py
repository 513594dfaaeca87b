"""Every parser of text from outside, with the errors that it documents and inputs to try.

Whatever the text, a parser returns or raises one of these errors, within bounded time and memory.
tests/integration/test_parsers.py tries 60 inputs of each, and 20,000 with --hypothesis-profile=long.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.strategies import SearchStrategy

from mpiddp.bench.options import counts, size_bytes
from mpiddp.checkpoints import contents, directory
from mpiddp.checkpoints.directory import BrokenCheckpoint
from mpiddp.checkpoints.run import _Record
from mpiddp.checkpoints.run_dir import _step_of
from mpiddp.checkpoints.shards import read_index
from mpiddp.checkpoints.state import Unreadable, load_tensors
from mpiddp.errors import UserError
from mpiddp.hosts import formats, gpus, history
from mpiddp.hosts.hostfile import Host, Hosts, parse_host_list, parse_hostfile
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.main import table
from mpiddp.hosts.schedulers import SCHEDULERS, find_allocation
from mpiddp.hosts.slurm import expand_counts, expand_nodelist
from mpiddp.hosts.sockets import port_in
from mpiddp.hosts.ssh import Answer
from mpiddp.launch import plan, preflight
from mpiddp.launch.env_file import parse_env_file
from mpiddp.launch.monitor.ranks import Ranks
from mpiddp.launch.options import parse_mpi_args, parse_options
from mpiddp.launch.starters import environment
from mpiddp.launch.starters.table import STARTERS, check_mpi_args
from mpiddp.launch.supervise.verdict import History, MpirunEnd, verdict
from mpiddp.meshes import main as meshes
from mpiddp.meshes.dimensions import parse_sizes
from mpiddp.protocol.messages import MESSAGES, is_valid, recorded_error
from mpiddp.protocol.server import Message
from mpiddp.protocol.variables import ANNOUNCED
from mpiddp.runtime import reports as announcement
from mpiddp.runtime.gpu import parse_cores
from mpiddp.runtime.rendezvous.address import slurm_address
from mpiddp.runtime.rendezvous.placement import expected_hosts
from mpiddp.text import parse_duration, parse_interval, parse_whole
from mpiddp.train import options
from mpiddp.train.metrics import Summary, read_summary
from mpiddp.world import RANK_SOURCES, World, likely_ranks

# Its default is .hypothesis in the checkout.
set_hypothesis_home_dir(Path(tempfile.gettempdir(), f"mpiddp-hypothesis-{os.getuid()}"))

MAX_S, MAX_BYTES = 5.0, 256 << 20  # of processor time and of memory, for one input


@dataclass(frozen=True)
class Parser:
    """A parser, the errors that it documents, and a strategy for its inputs."""

    parse: Callable[[Any], object]
    inputs: SearchStrategy[Any]
    errors: tuple[type[BaseException], ...] = ()

    def check(self, text: object) -> None:
        """Parse. Raises whatever the parser does not document, and AssertionError if it takes too much."""
        began, before = time.process_time(), _peak_bytes()
        error: BaseException | None = None
        try:
            self.parse(text)
        except self.errors as caught:
            error = caught
        assert "Exceeds the limit" not in str(error)  # int()'s own ValueError
        seconds, grown = time.process_time() - began, _peak_bytes() - before
        assert seconds < MAX_S, f"{seconds:.1f} s"
        assert grown < MAX_BYTES, f"{grown / 1e6:.0f} MB"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# Inputs

NUMBERS = st.sampled_from(
    ["0", "1", "2", "-1", "007", "²", "٣", "1e9", "0x1", "nan", "inf", "1.5", "65536", "4294967295"]
) | st.sampled_from([1, 9, 18, 19, 400, 4301, 5000]).map(lambda digits: "9" * digits)


def text_of(*tokens: str) -> SearchStrategy[str]:
    """Any text, and texts that look like the parser's own because they consist of `tokens`."""
    piece = st.sampled_from(tokens) | NUMBERS | st.text(max_size=3)
    surrogates = st.text(st.characters(), max_size=20)
    return st.lists(piece, max_size=12).map("".join) | surrogates


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 3)
    | st.sampled_from([10**18, 10**400, -(10**30)])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["", ".", "..", "../x", "/etc/passwd", "a\0b", "\ud800", "\udcff", "x" * 300])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
NO_JSON = st.sampled_from(
    [
        b"",
        b"{",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 5000,
        b"1e999",
        b"\xff\xfe",
        b"\0",
    ]
) | st.binary(max_size=40)


def json_like(sample: object) -> SearchStrategy[bytes]:
    """Encoded JSON: `sample` with some of its parts replaced or missing, any other JSON, and no JSON."""
    return (_changed(sample) | JSON).map(lambda value: json.dumps(value).encode()) | NO_JSON


def _changed(sample: object) -> SearchStrategy[object]:
    if isinstance(sample, dict):
        parts = {key: _changed(value) | st.just(...) for key, value in sample.items()}
        more = st.dictionaries(st.text(max_size=5), JSON, max_size=1)
        return st.tuples(st.fixed_dictionaries(parts), more).map(
            lambda both: {
                key: value for key, value in {**both[0], **both[1]}.items() if value is not ...
            }
        )
    if isinstance(sample, list):
        return st.lists(_changed(sample[0]) if sample else JSON, max_size=3) | JSON
    return st.just(sample) | LEAVES | JSON


def environment_of(
    names: Sequence[str], values: SearchStrategy[str]
) -> SearchStrategy[dict[str, str]]:
    return st.dictionaries(st.sampled_from(names), values, max_size=len(names))


# What is parsed


def _in_a_file(read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def parse(content: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "file")
            path.write_bytes(content)
            return read(path)

    return parse


def _use_hostfile(data: bytes) -> None:
    hosts = parse_hostfile(data, "hosts")
    table(hosts)
    assert formats.diff(hosts, hosts) == []
    for form in ("openmpi", "mpich", "slurm"):
        formats.render(hosts, form)


def _use_history(line: bytes) -> None:
    if event := history.parse(line):
        known = history.History((event,))
        assert all(known.record(host).summary for host in known.hosts)


def _use_message(line: bytes) -> None:
    """As the launcher does: a message that is valid can be noted and shown."""
    try:
        facts = json.loads(line)
    except NOT_A_MESSAGE:
        return
    kind = facts.pop("type")
    assert isinstance(kind, str) or MESSAGES[kind]
    if not is_valid(kind, facts):
        return
    state = Ranks(["a", "b"])
    state.note(Message(0, kind, facts, 1.0))
    state.remove_error_files()
    verdict(History(state, MpirunEnd("mpirun", 1)))


def _verify(content: bytes) -> None:
    """A manifest whose own SHA-256 is right, as a crafted one has it."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "step_00000001")
        folder.mkdir()
        (folder / "a.pt").write_bytes(b"12")
        (folder / directory.MANIFEST).write_bytes(content)
        (folder / directory.COMPLETE).write_text(sha256(content).hexdigest())
        directory.is_intact(folder)
        directory.verify(folder)


def _use_shards(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "shards.json")
        path.write_bytes(content)
        read_index(path)


def _read_checkpoint(content: bytes) -> None:
    """A state.json beside files of tensors that fit it."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder, name) for name in ("state.json", "model.pt", "ranks.pt")}
        files["state.json"].write_bytes(content)
        torch.save({}, files["model.pt"])
        torch.save([{"rng": {}, "state": {}}], files["ranks.pt"])
        assert contents.read(files).step < 1 << 63


def _use_owner(content: bytes) -> None:
    if record := _Record.parse(content):
        assert record.sentence
        assert record.is_dead in (True, False, None)


def _options(parse: Callable[[list[str]], object]) -> Callable[[list[str]], object]:
    def quiet(arguments: list[str]) -> object:
        with redirect_stdout(io.StringIO()):  # --help
            return parse(arguments)

    return quiet


def _version(answer: str) -> None:
    for kind in STARTERS:
        if match := kind.version.search(answer):
            assert match[1][0].isdigit()


def _world(env: dict[str, str]) -> None:
    rank, local_rank = likely_ranks(env)
    assert min(rank, local_rank) >= 0
    world = World.from_env(env)
    assert 0 <= world.rank < world.world_size


def _saved_tensors() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(2), "b": [1, "c"]}, buffer)
    return buffer.getvalue()


def _damaged(content: bytes) -> SearchStrategy[bytes]:
    """`content` with a few bytes changed, cut or inserted."""
    change = st.tuples(st.integers(0, len(content)), st.integers(0, 3), st.binary(max_size=3))

    def apply(changes: list[tuple[int, int, bytes]]) -> bytes:
        data = content
        for start, length, new in changes:
            data = data[:start] + new + data[start + length :]
        return data

    return st.lists(change, min_size=1, max_size=4).map(apply) | st.binary(max_size=60)


HOSTS = ("node1", "a.x", "10.0.0.1", "[fd00::1]", "joe@", " ", "\t", "\n", ":", ",", "#", "\r\n")
HOSTFILE = text_of(
    *HOSTS, "slots=", "gpus=", "0,2", "max_slots=", "max-slots=", "port=", "user=", " = "
).map(lambda text: text.encode(errors="surrogatepass")) | st.binary(max_size=40)
LAUNCHER_VARIABLES = sorted({name for row in RANK_SOURCES for name in (*row.variables, *row.proof)})
SLURM = (
    *("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS"),
    *("SLURM_GPUS_ON_NODE", "SLURM_STEP_NODELIST", "SLURM_STEP_ID", "MASTER_PORT", "MASTER_ADDR"),
)
NODE_FILE = text_of("n1", "n2", "N1", "\n", " ", "2", "all.q@n1", "UNDEFINED", "#").map(
    lambda text: text.encode(errors="surrogatepass")
)
GRANTED = (
    "10.0.0.4",
    "node-1",
    "-oProxyCommand=x",
    " ",
    "\n",
    ",",
    ";",
    "4",
    "n[1-2]",
    "/dev/null",
)
# Without FLUX_URI, which starts a program, and the files of others.
ALLOCATION = [
    *sorted({name for row in SCHEDULERS for name in row.proof} - {"FLUX_URI"}),
    *("NHOSTS", "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_NODE_RANK"),
    *("AZ_BATCH_IS_CURRENT_NODE_MASTER", "SLURM_JOB_NODELIST"),
]
NODELIST = text_of("n", "gpu-", "[", "]", "-", ",", "07", "[07-09]", "[1-", "[0-999999999]")
COUNTS = text_of("2", "(x", ")", ",", "1(x999999999)", "2(x3)")
LAUNCH_OPTIONS = (
    *(
        "-n",
        "--npernode",
        "-H",
        "--hostfile",
        "--exclude",
        "--timeout",
        "--max-restarts",
        "-x",
        "-m",
    ),
    *(
        "--min-hosts",
        "--grow",
        "--stop-after",
        "--grace",
        "--hang-timeout",
        "--interface",
        "--",
        "mpiddp",
        "train",
    ),
    *("--bind", "--mpirun", "-v", "--dry-run", "/dev/null", __file__, "x" * 300),
)
TRAIN_OPTIONS = (
    *("--epochs", "--batch-size", "--lr=", "--save-every", "--seed", "--timeout=", "--image-size"),
    *(
        "--arch",
        "resnet18",
        "--out",
        "--use_syn",
        "--compile",
        "--label-smoothing=",
        "--num-workers",
    ),
)
MESH_OPTIONS = (
    *(
        "--hosts",
        "--gpus",
        "-H",
        "--hostfile",
        "--params",
        "--layers",
        "--dtype",
        "--json",
        "--all",
    ),
    *("7e9", "7B", "1e99", "350M", "bf16", "dp=2", "tp=8", "-1", "--", "node1:4"),
)
INTERFACE = Interface("eth0", "10.0.0.1", "10.0.0.0/24")
SUMMARY = dict.fromkeys(Summary.__dataclass_fields__, 1) | {"hosts": {"a": 1}}
FACTS = {
    "written_by": contents.WRITTEN_BY,
    "step": 3,
    "keys": ["model"],
    "world_size": 2,
    "config": {"width": 3},
}
STATE = {"progress": {"step": 1, "epoch": 0, "position": 0}, "config": {"lr": 0.1}, "data": "x"}
MANIFEST = {"a.pt": {"bytes": 2, "sha256": sha256(b"12").hexdigest()}}
SHARDS = {
    "tensors": {
        '["model", "a"]': {
            "shape": [4],
            "dtype": "float32",
            "chunks": [{"offsets": [0], "sizes": [4], "rank": 0}],
        }
    },
    "files": {"shard_00000.pt": {"bytes": 2, "sha256": sha256(b"12").hexdigest()}},
}
OWNER = {"run_id": "a", "host": "b", "machine": "c", "pid": 1, "started": "d"}
PROBE = {
    "has_folder": True,
    "has_daemon": True,
    "has_program": True,
    "mpirun": "x",
    "torch": "2",
    "mpi4py": None,
    "gpus": 1,
}
VALUES: dict[tuple[type, ...], object] = {
    (str,): "a",
    (int,): 1,
    (bool,): True,
    (list,): ["--resume"],
    (int, float): 1.5,
}
SAMPLE_MESSAGES = [
    {"type": kind, **{name: VALUES.get(types) for name, types in fields.items()}}
    for kind, fields in MESSAGES.items()
]
NOT_A_MESSAGE = (ValueError, LookupError, TypeError, AttributeError, RecursionError)

PARSERS: dict[str, Parser] = {
    "hostfile": Parser(_use_hostfile, HOSTFILE, (UserError,)),
    "-H": Parser(parse_host_list, text_of(*HOSTS), (UserError,)),
    "--exclude": Parser(
        lambda text: plan.exclude(Hosts("-H", (Host("a", 1), Host("b", 1))), text),
        text_of("a", "b", ",", " "),
        (UserError,),
    ),
    "-x": Parser(
        lambda each: environment.parse_exports(
            environment.without_values(each, each, {}), {"HOME": "/"}
        ),
        st.lists(text_of("-x", "HOME", "TOKEN", "=", "A", "*", "?"), max_size=4),
        (UserError,),
    ),
    "--env-file": Parser(
        lambda data: tuple(parse_env_file(data, "f", {"HOME": "/"})),
        text_of("A=", "HOME", "export ", "#", "'", '"', "\\", "${", "\n", "\r").map(
            lambda text: text.encode(errors="surrogatepass")
        ),
        (UserError,),
    ),
    "the history of hosts": Parser(
        _use_history,
        _damaged(b'{"at": 1795329022.1, "job": "7", "hosts": ["a"], "failed": {"a": "x"}}'),
        (),
    ),
    "MPIDDP_GPUS": Parser(
        lambda text: gpus.read(text, 0),
        text_of("[", "]", "{", "}", '"CUDA_VISIBLE_DEVICES"', ":", '"0"', "null", ",", "1"),
        (ValueError,),
    ),
    "nvidia-smi's list of GPUs": Parser(
        lambda text: gpus.addresses_by_uuid(text, text),
        text_of(
            *(
                "GPU 0: H200 (UUID: ",
                "  MIG 1g.18gb Device 0: (UUID: ",
                "GPU-1",
                "MIG-1",
                ")",
                "\n",
            ),
            *(", ", "00000000:18:00.0", "GPU-1, FFFFFFFF:9A:00.0\n", " ", "(UUID: "),
        ),
    ),
    "the kernel's list of cores": Parser(
        parse_cores, text_of("0", "-", ",", "12", "9" * 5000, "999999999"), (ValueError,)
    ),
    "--mpi-args": Parser(
        lambda texts: check_mpi_args(STARTERS[0], parse_mpi_args(texts)),
        st.lists(text_of("-", "--mca", "pml", "'", '"', "\\", " ", "=", ":", "n"), max_size=3),
        (UserError,),
    ),
    "whole number": Parser(parse_whole, text_of("1"), (ValueError,)),
    "duration": Parser(parse_duration, text_of("1", ".", "s", "m", "h"), (ValueError,)),
    "interval": Parser(parse_interval, text_of("1", ".", "s", "m", "h"), (ValueError,)),
    "size": Parser(size_bytes, text_of("1", "K", "G", "B"), (argparse.ArgumentTypeError,)),
    "counts of a benchmark": Parser(counts(1), text_of("1", ","), (argparse.ArgumentTypeError,)),
    "launch options": Parser(
        _options(parse_options),
        st.lists(st.sampled_from(LAUNCH_OPTIONS) | text_of("1", "a"), max_size=6),
        (UserError, SystemExit),
    ),
    "train options": Parser(
        _options(options.parse),
        st.lists(st.sampled_from(TRAIN_OPTIONS) | text_of(*TRAIN_OPTIONS), max_size=6),
        (UserError, SystemExit),
    ),
    "mesh options": Parser(
        _options(meshes.parse_options),
        st.lists(st.sampled_from(MESH_OPTIONS) | text_of(*MESH_OPTIONS), max_size=6),
        (UserError, SystemExit),
    ),
    "sizes of a mesh": Parser(
        parse_sizes,
        st.lists(text_of("dp", "tp", "pp", "=", ",", "8", "-1", " "), max_size=4),
        (UserError,),
    ),
    "Slurm's nodelist": Parser(expand_nodelist, NODELIST, (ValueError,)),
    "Slurm's counts": Parser(expand_counts, COUNTS, (ValueError,)),
    "Slurm's allocation": Parser(
        find_allocation, environment_of(SLURM, NODELIST | COUNTS | NUMBERS), (UserError,)
    ),
    "a node file": Parser(_use_hostfile, NODE_FILE, (UserError,)),
    "LSF's counts": Parser(
        lambda text: find_allocation({"LSB_JOBID": "1", "LSB_MCPU_HOSTS": text or " "}),
        text_of("n1", " ", "4", "\t"),
        (UserError,),
    ),
    "an allocation's variables": Parser(
        find_allocation,
        # No variable has a NUL, or a character that is not from a byte.
        environment_of(
            ALLOCATION,
            text_of(*GRANTED).map(
                lambda text: text.replace("\0", "").encode(errors="ignore").decode()
            ),
        ),
        (UserError,),
    ),
    "Slurm's address": Parser(
        lambda env: slurm_address(World(1, 2, 0, 1), env),
        environment_of(SLURM, NODELIST | NUMBERS),
        (UserError,),
    ),
    "a launcher's variables": Parser(
        _world, environment_of(LAUNCHER_VARIABLES, NUMBERS | COUNTS | st.just("0")), (UserError,)
    ),
    "MASTER_PORT": Parser(
        lambda text: port_in({"MASTER_PORT": text}), text_of("29500"), (UserError,)
    ),
    "MPIDDP_PLACEMENT": Parser(expected_hosts, text_of(*HOSTS), (ValueError,)),
    "MPIDDP_ANNOUNCED": Parser(
        lambda text: announcement.announced({ANNOUNCED: text.decode(errors="surrogateescape")}),
        json_like({"global_batch_size": 8, "world_size": 2}),
        (UserError,),
    ),
    "MPIDDP_INTERFACE": Parser(
        INTERFACE.matches, text_of("eth0", "10.0.0.1", "/24", "/", ",", "fd00::", "%")
    ),
    "an MPI's --version": Parser(
        _version,
        text_of("(Open MPI) ", "HYDRA build details: Version: ", "slurm ", "5", ".", "rc1"),
    ),
    "the probe's report": Parser(
        lambda line: preflight._read(Host("a"), Answer(0, line.decode(errors="replace"), "")),
        json_like({**PROBE, "interfaces": [vars(INTERFACE)]}),
    ),
    "a rank's message": Parser(
        _use_message, st.sampled_from(SAMPLE_MESSAGES).flatmap(json_like), NOT_A_MESSAGE
    ),
    "@record's file": Parser(
        _in_a_file(lambda path: recorded_error(str(path))),
        json_like({"message": {"message": "x"}}),
    ),
    "owner.json": Parser(_use_owner, json_like(OWNER)),
    "manifest.json": Parser(_verify, json_like(MANIFEST), (BrokenCheckpoint,)),
    "shards.json": Parser(_use_shards, json_like(SHARDS), (BrokenCheckpoint,)),
    "state.json": Parser(_read_checkpoint, json_like(FACTS), (UserError,)),
    "state.json of 0.1.0": Parser(_read_checkpoint, json_like(STATE), (UserError,)),
    "summary.json": Parser(read_summary, json_like(SUMMARY)),
    "metrics.jsonl": Parser(_step_of, json_like({"step": 3})),
    "tensor file": Parser(_in_a_file(load_tensors), _damaged(_saved_tensors()), (Unreadable,)),
}
