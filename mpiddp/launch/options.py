"""The options of `mpiddp launch`: each is one field of a record, with its flags, parser, default and help.

    mpiddp launch --help-all

The parser reads the options before the script; those after it are the script's. No other module sees its
namespace.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.arguments import OPTION_CHECKS, RANK_VERBS, JobHints, OneSentenceParser, duration, whole
from mpiddp.errors import UserError
from mpiddp.launch import log
from mpiddp.launch.env_file import read_env_file
from mpiddp.paths import is_python, named_by
from mpiddp.protocol.messages import DEFAULT_RANKS
from mpiddp.protocol.variables import LOG_RANKS, PREFIX
from mpiddp.text import listed, parse_whole, shown

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


NO_PROGRAM = RankProgram(())

WHERE = "where (default: the scheduler's allocation, or this machine)"
HOW = "how"
FAILURES = "when something fails"
ENDS = "when to stop"
OUTPUT = "output"


def _option(
    *flags: str, group: str, default: Any = None, common: bool = False, **argument: Any
) -> Any:
    """A field of LaunchOptions with its flags; `argument` is what argparse gets.

    Args:
        common: `--help` lists it. `--help-all` lists every option.
    """
    told = {"flags": flags, "group": group, "common": common, "argument": argument}
    return field(default=default, metadata=told)


def _number_per_node(text: str) -> int | None:
    """K of --npernode; None for torchrun's words for one rank per GPU, which is what slots are by default."""
    return None if text in ("gpu", "auto") else whole(1)(text)


def _ranks(text: str) -> str:
    """The ranks of --log-ranks, for `mpiddp.protocol.messages.is_shown`."""
    if text in ("all", "none", DEFAULT_RANKS):
        return text
    try:
        return ",".join(str(parse_whole(each)) for each in text.split(","))
    except ValueError:
        raise UserError(
            f"--log-ranks {shown(text)}: expected all, none, or ranks such as 0,5."
        ) from None


def _folder(text: str) -> str:
    if not text:
        raise UserError('--log-dir "": expected a folder.')
    return text


