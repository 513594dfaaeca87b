"""`mpiddp checkpoints`: look after the checkpoints of a run. VERBS has what it can do.

Only `export` needs torch.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from mpiddp.arguments import OneSentenceParser, Option, Verb, add_verbs, whole
from mpiddp.checkpoints import folders
from mpiddp.checkpoints.folders import PINS, REWIND, BrokenCheckpoint, Hold, step_of
from mpiddp.checkpoints.place import Place
from mpiddp.checkpoints.retention import prune
from mpiddp.errors import UserError, named_by, print_error
from mpiddp.text import listed, size_text


def main(argv: list[str]) -> int:
    """Run `mpiddp checkpoints ARGV`. The exit code is 1 if `verify` finds a broken checkpoint, else 0."""
    parser = OneSentenceParser(
        prog="mpiddp checkpoints", description="Look after the checkpoints of a run."
    )
    add_verbs(parser, VERBS)
    options = parser.parse_args(argv)
    with named_by(""):
        return VERBS[options.verb].run(options)


def _held(checkpoints: Iterable[Path]) -> Iterator[Path]:
    """Each checkpoint, which a live run does not remove meanwhile. One that it removes just now is left out."""
    for folder in checkpoints:
        with contextlib.ExitStack() as opened:
            try:
                opened.enter_context(Hold(folder))
            except (FileNotFoundError, BlockingIOError):
                continue
            except BrokenCheckpoint:  # the caller says why
                pass
            yield folder


def _list(options: argparse.Namespace) -> int:
    """Print name, size, time and state of each checkpoint, and what the wishes of its run say of it.

    The state compares sizes only.
    """
    place = Place.at(options.dir)
    wishes, bucket = place.wishes(), place.bucket
    best = wishes.best_step([step_of(folder) for folder in place.checkpoints])
    for folder in place.checkpoints if bucket else _held((*place.checkpoints, *place.aside)):
        if bucket:
            size, written, words = bucket.size_of(folder.name), "", ["whole"]
        else:
            size = sum(path.lstat().st_size for path in folder.iterdir())
            written = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
            is_intact = folders.is_verified(folder, with_hashes=False)
            words = ["intact" if is_intact else "broken"]
        step, is_aside = step_of(folder), folders.is_set_aside(folder)
        words += ["best"] if step == best and not is_aside else []
        words += ["pinned"] if step in wishes.pins else []
        words += ["set aside"] if is_aside else []
        print("  ".join((folder.name, f"{size_text(size):>13}", written, *words)))
    return 0


def _verify(options: argparse.Namespace) -> int:
    place, code = Place.at(options.dir), 0
    for folder in _held(map(place.fetch, place.checkpoints)):
        try:
            missing = folders.verify(folder).lacking
        except BrokenCheckpoint as error:
            print_error(f"{error}.")
            code = 1
        else:
            without = f", without {listed(missing)}: other hosts must have them" if missing else ""
            print(f"checkpoint {folder.name}: verified{without}")
    return code


def _prune(options: argparse.Namespace) -> int:
    """Remove what the run would remove, with another number of newest checkpoints if the user names one."""
    path, place = options.dir, Place.at(options.dir)
    if place.bucket:
        raise UserError(f"{path}: prune expects a local folder: the run prunes its bucket.")
    if place.checkpoints == [Path(path).resolve()]:
        raise UserError(
            f"{path} is one checkpoint. Expected a run's folder or a folder of checkpoints."
        )
    wishes = place.wishes()
    if options.keep is not None:
        wishes = replace(wishes, keep=options.keep)
    if wishes.keep is None:
        raise UserError(
            f"{path} has no {folders.WISHES} of a run, which says how many checkpoints to keep.",
            fix=f"mpiddp checkpoints prune {shlex.quote(path)} --keep N",
        )
    root = place.checkpoints[0].parent
    for folder in prune(root, wishes, is_good=folders.is_verified):
        print(f"checkpoint {folder.name}: removed")
    return 0


def _mark(options: argparse.Namespace) -> int:
    """Pin a checkpoint until the user removes the file, or let the next resume of the run begin there."""
    place = Place.at(options.dir)
    names = [folder.name for folder in place.checkpoints]
    name = folders.name_of_step(options.step)
    if name not in names:
        raise UserError(f"{options.dir} has no {name}. It has: {listed(names)}.")
    if options.verb == "pin":
        done = f"pinned. To unpin it, remove {place.write(f'{PINS}/{name}', '')}"
    else:
        place.write(REWIND, f"{options.step}\n")
        done = "the next resume begins here, on all hosts"
    print(f"checkpoint {name}: {done}")
    return 0


def _export(options: argparse.Namespace) -> int:
    from mpiddp.checkpoints.load import export  # needs torch

    for ending in (signal.SIGTERM, signal.SIGHUP):  # a part of the export must not remain
        if signal.getsignal(ending) is signal.SIG_DFL:  # not under nohup
            signal.signal(ending, lambda number, _: sys.exit(128 + number))
    saved = export(options.dir, Path(options.out), options.to)
    name = folders.name_of_step(saved.step)
    print(
        f"checkpoint {name}: written to {Path(options.out)} as {options.to}, with {listed(list(saved.state))}"
    )
    return 0


_DIR = Option(
    "dir",
    value="DIR",
    help="a run's folder, or one of checkpoints, a checkpoint, or an address of these",
)
_STEP = Option("step", value="STEP", parse=whole(0), help="its step")
_KEEP = Option(
    "--keep",
    value="N",
    parse=whole(1),
    help="number of verified checkpoints (default: as the run does)",
)
_OUT = Option("out", value="OUT", help="a new folder for the checkpoint")
_FORMATS = (
    "torch (files for torch.load, the default), dcp (torch.distributed.checkpoint) or safetensors"
)
_TO = Option("--to", choices=("torch", "dcp", "safetensors"), default="torch", help=_FORMATS)
_WHOLE = "Write a checkpoint with every tensor in one piece, for other programs"

VERBS = {
    "list": Verb("Print name, size, time and state of each checkpoint", _list, [_DIR]),
    "verify": Verb(
        "Verify every file against its SHA-256; exit code 1 if one is broken", _verify, [_DIR]
    ),
    "pin": Verb("Keep a checkpoint from being removed", _mark, [_DIR, _STEP]),
    "rewind": Verb("Let the next resume of the run begin at a step, once", _mark, [_DIR, _STEP]),
    "prune": Verb("Remove the checkpoints that the run would not keep", _prune, [_DIR, _KEEP]),
    "export": Verb(_WHOLE, _export, [_DIR, _OUT, _TO]),
}
