"""`mpiddp checkpoints`: list, verify, pin, rewind, prune and export the checkpoints of a run.

    mpiddp checkpoints list runs/a
    mpiddp checkpoints verify runs/a/checkpoints/step_00001000
    mpiddp checkpoints pin runs/a 1000                       # no run removes it
    mpiddp checkpoints rewind runs/a 1000                    # the next resume begins there
    mpiddp checkpoints prune runs/a --keep 2
    mpiddp checkpoints export runs/a whole                   # or --to dcp, --to safetensors

DIR is a run's folder, a folder of checkpoints, one checkpoint, or an address of these in object storage. Only
`export` needs torch.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.checkpoints import folder as folders
from mpiddp.checkpoints.folder import BrokenCheckpoint, hold, step_of
from mpiddp.checkpoints.place import Place
from mpiddp.checkpoints.retention import PINS, REWIND, prune
from mpiddp.errors import UserError, named_by, print_error
from mpiddp.text import listed, size_text


def main(argv: list[str]) -> int:
    """Run `mpiddp checkpoints ARGV`. The exit code is 1 if `verify` finds a broken checkpoint, else 0."""
    options = _parse(argv)
    with named_by(""):
        if options.verb == "export":
            return _export(options.dir, Path(options.out), options.to)
        place = Place.at(options.dir)
        if options.verb == "prune":
            return _prune(options.dir, place, options.keep)
        if options.verb in ("pin", "rewind"):
            return _mark(options.dir, place, options.verb, options.step)
        if options.verb == "list":
            return _list(place)
        codes = []
        for folder in place.checkpoints:
            place.fetch(folder)
            codes += [_verify(folder) for _ in _held(folder)]
        return max(codes, default=0)


def _held(folder: Path) -> Iterator[None]:
    """Once, while a live run does not remove the checkpoint; never if the run removes it just now."""
    with contextlib.ExitStack() as opened:
        try:
            opened.enter_context(hold(folder))
        except (FileNotFoundError, BlockingIOError):
            return
        except BrokenCheckpoint:  # the caller says why
            pass
        yield


def _list(place: Place) -> int:
    """Print name, size, time and state of each checkpoint, and what the wishes of its run say of it.

    The state compares sizes only.
    """
    wishes, bucket = place.wishes(), place.bucket
    best = wishes.best_step([step_of(folder) for folder in place.checkpoints])
    for folder in (*place.checkpoints, *place.aside):
        for _ in _held(folder) if bucket is None else (None,):
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


def _verify(folder: Path) -> int:
    try:
        missing = folders.verify(folder).lacking
    except BrokenCheckpoint as error:
        print_error(f"{error}.")
        return 1
    without = f", without {listed(missing)}: other hosts must have them" if missing else ""
    print(f"checkpoint {folder.name}: verified{without}")
    return 0


def _prune(path: str, place: Place, keep: int | None) -> int:
    """Remove what the run would remove, with another number of newest checkpoints if the user names one."""
    if place.bucket:
        raise UserError(f"{path}: prune expects a local folder: the run prunes its bucket.")
    if place.checkpoints == [Path(path).resolve()]:
        raise UserError(f"{path} is one checkpoint. Expected a run's folder or a folder of checkpoints.")
    wishes = place.wishes()
    if keep is not None:
        wishes = replace(wishes, keep=keep)
    root = place.checkpoints[0].parent
    for folder in prune(root, wishes, is_good=folders.is_verified):
        print(f"checkpoint {folder.name}: removed")
    return 0


def _mark(path: str, place: Place, verb: str, step: int) -> int:
    """Pin a checkpoint until the user removes the file, or let the next resume of the run begin there."""
    names = [folder.name for folder in place.checkpoints]
    name = folders.name_of_step(step)
    if name not in names:
        raise UserError(f"{path} has no {name}. It has: {listed(names)}.")
    if verb == "pin":
        done = f"pinned. To unpin it, remove {place.write(f'{PINS}/{name}', '')}"
    else:
        place.write(REWIND, f"{step}\n")
        done = "the next resume begins here, on all hosts"
    print(f"checkpoint {name}: {done}")
    return 0


def _export(path: str, out: Path, to: str) -> int:
    from mpiddp.checkpoints.load import export  # needs torch

    for ending in (signal.SIGTERM, signal.SIGHUP):  # a part of the export must not remain
        if signal.getsignal(ending) is signal.SIG_DFL:  # not under nohup
            signal.signal(ending, lambda number, _: sys.exit(128 + number))
    saved = export(path, out, to)
    name = folders.name_of_step(saved.step)
    print(f"checkpoint {name}: written to {out} as {to}, with {listed(list(saved.state))}")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = OneSentenceParser(
        prog="mpiddp checkpoints",
        description="List, verify, pin, rewind, prune and export checkpoints.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    added = {}
    for name, purpose in (
        ("list", "Print name, size, time and state of each checkpoint"),
        ("verify", "Verify every file against its SHA-256; exit code 1 if one is broken"),
        ("pin", "Keep a checkpoint from being removed"),
        ("rewind", "Let the next resume of the run begin at a step, once"),
        ("prune", "Remove the checkpoints that the run would not keep"),
        ("export", "Write a checkpoint with every tensor in one piece, for other programs"),
    ):
        added[name] = verbs.add_parser(name, help=purpose, description=f"{purpose}.", allow_abbrev=False)
        added[name].add_argument("dir", metavar="DIR")
    keep = "number of verified checkpoints to keep (default: as the run does)"
    added["prune"].add_argument("--keep", type=whole(1), metavar="N", help=keep)
    for name in ("pin", "rewind"):
        added[name].add_argument("step", type=whole(0), metavar="STEP", help="its step")
    added["export"].add_argument("out", metavar="OUT", help="a new folder for the checkpoint")
    formats = "torch (files for torch.load, the default), dcp (torch.distributed.checkpoint) or safetensors"
    choices = ("torch", "dcp", "safetensors")
    added["export"].add_argument("--to", choices=choices, default="torch", help=formats)
    return parser.parse_args(argv)
