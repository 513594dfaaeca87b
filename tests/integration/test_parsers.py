"""Whatever strangers write, a parser returns or raises its documented error, within bounded time and memory.

Strangers are people with their hostfiles, schedulers, processes that connect to a port, and damaged disks.
What only mpiddp itself writes is not tried.

python -m pytest tests/integration/test_parsers.py --hypothesis-profile=long     # for some minutes
"""

import io
import json
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from mpiddp.checkpoints import folders
from mpiddp.checkpoints.folders import BrokenCheckpoint
from mpiddp.checkpoints.tensor_files import DAMAGE, read_saved, read_tensors
from mpiddp.errors import UserError
from mpiddp.hosts.allocations import SCHEDULERS, expand_counts, find_allocation
from mpiddp.hosts.hostfile import parse_host_list, parse_hostfile
from mpiddp.hosts.names import expand_nodelist
from mpiddp.launch.plan.environment import parse_env_file
from mpiddp.protocol.channel import MESSAGES, is_valid
from mpiddp.world import RANK_SOURCES, World, likely_ranks

LONG = 20_000  # repeats: a parser whose time grows with the square of the length takes minutes
MAX_S, MAX_BYTES = 5.0, 256 << 20  # of processor time and of memory, for one input


@dataclass(frozen=True)
class Parser:
    """A parser, a strategy for its inputs, and the errors that it documents."""

    parse: Callable[[Any], object]
    inputs: SearchStrategy[Any]
    errors: tuple[type[BaseException], ...] = ()

    def check(self, text: object) -> None:
        """Parse. Raises what the parser does not document, and AssertionError if it takes too much."""
        began, before = time.process_time(), _peak_bytes()
        error: BaseException | None = None
        try:
            self.parse(text)
        except self.errors as caught:
            error = caught
        assert "Exceeds the limit" not in str(error)  # int()'s own ValueError
        assert time.process_time() - began < MAX_S
        assert _peak_bytes() - before < MAX_BYTES


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# --- inputs ---

NUMBERS = st.sampled_from(["0", "1", "-1", "007", "²", "1e9", "nan", "1.5", "65536", "9" * 5000])
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([10**400, "", "..", "/etc/passwd", "a\0b", "\ud800", "x" * 300])
)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
NO_JSON = st.sampled_from([b"", b"{", b"[" * 100_000, b"1" * 5000, b"1e999", b"\xff\xfe", b"\0"])


def text_of(*tokens: str) -> SearchStrategy[str]:
    """Any text, and texts that look like the parser's own because they consist of `tokens`."""
    piece = st.sampled_from(tokens) | NUMBERS | st.text(max_size=3)
    return st.lists(piece, max_size=12).map("".join)


def bytes_of(*tokens: str) -> SearchStrategy[bytes]:
    encoded = text_of(*tokens).map(lambda text: text.encode(errors="surrogatepass"))
    return encoded | st.binary(max_size=40)


def json_like(sample: object) -> SearchStrategy[bytes]:
    """Encoded JSON: `sample` with some of its parts replaced or missing, any other JSON, and no JSON."""
    return (_changed(sample) | JSON).map(lambda value: json.dumps(value).encode()) | NO_JSON


def _changed(sample: object) -> SearchStrategy[object]:
    if isinstance(sample, dict):
        parts = {key: _changed(value) | st.just(...) for key, value in sample.items()}
        return st.fixed_dictionaries(parts).map(
            lambda facts: {key: value for key, value in facts.items() if value is not ...}
        )
    return st.just(sample) | JSON


def damaged(content: bytes) -> SearchStrategy[bytes]:
    """`content` with a few bytes changed, cut or inserted."""

    def changed(at: int, cut: int, new: bytes) -> bytes:
        return content[:at] + new + content[at + cut :]

    return st.builds(
        changed, st.integers(0, len(content)), st.integers(0, 3), st.binary(max_size=3)
    )


def variables(names: list[str], *tokens: str) -> SearchStrategy[dict[str, str]]:
    # No variable has a NUL, or a character that is not from a byte.
    value = text_of(*tokens).map(lambda text: text.replace("\0", "").encode("utf-8", "ignore"))
    return st.dictionaries(st.sampled_from(names), value.map(bytes.decode))


# --- what is parsed ---


def use_hostfile(data: bytes) -> None:
    parse_hostfile(data, "hosts")


def use_message(line: bytes) -> None:
    try:
        facts = json.loads(line)
    except (ValueError, RecursionError):  # which the server drops
        return
    kind = facts.pop("type")
    assert isinstance(kind, str) or MESSAGES[kind]
    is_valid(kind, facts)


