"""`mpiddp checkpoints`: list, verify, pin, prune and export the checkpoints of a run.

    mpiddp checkpoints list runs/a
    mpiddp checkpoints verify runs/a/checkpoints/step_00001000
    mpiddp checkpoints pin runs/a 1000                       # no run removes it
    mpiddp checkpoints prune runs/a --keep 2
    mpiddp checkpoints export runs/a whole                   # or --to dcp, --to safetensors

DIR is a run's folder, a folder of checkpoints, or one checkpoint. Only `export` needs torch.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.checkpoints import folder as folders
from mpiddp.checkpoints.bucket import is_address, local_path, pull
from mpiddp.checkpoints.folder import BrokenCheckpoint
from mpiddp.checkpoints.retention import PINNED, Retention, hold, prune
from mpiddp.errors import UserError, named_by, print_error
from mpiddp.text import listed, size_text


def main(argv: list[str]) -> int:
    """Run `mpiddp checkpoints ARGV`. The exit code is 1 if `verify` finds a broken checkpoint, else 0."""
    options = _parse(argv)
    with named_by(""):
        if options.verb in ("prune", "pin") and is_address(options.dir):
            raise UserError(f"{options.dir}: {options.verb} expects a local folder.")
        pull(options.dir)
        if options.verb == "prune":
            return _prune(Path(options.dir), options.keep)
        if options.verb == "pin":
            return _pin(Path(options.dir), options.step)
        if options.verb == "export":
            return _export(options.dir, Path(options.out), options.to)
        checkpoints = folders.checkpoints_at(local_path(options.dir))
        if options.verb == "list":
            checkpoints += folders.list_steps(checkpoints[0].parent, set_aside=True)
            for folder in _held(list(dict.fromkeys(checkpoints))):
                print(_line(folder))
            return 0
        return max(map(_verify, _held(checkpoints)), default=0)


def _held(checkpoints: list[Path]) -> Iterator[Path]:
    """Each checkpoint, held so that a live run does not remove it. One that is being removed is left out."""
    for folder in checkpoints:
        with contextlib.ExitStack() as opened:
            try:
                opened.enter_context(hold(folder))
            except (FileNotFoundError, BlockingIOError):
                continue
            except BrokenCheckpoint:  # the caller says why
                pass
            yield folder


def _line(folder: Path) -> str:
    """Name, size, time and state. The state compares sizes only."""
    files = [path.lstat() for path in folder.iterdir()]
    size = size_text(sum(file.st_size for file in files))
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
    state = "intact" if folders.is_verified(folder, with_hashes=False) else "broken"
    pinned = "  pinned" if (folder / PINNED).exists() else ""
    finite = "  not finite" if folders.About.of(folder).not_finite else ""
    aside = "  set aside" if folders.is_set_aside(folder) else ""
    return f"{folder.name}  {size:>13}  {written}  {state}{finite}{pinned}{aside}"


def _verify(folder: Path) -> int:
    try:
        missing = folders.verify(folder).lacking
    except BrokenCheckpoint as error:
        print_error(f"{error}.")
        return 1
    without = f", without {listed(missing)}: other hosts must have them" if missing else ""
    print(f"checkpoint {folder.name}: verified{without}")
    return 0


def _prune(path: Path, keep: int) -> int:
    checkpoints = folders.checkpoints_at(path)
    if checkpoints == [path.resolve()]:
        raise UserError(
            f"{path} is one checkpoint. Expected a run's folder or a folder of checkpoints."
        )
    for folder in prune(checkpoints[0].parent, Retention(keep), is_good=folders.is_verified):
        print(f"checkpoint {folder.name}: removed")
    return 0


def _pin(path: Path, step: int) -> int:
    """Keep a checkpoint from being removed, until the user removes the file."""
    names = {folder.name: folder for folder in folders.checkpoints_at(path)}
    name = folders.name_of_step(step)
    if name not in names:
        raise UserError(f"{path} has no {name}. It has: {listed(list(names))}.")
    pin = names[name] / PINNED
    pin.touch()
    print(f"checkpoint {name}: pinned. To unpin it, remove {pin}")
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
        description="List, verify, pin, prune and export checkpoints.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True)
    added = {}
    for name, purpose in (
        ("list", "Print name, size, time and state of each checkpoint"),
        ("verify", "Verify every file against its SHA-256; exit code 1 if one is broken"),
        ("pin", "Keep a checkpoint from being removed"),
        ("prune", "Remove checkpoints older than the newest verified ones"),
        ("export", "Write a checkpoint with every tensor in one piece, for other programs"),
    ):
        added[name] = verbs.add_parser(
            name, help=purpose, description=f"{purpose}.", allow_abbrev=False
        )
        added[name].add_argument("dir", metavar="DIR")
    keep = "number of verified checkpoints to keep (default: 2)"
    added["prune"].add_argument("--keep", type=whole(1), default=2, metavar="N", help=keep)
    added["pin"].add_argument("step", type=whole(0), metavar="STEP", help="its step")
    added["export"].add_argument("out", metavar="OUT", help="a new folder for the checkpoint")
    formats = "torch (files for torch.load, the default), dcp (torch.distributed.checkpoint) or safetensors"
    choices = ("torch", "dcp", "safetensors")
    added["export"].add_argument("--to", choices=choices, default="torch", help=formats)
    return parser.parse_args(argv)
