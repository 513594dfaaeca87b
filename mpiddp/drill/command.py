"""The command that a drill runs, `mpiddp launch …`: its folder, its ranks, and how it resumes."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.hosts.names import is_this_host
from mpiddp.launch.options import parse_options
from mpiddp.launch.plan import make_plan

OUT = "{out}"  # in an argument of the script: the folder of the run
_FILES = ("--hostfile", "--env-file", "--mpirun")  # options of `mpiddp launch`
_RESUME = re.compile(r"mpiddp: to resume: \S+ (.*)")


@dataclass(frozen=True)
class Size:
    """How many ranks take part, or fewer: without one of them, or without a host.

    spare: the last host that is not this one, "" if there is none. spare_ranks: those on it.
    counted: whether the user has named the number of ranks. excluded: the hosts that the user leaves out.
    """

    ranks: int
    spare: str
    spare_ranks: int
    counted: bool
    excluded: str

    def fewer(self, ranks: int, hosts: int) -> tuple[int, list[str]]:
        """The number of ranks without these, and the options of `mpiddp launch` for that."""
        if hosts:
            number = self.ranks - self.spare_ranks
            excluded = ",".join(filter(None, (self.excluded, self.spare)))
            return number, ["--exclude", excluded, *(["-n", str(number)] if self.counted else [])]
        return self.ranks - ranks, ["-n", str(self.ranks - ranks)] if ranks else []


@dataclass(frozen=True)
class Command:
    """What the user asked for: the options of `mpiddp launch`, and the job with its arguments."""

    options: tuple[str, ...]
    job: tuple[str, ...]
    is_module: bool
    size: Size

    @property
    def names_folder(self) -> bool:
        return any(OUT in argument for argument in self.job)

    def arguments(self, out: Path, size: Sequence[str] = (), hang_s: int = 0) -> list[str]:
        """The arguments of `mpiddp` for a run in `out`.

        Args:
            size: the options for another number of ranks or hosts.
            hang_s: for --hang-timeout, unless the user gave one; 0 for none.
        """
        own = ["--hang-timeout", str(hang_s)] if hang_s else []
        job = [argument.replace(OUT, str(out)) for argument in self.job]
        return ["launch", *own, *self.options, *size, *["-m"] * self.is_module, *job]

    def resume(self, printed: str, otherwise: list[str]) -> list[str]:
        """The command that the launcher has printed, or the same one again."""
        found = _RESUME.findall(printed)
        return shlex.split(found[-1]) if found else otherwise

    def folder(self, out: Path) -> Path:
        """The working folder of a run. Without {out}, relative paths must not reach the user's files."""
        return Path.cwd() if self.names_folder else out

    def environment(self) -> dict[str, str]:
        here = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(here)}


def read_command(argv: Sequence[str], job: Sequence[str], *, is_module: bool) -> Command:
    """The command of `mpiddp launch ARGV`, which ends with `job`. Its hosts are checked, as before any start.

    Raises:
        UserError: an invalid option, a script that does not exist, a host that cannot be used.
    """
    filled = [
        each.replace(OUT, ".") for each in argv
    ]  # so that `mpiddp train` can check its options
    options = parse_options(filled)
    if options.job.is_command:
        raise UserError(
            "mpiddp drill: it observes a Python script or a module in each rank, and not a command "
            'after "--". Example: mpiddp drill -n 2 train.py --out {out}'
        )
    if options.dry_run:
        raise UserError("mpiddp drill: --dry-run runs nothing. Leave it out.")
    placed = make_plan(options, os.environ).request.hosts
    others = [host for host in placed.hosts if not is_this_host(host.name)]
    spare = others[-1] if others and len(placed.hosts) > 1 else None
    size = Size(
        placed.world_size,
        spare=spare.name if spare else "",
        spare_ranks=spare.ranks if spare else 0,
        counted=options.n is not None,
        excluded=options.exclude or "",
    )
    own = argv[: len(argv) - len(job) - is_module]  # without the -m
    script, *rest = job
    if not is_module:
        script = os.path.abspath(script)  # noqa: PTH100 - a link stays a link
    return Command(tuple(with_absolute_files(own)), (script, *rest), is_module, size)


def with_absolute_files(options: Sequence[str]) -> list[str]:
    """The options, with the absolute paths of files here: without {out}, a run has another working folder."""
    found = []
    for before, option in zip(("", *options), options, strict=False):
        name, equals, value = option.partition("=")
        if not equals:
            name, value = before, option
        is_path = "/" in value and not value.startswith("~")  # which the launcher expands
        if name in _FILES and (is_path or (name != "--mpirun" and Path(value).is_file())):
            path = os.path.abspath(value)  # noqa: PTH100 - a link stays a link
            found.append(f"{name}={path}" if equals else path)
        else:
            found.append(option)
    return found


def program(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "mpiddp", *arguments]