@dataclass(frozen=True)
class LaunchOptions:
    """The whole command line. Durations are in seconds; None is "not given".

    job: what each rank runs. backend: the one that the job's own options request, if known.
    exports: of -x: VAR, VAR=VALUE or PREFIX_*. file_exports: of --env-file: VAR or VAR=VALUE, which are read
    once, since a restart uses the same values, and a pipe can be read only once.
    prefix: of MPIDDP_PREFIX: whether each line of output begins with its rank: "auto", "always" or "never".
    """

    job: RankProgram = NO_PROGRAM
    backend: str | None = None
    file_exports: tuple[str, ...] = ()
    prefix: str = "auto"

    hostfile: str | None = _option(
        *("--hostfile", "--machinefile"),
        group=WHERE,
        common=True,
        metavar="FILE",
        help="file of hosts and slots, one host per line",
    )
    host_list: str | None = _option(
        *("-H", "--host", "--hosts"),
        group=WHERE,
        common=True,
        metavar="HOSTS",
        help="hosts and slots on the command line: node1:2,node2:4",
    )
    n: int | None = _option(
        *("-n", "-np"),
        group=WHERE,
        common=True,
        type=whole(1),
        metavar="N",
        help="number of ranks (default: all slots)",
    )
    npernode: int | None = _option(
        *("--npernode", "--nproc-per-node"),
        group=WHERE,
        type=_number_per_node,
        metavar="K",
        help="number of ranks on each host (default: all slots)",
    )
    exclude: str | None = _option(
        "--exclude", group=WHERE, metavar="HOSTS", help="hosts to leave out: node3,node4"
    )
    push: bool = _option(
        "--push",
        group=WHERE,
        default=False,
        action="store_true",
        help="first make this folder and its environment the same on every host, as mpiddp hosts push does",
    )
    bind: str = _option(
        "--bind",
        group=WHERE,
        default="none",
        choices=("none", "numa", "core", "gpu"),
        help="bind each rank to nothing, a NUMA node, a core, or the cores near its GPU (default: none)",
    )

    mpirun: str | None = _option(
        "--mpirun",
        group=HOW,
        metavar="PATH",
        help="mpirun of the MPI to use (its library is used too)",
    )
    master_addr: str | None = _option(
        "--master-addr",
        group=HOW,
        metavar="ADDR",
        help="rank 0's address, as the other ranks reach it",
    )
    interface: str | None = _option(
        "--interface",
        group=HOW,
        common=True,
        metavar="NAME",
        help="network interface for the job: a name, an address or a network",
    )
    exports: tuple[str, ...] = _option(
        "-x",
        group=HOW,
        default=(),
        common=True,
        action="append",
        metavar="VAR[=VALUE]",
        help="pass this environment variable to the ranks, or those of a pattern such as 'WANDB_*' "
        "(repeatable)",
    )
    env_files: tuple[str, ...] = _option(
        "--env-file",
        group=HOW,
        default=(),
        common=True,
        action="append",
        metavar="FILE",
        help="pass the variables of this file: a line NAME=VALUE for each (repeatable)",
    )
    mpi_args: tuple[str, ...] = _option(
        "--mpi-args",
        group=HOW,
        default=(),
        action="append",
        metavar="ARGS",
        help="options for mpirun itself, such as --mpi-args='--mca pml ucx' (repeatable)",
    )
    check: bool = _option(
        "--no-check",
        group=HOW,
        default=True,
        action="store_false",
        help="skip the preflight checks of the hosts",
    )
    wait_s: float | None = _option(
        "--wait-for-hosts",
        group=HOW,
        type=duration,
        metavar="TIME",
        help="wait up to this long until all names resolve and all hosts answer (default: not at all)",
    )
    timeout_s: float | None = _option(
        "--timeout",
        group=HOW,
        type=duration,
        metavar="TIME",
        help="time in which all ranks must join (default: 60)",
    )

    max_restarts: int = _option(
        "--max-restarts",
        group=FAILURES,
        default=0,
        common=True,
        type=whole(0),
        metavar="K",
        help="restart a failed job up to K times, from its newest checkpoint (default: 0)",
    )
    min_hosts: int | None = _option(
        "--min-hosts",
        group=FAILURES,
        common=True,
        type=whole(1),
        metavar="H",
        help="leave out hosts that fail the preflight, as long as H hosts remain",
    )
    spares: int = _option(
        "--spares",
        group=FAILURES,
        default=0,
        type=whole(0),
        metavar="K",
        help="keep the last K hosts in reserve; each takes the place of a host that fails the preflight",
    )
    grow_s: float | None = _option(
        "--grow",
        group=FAILURES,
        type=duration,
        metavar="TIME",
        help="how often to look for hosts that are back or new in the hostfile, to save and restart on them "
        "(default: they join at the next restart)",
    )

    stop_after_s: float | None = _option(
        "--stop-after",
        group=ENDS,
        type=duration,
        metavar="TIME",
        help="after this time, stop as on Ctrl-C: a script that calls should_stop may save, and the exit "
        "code is 75",
    )
    grace_s: float = _option(
        "--grace",
        group=ENDS,
        default=30.0,
        type=duration,
        metavar="TIME",
        help="time that the ranks have to stop before they are killed; one that is saving has up to 10 "
        "minutes (default: 30 s)",
    )
    hang_timeout_s: float | None = _option(
        "--hang-timeout",
        group=ENDS,
        type=duration,
        metavar="TIME",
        help="end the job if no rank makes a step for this long (default: never)",
    )

    log_ranks: str = _option(
        "--log-ranks",
        group=OUTPUT,
        default=DEFAULT_RANKS,
        type=_ranks,
        metavar="RANKS",
        help="the ranks whose output is shown: all, none, or numbers such as 0,5 (default: stdout of rank "
        "0, stderr of all ranks)",
    )
    log_dir: str | None = _option(
        "--log-dir",
        group=OUTPUT,
        common=True,
        type=_folder,
        metavar="DIR",
        help="write all that each rank prints to rank_00003.out and rank_00003.err in DIR on its host",
    )
    dry_run: bool = _option(
        "--dry-run",
        group=OUTPUT,
        default=False,
        common=True,
        action="store_true",
        help="print the command with a reason for each flag; start nothing",
    )
    quiet: bool = _option(
        *("-q", "--quiet"),
        group=OUTPUT,
        default=False,
        action="store_true",
        help="print only errors from mpiddp: no hints, no status",
    )
    verbose: bool = _option(
        *("-v", "--verbose"),
        group=OUTPUT,
        default=False,
        action="store_true",
        help="print each choice and its reason, and the host and device of every rank",
    )

    @property
    def names_hosts(self) -> bool:
        return (self.hostfile, self.host_list) != (None, None)

    @property
    def names_ranks(self) -> bool:
        return (self.n, self.npernode) != (None, None)

    @property
    def all_exports(self) -> tuple[str, ...]:
        """The variables that the user names for the ranks. A later one takes precedence."""
        return (*self.file_exports, *self.exports)

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


