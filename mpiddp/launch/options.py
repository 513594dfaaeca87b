"""The options of `mpiddp launch` as frozen records. No other module sees the parser's namespace."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, TypeVar

from mpiddp.arguments import OPTION_CHECKS, RANK_VERBS, JobHints
from mpiddp.errors import UserError
from mpiddp.launch.env_file import read_env_file
from mpiddp.launch.option_parser import option_parser, parse_values
from mpiddp.paths import is_python, named_by
from mpiddp.protocol.messages import DEFAULT_RANKS
from mpiddp.text import listed, shown

EXAMPLE = "Example: mpiddp launch -n 2 train.py, or: mpiddp launch -n 2 -m mpiddp train"
_PYTHON_FILES = (".py", ".pyw")


class RankProgram(NamedTuple):
    """The command line of a rank: a script, the name of a module, or with `is_command` any program."""

    command: tuple[str, ...]
    is_module: bool = False
    is_command: bool = False

    @property
    def rank_verb(self) -> str | None:
        """The verb, if the job is one of mpiddp's own verbs that join a job by themselves."""
        is_ours = self.is_module and self.command[0] == "mpiddp"
        verb = self.command[1] if is_ours and len(self.command) > 1 else None
        return verb if verb in RANK_VERBS else None

    def check_options(self) -> JobHints | None:
        """What the job's options mean for the launcher; None for any job but mpiddp's own.

        The ranks themselves would report a wrong option only after they have joined.

        Raises:
            UserError: an invalid option.
            SystemExit: code 0, after --help.
        """
        module = OPTION_CHECKS.get(self.rank_verb or "")
        if module is None:
            return None
        hints: JobHints = import_module(module).check_options(list(self.command[2:]))
        return hints

    def rank_command(self, python: Path) -> tuple[str, ...]:
        """The command of a rank: `mpiddp run` of the job, unless that is a way to run already."""
        if (self.rank_verb or "").startswith("run"):
            return (str(python), "-m", *self.command)
        kind = ("-m",) if self.is_module else ("--",) if self.is_command else ()
        return (str(python), "-m", "mpiddp", "run", *kind, *self.command)


class Where(NamedTuple):
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
    push: bool  # this folder and its environment to the other hosts first
    check: bool  # run the preflight
    wait_s: float | None  # for hosts that do not answer yet
    share_gpus: bool
    avoid_flaky: bool  # do without hosts that have failed often

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


class How(NamedTuple):
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
    timeout_s: float | None

    @property
    def all_exports(self) -> tuple[str, ...]:
        """The variables that the user names for the ranks. A later one takes precedence."""
        return (*self.file_exports, *self.exports)


class When(NamedTuple):
    """When the job ends, and how often it restarts. `grow_s`: between two looks for more hosts."""

    max_restarts: int
    grow_s: float | None
    stop_after_s: float | None
    grace_s: float
    save_grace_s: float
    hang_timeout_s: float | None


class OutputOptions(NamedTuple):
    """What the ranks print: whose is shown, with its rank in front, and the folder of its files."""

    log_ranks: str
    prefix: str  # "auto", "always" or "never"
    log_dir: str | None
    quiet: bool  # of the launcher itself, errors alone

    def has_prefix(self, world_size: int) -> bool:
        return self.prefix == "always" or (self.prefix == "auto" and world_size > 1)

    def check_log_ranks(self, world_size: int) -> None:
        """Raise UserError if the job has no such rank."""
        numbers = [int(each) for each in self.log_ranks.split(",") if each.isdigit()]
        missing = [str(number) for number in numbers if number >= world_size]
        if missing:
            ranks = "rank 0 only" if world_size == 1 else f"ranks 0 to {world_size - 1}"
            raise UserError(
                f"--log-ranks {shown(self.log_ranks)}: there is no rank {listed(missing)}; "
                f"the job has {ranks}."
            )


class LaunchOptions(NamedTuple):
    """The whole command line. `backend` is the one that the job's own options request, if known."""

    job: RankProgram
    backend: str | None
    where: Where
    how: How
    when: When
    output: OutputOptions
    dry_run: bool
    report: bool
    verbose: bool


def parse_options(argv: list[str]) -> LaunchOptions:
    """The options of `argv`. If the job is one of mpiddp's own verbs, its options are checked too.

    Raises:
        UserError: an invalid option or number, or a script that does not exist.
    """
    values = parse_values(option_parser(), argv)
    values.exports = tuple(values.exports)
    files = [read_env_file(path, os.environ) for path in values.env_files]
    values.file_exports = tuple(export for file in files for export in file)
    values.mpi_args = parse_mpi_args(values.mpi_args)
    job = _job(values)
    hints = job.check_options()
    if hints is not None and hints.shows_all_ranks and values.log_ranks == DEFAULT_RANKS:
        values.log_ranks = "all"
    where, when = _part(Where, values), _part(When, values)
    _check_where(where)
    if when.grow_s is not None:
        _check_growth(where)
    return LaunchOptions(
        job=job,
        backend=hints.backend if hints is not None else None,
        where=where,
        how=_part(How, values),
        when=when,
        output=_part(OutputOptions, values),
        dry_run=values.dry_run,
        report=values.report,
        verbose=values.verbose,
    )


_Part = TypeVar("_Part", Where, How, When, OutputOptions)


def _part(kind: type[_Part], values: argparse.Namespace) -> _Part:
    return kind(**{name: getattr(values, name) for name in kind._fields})


def _check_where(where: Where) -> None:
    """Raise UserError for options of hosts that do nothing without the preflight."""
    if where.spares and not where.check:
        raise UserError(
            "--spares needs the preflight, which finds the hosts that fail. Leave out --no-check."
        )
    if where.wait_s is not None and where.push:
        raise UserError(
            "--push does not wait for hosts. Leave out --wait-for-hosts, or push before."
        )
    if where.wait_s is not None and not where.check:
        raise UserError(
            "--wait-for-hosts needs the preflight, which finds the hosts that answer. Leave out "
            "--no-check."
        )


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


def parse_mpi_args(texts: Sequence[str]) -> tuple[str, ...]:
    """The arguments of each --mpi-args, split as a shell splits them, in one row.

    Raises:
        UserError: a quote is not closed, or the first argument is not an option.
    """
    arguments: list[str] = []
    for text in texts:
        try:
            found = shlex.split(text)
        except ValueError as error:
            raise UserError(f"--mpi-args={shown(text)}: {str(error).lower()}.") from None
        if found and not found[0].startswith("-"):
            raise UserError(
                f'--mpi-args={shown(text)}: "{shown(found[0])}" is not an option, and mpirun would '
                "start it as a program. Example: --mpi-args='--mca pml ucx'"
            )
        arguments += found
    return tuple(arguments)


def _job(values: argparse.Namespace) -> RankProgram:
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
    if ":" in command:
        raise UserError('an argument of the job is ":", where an mpirun begins another program.')
    if not is_module and not is_command:
        with named_by(""):
            _check_script(Path(command[0]))
    return RankProgram(tuple(command), is_module, is_command)


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
