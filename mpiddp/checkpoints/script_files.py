"""The files of a script's checkpoint.

state.pt     the state that the script has saved
ranks.pt     each rank's RNG states, and what the script saves for each rank
state.json   the step, the number of ranks, and the script's configuration

If the state has DTensors, replicated.pt has the rest of it in place of state.pt, see
`mpiddp.checkpoints.shards`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.contents import read_state, read_tensors
from mpiddp.checkpoints.saved import Saved
from mpiddp.checkpoints.shards.index import INDEX
from mpiddp.checkpoints.tensor_file import write_tensors
from mpiddp.errors import UserError

WRITTEN_BY = "mpiddp.Checkpoints"
_STATE, _REPLICATED = "state", "replicated"


@dataclass(frozen=True)
class ScriptState:
    """The part of a checkpoint that all ranks share, tensors on the CPU."""

    step: int
    state: dict[str, Any]


def write_files(
    folder: Path, saved: Saved[ScriptState], config: Mapping[str, Any]
) -> dict[str, str]:
    """Write the files of a checkpoint and return the SHA-256 of the large ones, by name.

    Raises:
        OSError: a file cannot be written, for example because the disk is full.
    """
    name = _REPLICATED if saved.is_sharded else _STATE
    hashes = write_tensors(folder, {name: saved.common.state, "ranks": list(saved.ranks)})
    facts = {
        "written_by": WRITTEN_BY,
        "step": saved.common.step,
        "world_size": len(saved.ranks),
        "config": config,
    }
    (folder / "state.json").write_text(json.dumps(facts, indent=1))
    return hashes


def read(folder: Path, config: Mapping[str, Any]) -> Saved[ScriptState]:
    """Read the contents of a verified checkpoint.

    Raises:
        UserError: another program has written it, or it was made with another configuration.
        JobFailed: a disk has failed.
    """
    facts = _read_facts(folder)
    saved_config = facts["config"]
    names = sorted(saved_config.keys() | config.keys())
    different = [
        f"{name} {saved_config.get(name)!r}, now {config.get(name)!r}"
        for name in names
        if saved_config.get(name) != config.get(name)
    ]
    if different:
        raise UserError(
            f"{folder} was made with another config: {'; '.join(different)}. "
            "Use the same config, or name another folder."
        )
    is_sharded = (folder / INDEX).exists()
    name = _REPLICATED if is_sharded else _STATE
    state, ranks = (
        read_tensors(folder, f"{each}.pt", writer=WRITTEN_BY) for each in (name, "ranks")
    )
    fits = isinstance(state, dict) and isinstance(ranks, list) and all(map(_is_rank, ranks))
    if not fits:
        raise UserError(f"{folder} was not written by {WRITTEN_BY}: it has other contents.")
    return Saved(ScriptState(facts["step"], state), ranks, is_sharded)


def _is_rank(contents: object) -> bool:
    return isinstance(contents, dict) and all(
        isinstance(contents.get(name), dict) for name in ("rng", "state")
    )


def _read_facts(folder: Path) -> dict[str, Any]:
    """The contents of state.json. Raises UserError if another program wrote it, JobFailed for a disk."""
    facts = read_state(folder)
    is_ours = facts.get("written_by") == WRITTEN_BY and isinstance(facts.get("config"), dict)
    step = facts.get("step")
    if is_ours and type(step) is int and 0 <= step < 1 << 53:
        return facts
    is_of_train = "progress" in facts
    reason = "mpiddp train wrote it" if is_of_train else "its state.json is missing or foreign"
    raise UserError(f"{folder} is not a checkpoint of {WRITTEN_BY}: {reason}. Name another folder.")