# What users of other launchers type, and what does the same here (docs/migration.md).
_ELSEWHERE = {
    "--nnodes": "The list of hosts says it: -H node1:8,node2:8",
    "--node-rank": "One mpiddp launch starts the ranks of all hosts: -H node1:8,node2:8",
    "--rdzv-": "Leave it out: rank 0 binds a free port and announces it over MPI.",
    "--master-port": "Leave it out: rank 0 binds a free port; the variable MASTER_PORT names one.",
    "--num-processes": "Write: -n N",
    "--num-machines": "The list of hosts says it: -H node1:8,node2:8",
    "--machine-rank": "One mpiddp launch starts the ranks of all hosts: -H node1:8,node2:8",
    "--gpus": "The slots of a host are its GPUs: -H node1:8",
    "--num-gpus": "The slots of a host are its GPUs: -H node1:8",
    "--env": "Write: -x NAME=VALUE",
    "--tee": "Write: --log-dir DIR --log-ranks 0,5",
    "--redirects": "Write: --log-dir DIR --log-ranks 0,5",
    "--map-by": "Ranks fill the slots of the hosts in order; an option of mpirun: --mpi-args='--map-by …'",
    "--bind-to": "Write: --bind core",
    "--oversubscribe": "Write the number of ranks as the slots of a host: -H localhost:4",
    "--mca": "Write: --mpi-args='--mca NAME VALUE'",
    "--no-python": "Write -- before the command.",
    "--local": "Write: -H localhost",
    "--prefix": "Set the variable: MPIDDP_PREFIX=never",
    "--report": "Write: -v",
    "--min-ranks": "Write: --min-hosts H",
    "--save-grace": "Write: --grace TIME",
    "--share-gpus": "Hide the GPUs from a script that uses gloo: -x CUDA_VISIBLE_DEVICES=",
    "--avoid-flaky": "mpiddp hosts history lists such hosts. Write: --exclude HOST",
}


class _Parser(OneSentenceParser):
    """It knows what other launchers call an option."""

    def error(self, message: str) -> Any:
        found = re.fullmatch(r"unrecognized arguments: (--[^\s=]+).*", message, re.DOTALL)
        if found and (here := instead_of(found[1])):
            raise UserError(f"{found[1]} is not an option of mpiddp launch. {here}")
        super().error(message)


def instead_of(flag: str) -> str:
    """What does here what the flag does in another launcher; "" if that is unknown."""
    name = flag.replace("_", "-")
    rows = (text for known, text in _ELSEWHERE.items() if name == known or _begins(name, known))
    return next(rows, "")


def _begins(name: str, known: str) -> bool:
    return known.endswith("-") and name.startswith(known)


def option_parser(listed: str = "all") -> argparse.ArgumentParser:
    """The parser, for `parse_values`. Its help lists all options, the "common" ones, or "none"."""
    parser = _Parser(
        prog="mpiddp launch",
        usage="%(prog)s [options] (SCRIPT | -m MODULE | -- COMMAND) [ARGS ...]",
        description=_EXAMPLES,
        epilog="Exit codes: 0 done, 1 the job failed, 2 bad input, 75 stopped on request, 130 "
        "interrupted.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help="show the most used options")
    parser.add_argument("--help-all", action=_Help, nargs=0, help="show every option")
    if listed == "all":
        for group in (WHERE, HOW, FAILURES, ENDS, OUTPUT):
            add_options(parser, group)
    else:
        common = parser.add_argument_group("the most used options")
        for each in (each for each in fields(LaunchOptions) if each.metadata):
            is_listed = listed == "common" and each.metadata["common"]
            _add(common if is_listed else parser, each, is_listed=is_listed)
    parser.add_argument(
        "--standalone", dest="host_list", action="store_const", const="localhost", help=_HIDDEN
    )
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=_HIDDEN)
    parser.add_argument("script", nargs=argparse.REMAINDER, help=_HIDDEN)
    return parser


