"""Read the checkpoints of earlier versions. Only this file knows their forms: delete it one day.

of mpiddp train      model.pt, trainer.pt    or shards with replicated.pt, which has both
of a script          state.pt                or shards with replicated.pt
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.shards import ShardFiles
from mpiddp.checkpoints.state import read_tensors


def read(
    facts: dict[str, Any], files: Mapping[str, Path], shards: ShardFiles | None
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """The facts, the state and the ranks, as `contents.read` finds them in a checkpoint of this version.

    Raises:
        LookupError, TypeError, AttributeError: no version has written it.
        JobFailed: a disk has failed.
    """
    ranks = read_tensors(files["ranks.pt"])
    if "progress" in facts:
        return _of_train(facts, files, shards, ranks)
    state = {"state": read_tensors(files["replicated.pt" if shards else "state.pt"])}
    state = shards.as_values(state) if shards else state
    return facts, state["state"], ranks


def _of_train(
    facts: dict[str, Any], files: Mapping[str, Path], shards: ShardFiles | None, ranks: Any
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    if shards:
        old = shards.as_values(read_tensors(files["replicated.pt"]))
    else:
        old = {name: read_tensors(files[f"{name}.pt"]) for name in ("model", "trainer")}
    progress = facts["progress"]
    state = {
        "model": old["model"],
        "optimizer": old["trainer"]["optimizer"],
        "scaler": old["trainer"]["scaler"],
        "training": {
            "epoch": progress["epoch"],
            "position": progress["position"],
            "options": facts["config"],
            "data": facts.get("data"),  # 0.1.0 did not write it
        },
    }
    own = [{"rng": _generators(rank), "state": {"buffers": rank["buffers"]}} for rank in ranks]
    return {"step": progress["step"], "config": {"program": "mpiddp train"}}, state, own


def _generators(rank: dict[str, Any]) -> dict[str, Any]:
    """The states of `contents.rng_states`. Only the CPU's and the rank's own GPU were saved."""
    states = {"torch": rank["cpu_rng"]}
    if "device_rng" in rank:
        states["own_gpu"] = rank["device_rng"]
    return states