def verify(content: bytes) -> None:
    """A manifest whose own SHA-256 is right."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root, "step_00000001")
        folder.mkdir()
        (folder / "a.pt").write_bytes(b"12")
        (folder / folders.MANIFEST).write_bytes(content)
        (folder / folders.COMPLETE).write_text(sha256(content).hexdigest())
        folders.verify(folder)


def list_shards(content: bytes) -> None:
    """An index of shards in a checkpoint that is complete."""
    with tempfile.TemporaryDirectory() as root:
        new = folders.NewFolder(Path(root, "step_00000001"))
        new.path.mkdir()
        (new.path / folders.INDEX).write_bytes(content)
        new.seal({})
        new.publish()
        folders.list_files(new.final)


def in_a_file(read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def parse(content: bytes) -> object:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "state.pt")
            path.write_bytes(content)
            return read(path)

    return parse


def use_world(env: dict[str, str]) -> None:
    assert min(likely_ranks(env)) >= 0
    world = World.from_env(env)
    assert 0 <= world.rank < world.world_size


def saved_tensors() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(2), "b": [1, "c"]}, buffer)
    return buffer.getvalue()


HEADER = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
SAFETENSORS = len(HEADER).to_bytes(8, "little") + HEADER + bytes(8)
HOSTS = ("node1", "a.x", "10.0.0.1", "[fd00::1]", "joe@", " ", "\t", "\n", ":", ",", "#", "\r\n")
KEYS = ("slots=", "gpus=", "0,2", "max_slots=", "port=", "user=", " = ", "all.q@n1", "UNDEFINED")
GRANTED = ("10.0.0.4", "node-1", "-oProxyCommand=x", " ", "\n", ",", "4", "n[1-2]", "/dev/null")
# Without FLUX_URI, which starts a program.
SCHEDULED = sorted({name for row in SCHEDULERS for name in row.proof} - {"FLUX_URI"})
LAUNCHED = sorted({name for row in RANK_SOURCES for name in (*row.variables, *row.proof)})
A_FILE = {"bytes": 2, "sha256": sha256(b"12").hexdigest()}
CHUNK = {"offsets": [0], "sizes": [4], "rank": 0}
SHARDS = {
    "tensors": {'["model", "a"]': {"shape": [4], "dtype": "float32", "chunks": [CHUNK]}},
    "files": {"shard_00000.pt": A_FILE},
}
MESSAGE = {"type": next(iter(MESSAGES)), **dict.fromkeys(next(iter(MESSAGES.values())), 1)}
NO_MESSAGE = (LookupError, TypeError, AttributeError)

PARSERS: dict[str, Parser] = {
    "hostfile": Parser(use_hostfile, bytes_of(*HOSTS, *KEYS), (UserError,)),
    "-H": Parser(parse_host_list, text_of(*HOSTS), (UserError,)),
    "--env-file": Parser(
        lambda data: tuple(parse_env_file(data, "f", {"HOME": "/"})),
        bytes_of("A=", "HOME", "export ", "#", "'", '"', "\\", "${", "\n", "\r"),
        (UserError,),
    ),
    "nodelist": Parser(expand_nodelist, text_of("n", "[", "]", "-", ",", "[1-9]"), (ValueError,)),
    "counts": Parser(expand_counts, text_of("2", "(x", ")", ",", "2(x3)"), (ValueError,)),
    "allocation": Parser(find_allocation, variables(SCHEDULED, *GRANTED), (UserError,)),
    "launcher's variables": Parser(use_world, variables(LAUNCHED, "0", "2(x3)"), (UserError,)),
    "message to the launcher": Parser(use_message, json_like(MESSAGE), NO_MESSAGE),
    "manifest.json": Parser(verify, json_like({"a.pt": A_FILE}), (BrokenCheckpoint,)),
    "shards.json": Parser(list_shards, json_like(SHARDS), (BrokenCheckpoint,)),
    "tree.pt": Parser(in_a_file(read_saved), damaged(saved_tensors()), (UserError,)),
    "tensors": Parser(in_a_file(read_tensors), damaged(SAFETENSORS), DAMAGE),
}


@pytest.mark.parametrize("name", PARSERS)
def test_any_text_gives_a_value_or_the_documented_error(name):
    @given(PARSERS[name].inputs)
    def check(text: object) -> None:
        PARSERS[name].check(text)

    check()


@pytest.mark.parametrize("name", ["hostfile", "-H", "--env-file", "nodelist", "counts"])
def test_a_long_text_takes_little_time(name):
    is_bytes = name in ("hostfile", "--env-file")
    for unit in ("1", " ", ":", "[", "a,", "[1],", "\n", "=", "0.", "a:1 \n", "{", '"'):
        for end in ("", "x"):
            text = unit * LONG + end
            PARSERS[name].check(text.encode() if is_bytes else text)