_HIDDEN = argparse.SUPPRESS
_EXAMPLES = """\
Start a script, or any command, on every slot of a hostfile, with one mpirun.

  mpiddp launch -n 2 train.py --lr 0.1                two ranks on this machine
  mpiddp launch -H node1:8,node2:8 train.py           16 ranks on two hosts, over ssh
  mpiddp launch --hostfile hosts.txt -m my.training   a module; hosts.txt has lines such as "node1 slots=8"
  mpiddp launch --dry-run --hostfile hosts.txt -- ./program   any command; prints what would run

Options of mpiddp launch come before the script. What follows the script is the script's.
"""


def add_options(parser: argparse.ArgumentParser, group: str) -> None:
    """Add the options of a group, WHERE or HOW, for every verb that starts ranks."""
    found = parser.add_argument_group(group)
    for each in fields(LaunchOptions):
        if each.metadata and each.metadata["group"] == group:
            _add(found, each, is_listed=True)


def _add(group: Any, each: Field[Any], *, is_listed: bool) -> None:
    """Add an option. The help shows its first spelling; a later one is what other launchers call it."""
    flags, argument = each.metadata["flags"], dict(each.metadata["argument"])
    own = [flag for flag in flags if flag not in _SPELLINGS]
    text = argument.pop("help")
    shown_text = text if is_listed else _HIDDEN
    option = group.add_argument(
        *own, dest=each.name, default=_default(each), help=shown_text, **argument
    )
    for flag in flags:  # argparse would list all spellings of an option
        group._option_string_actions[flag] = option


_SPELLINGS = ("--machinefile", "--host", "--hosts", "-np", "--nproc-per-node")


def _default(each: Field[Any]) -> Any:
    if each.name == "log_ranks":
        return os.environ.get(LOG_RANKS) or each.default
    return [] if each.default == () else each.default


class _Help(argparse.Action):
    """Print the help of the parser, or its short form, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        is_short = rest[-1] in ("-h", "--help") and parser.prog == "mpiddp launch"
        (option_parser("common") if is_short else parser).print_help()
        raise SystemExit(0)


def parse_values(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The options. `module` or `script` holds the job's command line; the other is None or empty."""
    values = parser.parse_args(_dashed(parser, argv))
    if values.module is not None:  # argparse gives no option a "--", nor what follows it
        values.module, values.script = [*values.module, *values.script], []
    return values


def _dashed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The arguments with `--max_restarts` as `--max-restarts`, as far as the launcher's options go."""
    actions = parser._option_string_actions
    arguments = list(argv)
    index = 0
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] != "--":
        flag, equals, value = arguments[index].partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
            arguments[index] = flag + equals + value
        if flag == "-m":
            break
        action = actions.get(flag)
        takes_value = action is not None and action.nargs is None and not equals
        index += 2 if takes_value else 1
    return arguments


def parse_options(argv: list[str], verb: str = "mpiddp launch") -> LaunchOptions:
    """The options of `argv`. If the job is one of mpiddp's own verbs, its options are checked too.

    Raises:
        UserError: an invalid option or number, or a script that does not exist.
    """
    values = parse_values(option_parser(), argv)
    given = {
        each.name: getattr(values, each.name) for each in fields(LaunchOptions) if each.metadata
    }
    files = [read_env_file(path, os.environ) for path in values.env_files]
    job = _job(values)
    refuse_misplaced(job, verb)
    hints = job.check_options()
    if hints is not None and hints.shows_all_ranks and values.log_ranks == DEFAULT_RANKS:
        given["log_ranks"] = "all"
    options = LaunchOptions(
        **given
        | {
            "job": job,
            "backend": hints.backend if hints is not None else None,
            "file_exports": tuple(export for file in files for export in file),
            "prefix": _prefix(os.environ.get(PREFIX) or "auto"),
            "exports": tuple(values.exports),
            "env_files": tuple(values.env_files),
            "mpi_args": parse_mpi_args(values.mpi_args),
        }
    )
    _check(options)
    return options


