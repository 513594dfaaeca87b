"""The options of `mpiddp launch` as frozen records. No other module sees the parser's namespace."""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from mpiddp.errors import UserError
from mpiddp.launch.env_file import read_env_file
from mpiddp.launch.job import Job
from mpiddp.launch.option_parser import option_parser
from mpiddp.launch.starters.mpi_args import parse_mpi_args
from mpiddp.paths import is_python, named_by
from mpiddp.protocol.messages import DEFAULT_RANKS
from mpiddp.text import listed, shown

EXAMPLE = "Example: mpiddp launch -n 2 train.py, or: mpiddp launch -n 2 -m mpiddp train"
_PYTHON_FILES = (".py", ".pyw")


@dataclass(frozen=True)
class Where:
    """The hosts, and the number of ranks on them."""

    hostfile: str | None
    host_list: str | None
    local: bool  # this machine alone
    n: int | None
    npernode: int | None
    exclude: str | None
    min_hosts: int | None
    min_ranks: int | None
    spares: int  # the last hosts, kept in reserve
    check: bool  # run the preflight
    wait_s: float | None  # for hosts that do not answer yet
    share_gpus: bool

    @property
    def names_hosts(self) -> bool:
        return (self.hostfile, self.host_list) != (None, None)

    @property
    def names_ranks(self) -> bool:
        return (self.n, self.npernode) != (None, None)

    @property
    def can_shrink(self) -> bool:
        """Whether the job may start without hosts that fail the preflight."""
        return (self.min_hosts, self.min_ranks) != (None, None)


@dataclass(frozen=True)
class How:
    """How the ranks start, and how they join.

    `file_exports` are read once: a restart uses the same values, and a pipe can be read only once.
    """

    mpirun: str | None
    bind: str
    master_addr: str | None
    interface: str | None
    exports: tuple[str, ...]  # of -x: VAR, VAR=VALUE or PREFIX_*
    file_exports: tuple[str, ...]  # of --env-file: VAR or VAR=VALUE
    mpi_args: tuple[str, ...]
    timeout_s: int | None

    @property
    def all_exports(self) -> tuple[str, ...]:
        """The variables that the user names for the ranks. A later one takes precedence."""
        return (*self.file_exports, *self.exports)


@dataclass(frozen=True)
class When:
    """When the job ends, and how often it restarts. `grow_s`: between two looks for more hosts."""

    max_restarts: int
    grow_s: float | None
    stop_after_s: float | None
    grace_s: float
    save_grace_s: float
    hang_timeout_s: float | None


@dataclass(frozen=True)
class Output:
    """What the ranks print: whose is shown, with its rank in front, and the folder of its files."""

    log_ranks: str
    prefix: str  # "auto", "always" or "never"
    log_dir: str | None

    def has_prefix(self, world_size: int) -> bool:
        return self.prefix == "always" or (self.prefix == "auto" and world_size > 1)

    def check_ranks(self, world_size: int) -> None:
        """Raise UserError if the job has no such rank."""
        numbers = [int(each) for each in self.log_ranks.split(",") if each.isdigit()]
        missing = [str(number) for number in numbers if number >= world_size]
        if missing:
            ranks = "rank 0 only" if world_size == 1 else f"ranks 0 to {world_size - 1}"
            raise UserError(
                f"--log-ranks {shown(self.log_ranks)}: there is no rank {listed(missing)}; "
                f"the job has {ranks}."
            )


@dataclass(frozen=True)
class LaunchOptions:
    """The whole command line. `backend` is the one that the job's own options request, if known."""

    job: Job
    backend: str | None
    where: Where
    how: How
    when: When
    output: Output
    dry_run: bool
    report: bool
    verbose: bool


def parse_options(argv: list[str]) -> LaunchOptions:
    """The options of `argv`. If the job is one of mpiddp's own verbs, its options are checked too.

    Raises:
        UserError: an invalid option or number, or a script that does not exist.
    """
    values = option_parser().parse_args(argv)
    values.exports = tuple(values.exports)
    files = [read_env_file(path, os.environ) for path in values.env_files]
    values.file_exports = tuple(export for file in files for export in file)
    values.mpi_args = parse_mpi_args(values.mpi_args)
    job = _job(values)
    requests = job.check_options()
    if requests is not None and requests.shows_all_ranks and values.log_ranks == DEFAULT_RANKS:
        values.log_ranks = "all"
    where, when = _part(Where, values), _part(When, values)
    if when.grow_s is not None:
        _check_growth(where)
    return LaunchOptions(
        job=job,
        backend=requests.backend if requests is not None else None,
        where=where,
        how=_part(How, values),
        when=when,
        output=_part(Output, values),
        dry_run=values.dry_run,
        report=values.report,
        verbose=values.verbose,
    )


_Part = TypeVar("_Part", Where, How, When, Output)


def _part(kind: type[_Part], values: argparse.Namespace) -> _Part:
    return kind(**{field.name: getattr(values, field.name) for field in fields(kind)})


def _check_growth(where: Where) -> None:
    """Raise UserError if --grow contradicts the other options."""
    if where.local:
        raise UserError("--grow with --local: no host can join this machine alone. Leave out one.")
    if not where.check:
        raise UserError(
            "--grow needs the preflight, which finds the hosts that can join. Leave out --no-check."
        )
    if where.host_list is not None and not where.can_shrink:
        raise UserError(
            "--grow with -H: every host of the list takes part from the start, so none can join. Write the "
            "list into a file for --hostfile, or allow missing hosts: --min-hosts H"
        )


def _job(values: argparse.Namespace) -> Job:
    is_module = values.module is not None
    command: list[str] = values.module if is_module else values.script
    is_command = not is_module and command[:1] == ["--"]
    command = command[is_command:]
    if not command:
        raise UserError(f"nothing to launch. Name a script or a module. {EXAMPLE}")
    if command[0].startswith("-") and not is_command:
        raise UserError(
            f"{command[0]} is not an option of mpiddp launch. See: mpiddp launch --help"
        )
    if not is_module and not is_command:
        with named_by(""):
            _check_script(Path(command[0]))
    return Job(tuple(command), is_module, is_command)


def _check_script(script: Path) -> None:
    how = f"To start any program: mpiddp launch … -- {script}"
    if script.is_file():
        if script.suffix not in _PYTHON_FILES and not is_python(script):
            raise UserError(f"{script} is not a Python script. {how}")
        return
    if script.exists():
        raise UserError(f"{script} is not a regular file. Expected a Python script.")
    hint = f" {how}" if shutil.which(script.name) and script.name == str(script) else ""
    raise UserError(f"{script} not found (looked in {Path.cwd()}).{hint}")
