"""Checkpoints for other programs: every tensor in one piece."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from mpiddp.checkpoints import folder as folders
from mpiddp.checkpoints.boxes import write_whole
from mpiddp.checkpoints.fit import placed
from mpiddp.checkpoints.load import load
from mpiddp.checkpoints.resumed import Resumed
from mpiddp.errors import UserError, cause_of


def export(path: str, out: Path, to: str) -> Resumed:
    """Write a checkpoint to the new folder `out`, with every tensor in one piece. Returns the checkpoint.

    "torch" writes a file of torch.save for each entry: `torch.load("out/model.pt")` is a plain state_dict.
    "dcp" writes one for torch.distributed.checkpoint, and "safetensors" one from which a run resumes. Raises
    UserError or JobFailed.
    """
    if out.exists():
        raise UserError(f"{out} exists already. Name a new folder.")
    saved = load(path)
    state = placed(saved.state, {})
    new = folders.NewFolder(out.absolute())
    try:
        new.path.mkdir(parents=True)
        if to == "dcp":
            import torch.distributed.checkpoint as dcp

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # DCP warns that this is one process
                dcp.save(state, checkpoint_id=new.path, no_dist=True)
        elif to == "torch":
            for key, entry in state.items():
                torch.save(entry, new.path / f"{folders.stem_of(key)}.pt")
        else:
            tree = write_whole(state, new.path)
            torch.save({"state": tree, "ranks": saved._ranks}, new.path / folders.TREE)
            saved.about.write(new.path)
            new.seal({})
        new.publish()
    except BaseException as error:
        new.discard()
        if isinstance(error, OSError):
            raise cause_of(error)(f"{out} cannot be written: {error.strerror}.") from None
        raise
    return saved