def _prefix(text: str) -> str:
    if text not in ("auto", "always", "never"):
        raise UserError(f"{PREFIX}={shown(text)}: expected auto, always or never.")
    return text


def _check(options: LaunchOptions) -> None:
    """Raise UserError for options that contradict each other."""
    if options.hostfile is not None and options.host_list is not None:
        raise UserError("--hostfile and -H both name the hosts. Give one.")
    if options.quiet and options.verbose:
        raise UserError("--quiet and --verbose contradict each other. Give one.")
    if not options.check:
        needing = {
            "--spares": options.spares,
            "--wait-for-hosts": options.wait_s,
            "--grow": options.grow_s,
        }
        for flag, value in needing.items():
            if value:
                raise UserError(
                    f"{flag} needs the preflight, which finds the hosts that answer. Leave out --no-check."
                )
    if options.wait_s is not None and options.push:
        raise UserError(
            "--push does not wait for hosts. Leave out --wait-for-hosts, or push before."
        )
    if options.grow_s is not None and options.host_list is not None and options.min_hosts is None:
        raise UserError(
            "--grow with -H: every host of the list takes part from the start, so none can join. Write the "
            "list into a file for --hostfile, or allow missing hosts: --min-hosts H"
        )


# Options that people write behind the script by mistake; the first two of them are meant to start nothing.
_MISPLACED = ("--dry-run", "--help", "-h", "--hostfile", "-H", "-n")
_PARSERS = re.compile(r"\b(argparse|ArgumentParser|click|typer|fire|hydra|absl|tyro|docopt)\b")


def refuse_misplaced(job: RankProgram, verb: str) -> None:
    """Point out an option of the launcher that stands behind a script whose own parser does not name it.

    Raises:
        UserError: `--dry-run` or `--help`, which would start the job that they are meant not to start.
    """
    if job.is_command or job.is_module:
        return
    script, *arguments = job.command
    found = [each for each in arguments if each.partition("=")[0] in _MISPLACED]
    if not found:
        return
    text = Path(script).read_text(errors="replace")
    for flag in (each.partition("=")[0] for each in found):
        is_help = flag in ("--help", "-h")
        if re.search(rf"[\"']-*{re.escape(flag.lstrip('-'))}[\"']", text.replace("_", "-")) or (
            is_help and _PARSERS.search(text)
        ):
            continue
        sentence = f"{flag} comes after {script}, so it goes to the script, which does not name it."
        if flag in ("--dry-run", "--help", "-h"):
            raise UserError(f"{sentence} Write it before the script: {verb} {flag} {script}")
        log.info(f"{sentence} An option of {verb} comes before the script.")


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
        here = instead_of(command[0].partition("=")[0]) or "See: mpiddp launch --help-all"
        raise UserError(f"{command[0]} is not an option of mpiddp launch. {here}")
    if ":" in command:
        raise UserError('an argument of the job is ":", where an mpirun begins another program.')
    if not is_module and not is_command:
        with named_by(""):
            _check_script(command)
    return RankProgram(tuple(command), is_module, is_command)


def _check_script(command: Sequence[str]) -> None:
    script = Path(command[0])
    how = f"To start any program: mpiddp launch … -- {script}"
    if script.is_file():
        if script.suffix not in _PYTHON_FILES and not is_python(script):
            raise UserError(f"{script} is not a Python script. {how}")
        return
    if script.exists():
        raise UserError(f"{script} is not a regular file. Expected a Python script.")
    hint = f" {how}" if shutil.which(script.name) and script.name == str(script) else ""
    if re.fullmatch(r"python[0-9.]*", script.name) and command[1:2]:
        hint = f" mpiddp starts Python itself. Leave it out: mpiddp launch … {command[1]}"
    raise UserError(f"{script} not found (looked in {Path.cwd()}).{hint}")
