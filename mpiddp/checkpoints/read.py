"""Read a checkpoint whose files are on this host, and have been verified.

model.pt      the entry "model" of the state; each entry has a file of its own
ranks.pt      each rank's random number generators, and what it has saved for itself
state.json    the step, the number of ranks, the entries of the state, and the program's configuration

If the state has sharded tensors, the entries have None in their places, shards.json says which part of them
lies where, and each rank's parts are in a file of shards. Every other checkpoint is whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp.checkpoints import legacy, shard_index
from mpiddp.checkpoints.directory import BrokenCheckpoint
from mpiddp.checkpoints.shard_index import INDEX
from mpiddp.checkpoints.shards import ShardFiles
from mpiddp.checkpoints.state import RANKS, stem_of
from mpiddp.checkpoints.tensor_file import read_tensors
from mpiddp.errors import UserError
from mpiddp.paths import read_error, read_limited

FACTS = "state.json"
WRITTEN_BY = "mpiddp.Checkpoints"
_MAX_FACTS_BYTES = 16 << 20


@dataclass(frozen=True)
class Contents:
    """A checkpoint on this rank. Whole tensors are on the CPU, `ShardedValue`s are still in their files."""

    step: int
    state: dict[str, Any]
    ranks: list[dict[str, Any]]  # the "rng" and the "state" of each rank that saved it
    config: dict[str, Any]


def facts_of(saved_step: int, world_size: int, keys: list[str], config: Mapping[str, Any]) -> str:
    """The contents of state.json."""
    facts = {
        "written_by": WRITTEN_BY,
        "step": saved_step,
        "world_size": world_size,
        "keys": keys,
        "config": config,
    }
    return json.dumps(facts, indent=1)


def read(files: Mapping[str, Path]) -> Contents:
    """Read the files of a checkpoint, given by their names.

    Raises:
        UserError: another program has written them.
        JobFailed: a disk has failed.
    """
    folder = _path(files, FACTS).parent
    facts = _facts(_path(files, FACTS))
    shards = None
    if INDEX in files:
        try:
            shards = ShardFiles(shard_index.read(files[INDEX]), files)
        except BrokenCheckpoint as error:
            raise UserError(f"{folder}: {error}.") from None
        except OSError as error:
            raise read_error(str(files[INDEX]), error) from None
    if "keys" not in facts:
        facts, state, ranks = legacy.read(facts, files, shards)
    else:
        state = {
            key: read_tensors(_path(files, f"{stem_of(key)}.pt")) for key in map(str, facts["keys"])
        }
        state = shards.as_values(state) if shards else state
        ranks = read_tensors(_path(files, f"{RANKS}.pt"))
    try:
        return _checked(facts, state, ranks)
    except (LookupError, TypeError):
        sentence = f"{folder} was not written by mpiddp: its files have other contents."
        raise UserError(sentence) from None


def _path(files: Mapping[str, Path], name: str) -> Path:
    if name not in files:
        folder = next(iter(files.values())).parent if files else Path()
        raise UserError(f"{folder} is not a checkpoint of mpiddp: it has no {name}.")
    return files[name]


def _facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(read_limited(path, _MAX_FACTS_BYTES))
    except OSError as error:
        raise read_error(str(path), error) from None
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or not isinstance(facts.get("keys", []), list):
        raise _foreign(path.parent)
    return facts


def _checked(facts: dict[str, Any], state: Any, ranks: Any) -> Contents:
    """Raises LookupError or TypeError if it was not written by mpiddp."""
    step, config = facts["step"], facts["config"]
    if type(step) is not int or not isinstance(config, dict) or not isinstance(ranks, list):
        raise TypeError
    if not all(isinstance(rank["rng"], dict) and isinstance(rank["state"], dict) for rank in ranks):
        raise TypeError
    return Contents(step, state, ranks, config)


def _foreign(folder: Path) -> UserError:
    return UserError(f"{folder} is not a checkpoint of mpiddp: its {FACTS} is missing or foreign.")
