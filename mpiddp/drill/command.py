"""The command that a drill runs, `mpiddp launch …`: its folder, its ranks, and how it resumes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.launch.options import parse_options
from mpiddp.launch.plan import make_plan

OUT = "{out}"  # in an argument of the script: the folder of the run
_RESUME = re.compile(r"mpiddp: to resume: \S+ (.*)")
_FILES = ("--hostfile", "--env-file", "--mpirun")  # options of `mpiddp launch`


@dataclass(frozen=True)
class Command:
    """What the user asked for: the options of `mpiddp launch`, and the job with its arguments."""

    options: tuple[str, ...]
    job: tuple[str, ...]
    is_module: bool
    ranks: int
    has_hosts: bool  # besides this one

    @property
    def names_folder(self) -> bool:
        return any(OUT in argument for argument in self.job)

    def arguments(self, out: Path, *, fewer: int = 0, hang_s: int = 0) -> list[str]:
        """The arguments of `mpiddp` for a run in `out`.

        Args:
            fewer: ranks fewer than asked for.
            hang_s: for --hang-timeout, unless the user gave one; 0 for none.
        """
        own = ["--hang-timeout", str(hang_s)] if hang_s else []
        size = ["-n", str(self.ranks - fewer)] if fewer else []
        job = [argument.replace(OUT, str(out)) for argument in self.job]
        return ["launch", *own, *self.options, *size, *["-m"] * self.is_module, *job]

    def resume(self, printed: str, otherwise: list[str]) -> list[str]:
        """The command that the launcher has printed, or the same one again."""
        found = _RESUME.findall(printed)
        return shlex.split(found[-1]) if found else otherwise

    def folder(self, out: Path) -> Path:
        """The working folder of a run. Without {out}, relative paths must not reach the user's files."""
        return Path.cwd() if self.names_folder else out


def read_command(argv: Sequence[str], job: Sequence[str], *, is_module: bool) -> Command:
    """The command of `mpiddp launch ARGV`, which ends with `job`. Its hosts are checked, as before any start.

    Raises:
        UserError: an invalid option, a script that does not exist, a host that cannot be used.
    """
    # `mpiddp train` can check its options without a folder too.
    options = parse_options([each.replace(OUT, ".") for each in argv], "mpiddp drill")
    if options.job.is_command:
        raise UserError(
            "mpiddp drill: it observes a Python script or a module in each rank, and not a command "
            'after "--". Example: mpiddp drill -n 2 train.py --out {out}'
        )
    if options.dry_run:
        raise UserError("mpiddp drill: --dry-run runs nothing. Leave it out.")
    placed = make_plan(options, os.environ).request.hosts
    own = argv[: len(argv) - len(job) - is_module]  # without the -m
    script, *rest = job
    if not is_module:
        script = _absolute(script)
    return Command(
        tuple(_with_absolute_files(own)),
        (script, *rest),
        is_module,
        placed.world_size,
        len(placed.hosts) > 1,
    )


def _with_absolute_files(options: Sequence[str]) -> list[str]:
    """Without {out}, a run has another working folder."""
    found = []
    for before, option in zip(("", *options), options, strict=False):
        name, equals, value = option.partition("=") if "=" in option else (before, "", option)
        is_file = name in _FILES and Path(value).exists()
        text = _absolute(value) if is_file else value
        found.append(f"{name}={text}" if equals else text)
    return found


def _absolute(path: str) -> str:
    return os.path.abspath(path)  # noqa: PTH100 - a link stays a link
