"""`mpiddp checkpoints`: list, verify, prune and export the checkpoints of a run.

    mpiddp checkpoints list runs/a
    mpiddp checkpoints verify runs/a/checkpoints/step_00001000
    mpiddp checkpoints prune runs/a --keep 2
    mpiddp checkpoints export runs/a whole

DIR is a run's folder, a folder of checkpoints, or one checkpoint. Only `export` needs torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.checkpoints import folder as folders
from mpiddp.checkpoints.folder import BrokenCheckpoint, find_checkpoints
from mpiddp.errors import UserError
from mpiddp.paths import named_by
from mpiddp.text import listed


def main(argv: list[str]) -> int:
    """Run `mpiddp checkpoints ARGV`. The exit code is 1 if `verify` finds a broken checkpoint, else 0.

    Raises:
        UserError: bad usage, or DIR contains no checkpoints, or cannot be read.
        JobFailed: a disk has failed.
    """
    options = _parse(argv)
    with named_by(""):
        if options.verb == "prune":
            return _prune(Path(options.dir), options.keep)
        if options.verb == "export":
            return _export(Path(options.dir), Path(options.out))
        checkpoints = _checkpoints(Path(options.dir))
        if options.verb == "list":
            for folder in checkpoints:
                print(_line(folder))
            return 0
        return max([_verify(folder) for folder in checkpoints])


def _line(folder: Path) -> str:
    """Name, size, time and state. The state compares sizes only."""
    files = [path.lstat() for path in folder.iterdir()]
    megabytes = sum(file.st_size for file in files) / 1e6
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
    state = "intact" if folders.is_intact(folder) else "broken"
    return f"{folder.name}  {megabytes:10.1f} MB  {written}  {state}"


def _verify(folder: Path) -> int:
    try:
        folders.verify(folder)
    except BrokenCheckpoint as error:
        print(f"{error}.", file=sys.stderr)
        return 1
    missing = folders.missing_shards(folder)
    without = f", without {listed(missing)}: other hosts must have them" if missing else ""
    print(f"checkpoint {folder.name}: verified{without}")
    return 0


def _prune(given: Path, keep: int) -> int:
    root = find_checkpoints(given)
    if root is None:
        raise UserError(
            f"{given} {_found(given)}. Expected a run's folder or a folder of checkpoints."
        )
    for folder in folders.prune(root, keep, is_good=folders.is_verified):
        print(f"checkpoint {folder.name}: removed")
    return 0


def _export(given: Path, out: Path) -> int:
    """Export a checkpoint, or the newest verified one of a run."""
    from mpiddp.checkpoints.contents import export  # needs torch

    given_folders = _checkpoints(given)
    folder: Path | None = given_folders[0]
    if len(given_folders) > 1:
        folder = next(filter(folders.is_verified, reversed(given_folders)), None)
    if folder is None:
        raise UserError(f"{given} contains no verified checkpoint.")
    entries = listed([f"{entry}.pt" for entry in export(folder, out)])
    print(f"checkpoint {folder.name}: written to {out}: whole, with {entries}")
    return 0


def _checkpoints(given: Path) -> list[Path]:
    if root := find_checkpoints(given):
        return folders.list_steps(root)
    if folders.is_checkpoint(given):
        return [given.resolve()]
    raise UserError(
        f"{given} {_found(given)}. "
        "Expected a run's folder, a folder of checkpoints, or a checkpoint."
    )


def _found(given: Path) -> str:
    """What `given` is instead of a folder of checkpoints, as the end of a sentence."""
    if not given.exists():
        return "does not exist"
    return "is a single checkpoint" if folders.is_checkpoint(given) else "contains no checkpoints"


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = OneSentenceParser(
        prog="mpiddp checkpoints",
        description="List, verify, prune and export checkpoints.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, purpose in (
        ("list", "print name, size, time and state of each checkpoint"),
        ("verify", "verify every file against its SHA-256; exit code 1 if one is broken"),
        ("prune", "remove checkpoints older than the newest verified ones"),
        ("export", "write a sharded checkpoint as a whole one, with every tensor in one piece"),
    ):
        verb = verbs.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        verb.add_argument("dir", metavar="DIR")
        if name == "export":
            verb.add_argument("out", metavar="OUT", help="a new folder for the checkpoint")
        if name == "prune":
            verb.add_argument(
                "--keep",
                type=whole(1),
                default=2,
                metavar="N",
                help="number of verified checkpoints to keep (default: 2)",
            )
    return parser.parse_args(argv)
