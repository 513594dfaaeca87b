"""`mpiddp checkpoints export FOLDER OUT`: a checkpoint as a whole one, with every tensor in one piece.

    runs/a/checkpoints/step_00001000/          whole/
        shard_00000.pt, shard_00001.pt, …          model.pt, optimizer.pt, …
        model.pt, optimizer.pt, shards.json   ─►   ranks.pt, state.json
        ranks.pt, state.json

Both are complete checkpoints with a manifest, and a run resumes from either. `torch.load("whole/model.pt")`
is a plain state_dict.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpiddp.checkpoints import directory, shard_index
from mpiddp.checkpoints.directory import BrokenCheckpoint, UnreadableCheckpoint
from mpiddp.checkpoints.read import read
from mpiddp.checkpoints.save import Saved, write_files
from mpiddp.checkpoints.shard_index import INDEX
from mpiddp.checkpoints.shards import with_tensors
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of


def export(folder: Path, out: Path) -> list[str]:
    """Write the checkpoint in `folder` as a whole one to `out`, and return the names of its entries.

    Raises:
        UserError: no intact checkpoint there, a file of shards is on another host, `out` exists.
        JobFailed: a disk has failed.
    """
    if out.exists():
        raise UserError(f"{out} exists already. Name a new folder.")
    try:
        files = directory.listed(folder)
        directory.verify(folder)
        lacking = shard_index.inventory(folder).missing if INDEX in files else ()
    except UnreadableCheckpoint as error:
        raise JobFailed(f"{folder}: {error}.") from None
    except BrokenCheckpoint as error:
        raise UserError(f"{folder}: {error}.") from None
    if lacking:
        raise UserError(
            f"{folder} lacks {lacking[0]}: each host keeps the shards of two hosts. Copy the shards of the "
            "others here, or resume the run on its hosts."
        )
    contents = read({name: folder / name for name in files})
    state: dict[str, Any] = with_tensors(contents.state, lambda _: None)
    saved = Saved(contents.step, state, contents.ranks, contents.config)
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        directory.write_folder(out.absolute(), lambda new: write_files(new, saved))
    except OSError as error:
        raise cause_of(error)(f"{out} cannot be written: {error.strerror}.") from None
    return list(state)
