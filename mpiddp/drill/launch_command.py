"""The command that a drill runs, `mpiddp launch …`: its folder and its ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiddp.arguments import OUT, as_arguments
from mpiddp.errors import UserError
from mpiddp.launch.plan.job_plan import make_plan
from mpiddp.launch.plan.options import parse_options

_FILES = ("hostfile", "env_files", "mpirun")  # options of `mpiddp launch`


@dataclass(frozen=True)
class LaunchCommand:
    """What the user asked for: the options of `mpiddp launch`, and the job with its arguments."""

    options: tuple[str, ...]
    job: tuple[str, ...]  # the script, or -m and the module
    ranks: int
    has_hosts: bool  # besides this one

    @property
    def names_folder(self) -> bool:
        return any(OUT in argument for argument in self.job)

    def arguments(self, out: Path, *, fewer: int = 0) -> list[str]:
        """The arguments of `mpiddp` for a run in `out`, with so many ranks less."""
        size = ["-n", str(self.ranks - fewer)] if fewer else []
        job = [argument.replace(OUT, str(out)) for argument in self.job]
        return ["launch", *self.options, *size, *job]

    def folder(self, out: Path) -> Path:
        """The working folder of a run. Without {out}, relative paths must not reach the user's files."""
        return Path.cwd() if self.names_folder else out


def read_command(values: argparse.Namespace, actions: Sequence[argparse.Action]) -> LaunchCommand:
    """The command of the parsed options of `mpiddp launch`. Its hosts are checked, as before any start.

    Raises:
        UserError: an invalid option, a script that does not exist, a host that cannot be used.
    """
    job = [*(["-m", *values.module] if values.module else ()), *values.script]
    # Its options can be checked without a folder.
    argv = [each.replace(OUT, ".") for each in (*as_arguments(actions, values), *job)]
    options = parse_options(argv, "mpiddp drill")
    if options.job[0] == "--":
        raise UserError(
            "mpiddp drill: it observes a Python script or a module in each rank, and not a command "
            'after "--". Example: mpiddp drill -n 2 train.py --out {out}'
        )
    if options.dry_run:
        raise UserError("mpiddp drill: --dry-run runs nothing. Leave it out.")
    placed = make_plan(options, os.environ).request.hosts
    for name in _FILES:
        setattr(values, name, _absolute(getattr(values, name)))
    if not values.module:
        job = [_absolute(job[0]), *job[1:]]
    launch = tuple(as_arguments(actions, values))
    return LaunchCommand(launch, tuple(job), placed.world_size, len(placed.hosts) > 1)


def _absolute(path: Any) -> Any:
    """Each path of a file, for a run in another working folder. A link stays a link."""
    if isinstance(path, list):
        return [_absolute(each) for each in path]
    return os.path.abspath(path) if path and Path(path).exists() else path  # noqa: PTH100
