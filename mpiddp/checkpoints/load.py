"""Checkpoints outside of a run: read beside it, read from files of safetensors, and exported."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from mpiddp.checkpoints import folders
from mpiddp.checkpoints.contents import read
from mpiddp.checkpoints.folders import SUFFIX, About, BrokenCheckpoint, Hold, step_of
from mpiddp.checkpoints.place import Place, is_address
from mpiddp.checkpoints.resumed import Resumed
from mpiddp.checkpoints.tensor_files import DAMAGE, read_tensors
from mpiddp.errors import JobFailed, UserError, cause_of, named_by

_MAX_RELISTS = 1000  # a run may remove checkpoints faster than this process can open one


def load(path: str | os.PathLike[str], *, best: bool = False) -> Resumed:
    """Read a checkpoint in any process, beside the run that writes there, for example to evaluate it.

        saved = mpiddp.load("runs/a")
        saved.load_into(model=model)

    Every byte is verified. The run keeps the checkpoint as long as one of the tensors lives. The call changes
    nothing, needs no other rank, and restores no random numbers.

    Args:
        path: the folder of a run, or its address in object storage, of which the newest checkpoint is read; a
            checkpoint; a .safetensors file, or a folder of them, each of which becomes an entry.
        best: of a run, read the best checkpoint, by `best` of its `Checkpoints`.

    Returns:
        The checkpoint, with `per_rank` empty; of another program, with step 0.

    Raises:
        UserError: no verified checkpoint there; `best`, and none has a score.
        JobFailed: a disk has failed, or memory is short.
    """
    is_local = not is_address(path)
    if is_local and (state := _read_safetensors(Path(path))) is not None:
        return Resumed(About(0, {}), state)
    if is_local and Path(path).is_file():
        sentence = f"{path} is neither a checkpoint nor a .safetensors file, and a file of torch.save may run code."
        raise UserError(sentence)
    for _ in range(_MAX_RELISTS):
        with named_by(""):
            place = Place.at(path)
            checkpoints = place.checkpoints
            if best:
                steps = [step_of(folder) for folder in checkpoints]
                if (step := place.wishes().best_step(steps)) is None:
                    raise UserError(f"{path}: no checkpoint has a score: Checkpoints needs best=….")
                checkpoints = [checkpoints[steps.index(step)]]
        problems = []
        for folder in reversed(checkpoints):  # the newest one first
            try:
                with named_by(""):
                    place.fetch(folder)
                held = Hold(folder)
                listing = folders.verify(folder)
                if listing.lacking:
                    raise BrokenCheckpoint(folder, f"{listing.lacking[0]} is on another host")
                return read({name: folder / name for name in listing.here}, held=held)
            except (BrokenCheckpoint, UserError) as error:
                problems.append(error)
            except (FileNotFoundError, BlockingIOError):  # the run removes it just now
                break
        else:
            first = problems[0]
            kind = JobFailed if getattr(first, "is_failure", False) else UserError
            raise kind(f"{first}".rstrip(".") + ".")
    raise JobFailed(f"{path}: its run removes each checkpoint before it can be opened.")


def _read_safetensors(path: Path) -> dict[str, Any] | None:
    """The state of these files; None if there are none. Raises UserError or JobFailed."""
    try:
        files = [path] if path.suffix == SUFFIX else sorted(path.glob(f"*{SUFFIX}"))
        if not files or folders.is_checkpoint(path):
            return None
        return {file.stem: read_tensors(file)[0] for file in files}
    except OSError as error:
        raise cause_of(error)(f"{error.filename or path}: {error.strerror or error}.") from None
    except DAMAGE as error:
        raise UserError(f"{path} is damaged, or no file of safetensors: {error}.") from None


def export(path: str, out: Path, to: str) -> Resumed:
    """Write a checkpoint to the new folder `out`, with every tensor in one piece. Returns the checkpoint.

    "torch" writes a file of torch.save for each entry: `torch.load("out/model.pt")` is a plain state_dict.
    "dcp" writes one for torch.distributed.checkpoint, and "safetensors" one from which a run resumes. Raises
    UserError or JobFailed.
    """
    import torch.distributed.checkpoint as dcp

    from mpiddp.checkpoints.boxes import write_whole
    from mpiddp.checkpoints.fit import placed

    if out.exists():
        raise UserError(f"{out} exists already.", fix="name a new folder")
    saved = load(path)
    state = placed(saved.state, {})
    new = folders.NewFolder(out.absolute())
    try:
        new.path.mkdir(parents=True)
        if to == "dcp":
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
    except OSError as error:
        raise cause_of(error)(f"{out} cannot be written: {error.strerror}.") from None
    finally:
        new.discard()
    return saved
