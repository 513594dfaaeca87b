"""The options of `mpiddp launch`: a command line comes in, and a LaunchOptions goes out.

Each field of that record has its spellings and its help: mpiddp launch --help-all
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mpiddp import sinks
from mpiddp.arguments import (
    OneSentenceParser,
    common,
    duration,
    option,
    options_of,
    shell_command,
    shell_words,
    whole,
)
from mpiddp.errors import UserError
from mpiddp.hosts.containers import Image, folder
from mpiddp.hosts.hostfile import Hosts
from mpiddp.hosts.transport import SSH
from mpiddp.hosts.where import named_hosts, refuse_both
from mpiddp.launch import log
from mpiddp.launch.plan import entrypoint
from mpiddp.launch.plan.environment import parse_exports, read_env_file, without_values
from mpiddp.launch.plan.mpirun_line import in_our_words, table
from mpiddp.protocol import variables
from mpiddp.protocol.channel import DEFAULT_RANKS
from mpiddp.protocol.orders import Orders
from mpiddp.protocol.terminal import Terminal
from mpiddp.text import MAX_DURATION_DAYS, shown

_HIDDEN = argparse.SUPPRESS
# torchrun's words for one rank per GPU. Slots mean the same by default.
_BY_GPU = ("gpu", "auto")
_NEVER = f"{24 * MAX_DURATION_DAYS}h"
_RANK = "(0|[1-9][0-9]{0,8})"
# Options of torchrun that are accepted on one host, where they change nothing.
_OF_ONE_HOST = ("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf")


def _number(text: str) -> str | int:
    """A number of ranks, or torchrun's words: one on each GPU, or for each core of this machine."""
    if text == "cpu":
        return len(os.sched_getaffinity(0))
    return text if text in _BY_GPU else whole(1)(text)


def _limit(text: str) -> float:
    """A time in seconds, which may be without an end."""
    return duration(_NEVER if text in ("never", "inf") else text)


def _switch(text: str) -> bool:
    """The value of a switch in a variable."""
    if text not in ("0", "1"):
        raise argparse.ArgumentTypeError(f"expected 1 or 0, not {shown(text)!r}")
    return text == "1"


def _ranks(text: str) -> str:
    """The ranks of --log-ranks, for `mpiddp.protocol.channel.is_shown`."""
    if re.fullmatch(f"all|none|{DEFAULT_RANKS}|{_RANK}(,{_RANK})*", text):
        return text
    raise argparse.ArgumentTypeError(
        f"expected all, none, or ranks such as 0,5, not {shown(text)!r}"
    )


def _mpi_args(text: str) -> str:
    first = "".join(shell_words(text)[:1])
    if first.startswith("-") or not first:
        return text
    raise argparse.ArgumentTypeError(
        f'"{shown(first)}" is not an option, and mpirun would start it as a program'
    )


@dataclass(frozen=True)
class LaunchOptions:
    """The whole command line. Durations are in seconds; None is "not given"."""

    # The program of each rank: a script, -m and a module, or -- and a command, each with its arguments.
    job: tuple[str, ...] = ()
    backend: str | None = None  # the backend that the options of `mpiddp train` request
    # The variables of -x and --env-file, None for -x VAR-. A file is read only once, because it may be a pipe.
    settings: Mapping[str, str | None] = field(default_factory=dict)
    of_hostfile: tuple[str, ...] = ()  # the options in a hostfile, each with its file and line
    max_hosts: int | None = None  # by --nnodes MIN:MAX, the number of hosts to take from the list
    prefix: str = "auto"  # MPIDDP_PREFIX: "auto", "always" or "never" before each line of output

    # fmt: off
    hostfile: str | None = common("--hostfile", also=("--machinefile",), value="FILE",
        group="where (default: the scheduler's allocation, or this machine)",
        help="file of hosts, slots and options; --grace= takes one back")
    host_list: str | None = common("-H", also=("--host", "--hosts"), value="HOSTS",
        help="hosts and slots: node1:2,node2:4; or a name, @gpu")
    n: int | None = common("-n", also=("-np",), value="N", parse=_number, help="number of ranks (default: all slots)")
    npernode: int | None = option("--npernode", also=("--nproc-per-node",), value="N", parse=_number,
        help="number of ranks on each host (default: all slots)")
    needs_gpus: bool = False  # --nproc-per-node gpu
    exclude: str | None = option("--exclude", by_hostfile=True, value="HOSTS", help="hosts to leave out: node3,node4")
    push: bool = option("--push",
        help="first copy this folder and its environment to every host, as mpiddp hosts push does")
    bind: str = option("--bind", choices=("none", "numa", "core"), default="none",
        help="bind each rank to nothing, a NUMA node, or a core (default: none)")
    mpirun: str | None = option("--mpirun", group="how", value="PATH", help="mpirun of the MPI to use (mpi4py takes its library, too)")
    image: str | None = option("--image", by_hostfile=True, value="IMAGE", parse=lambda text: str(Image.of(text)),
        help="run each rank in a container: an image of docker or podman, a file .sif or .sqsh, or podman://IMAGE")
    mounts: tuple[str, ...] = option("--mount", value="FOLDER", parse=folder, repeats=True,
        help="a folder of the host that the container gets, beside the working folder (repeatable)")
    master_addr: str | None = option("--master-addr", by_hostfile=True, value="ADDR",
        help="rank 0's address, as the other ranks reach it")
    interface: str | None = common("--interface", by_hostfile=True, value="NAME",
        help="the job's network: an interface, an address or a network")
    exports: tuple[str, ...] = common("-x", by_hostfile=True, value="VAR[=VALUE]", repeats=True,
        help="set this environment variable of the ranks; -x VAR- keeps it from them (repeatable)")
    env_files: tuple[str, ...] = common("--env-file", value="FILE", repeats=True,
        help="variables from a file of lines NAME=VALUE (repeatable)")
    mpi_args: tuple[str, ...] = option("--mpi-args", value="ARGS", parse=_mpi_args, repeats=True,
        help="options for mpirun itself, such as --mpi-args='--mca pml ucx' (repeatable)")
    mpi_variables: bool = option("--mpi-variables",
        help="for a script that reads its rank from Open MPI's variables: set OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE")
    check: bool = option("--no-check", default=True, help="skip the preflight checks of the hosts")
    wait_s: float | None = option("--wait-for-hosts", by_hostfile=True, value="TIME", parse=duration,
        help="wait up to this long until all names resolve, all hosts answer and their GPUs are free (default: not at all)")
    login_s: float = option("--login-timeout", by_hostfile=True, value="TIME", parse=duration, default=SSH.login_s,
        help="time that a login over ssh may take (default: 15 s)")
    lost_s: float = option("--lost-after", by_hostfile=True, value="TIME|never", parse=_limit, default=variables.LOST_AFTER_S,
        help="a host that is silent for this long is lost, unless the steps of the other ranks go on (default: 45 s)")
    timeout_s: float | None = option("--timeout", by_hostfile=True, value="TIME", parse=duration,
        help="time in which all ranks must join (default: 60 s)")
    max_restarts: int = common("--max-restarts", group="when something fails", value="K", parse=whole(0), default=0,
        help="restart a failed job up to K times, from its checkpoint")
    restart_args: tuple[str, ...] = option("--restart-args", value="ARGS", parse=shell_words, default=(),
        help="arguments with which a script that announces none resumes, such as '--resume last.pt'; a restart adds "
        "them once the paths among them exist")
    min_hosts: int | None = common("--min-hosts", value="H", parse=whole(1),
        help="leave out hosts that fail, as long as H hosts remain")
    spares: int = option("--spares", value="K", parse=whole(0), default=0,
        help="keep the last K hosts in reserve; each takes the place of a host that fails the preflight")
    grow_s: float | None = option("--grow", value="TIME", parse=duration,
        help="how often to look for hosts that are back or new in the hostfile, to save and restart on them (default: "
        "they join at the next restart)")
    stop_after_s: float | None = option("--stop-after", group="when to stop", by_hostfile=True, value="TIME|never", parse=_limit,
        help="after this time, stop as on Ctrl-C: a script that calls should_stop may save, and the exit code is 75 "
        "(default: before the scheduler's time limit)")
    grace_s: float = option("--grace", by_hostfile=True, value="TIME", parse=duration, default=30.0,
        help="time that the ranks have to stop before they are killed; one that is saving has up to 10 minutes "
        "(default: 30 s)")
    failed_grace_s: float = option("--failed-grace", by_hostfile=True, value="TIME", parse=duration, default=Orders().failed_grace_s,
        help="time that a rank has after SIGTERM when another one has failed; one that is saving has up to 10 minutes "
        "(default: 3 s)")
    hang_timeout_s: float | None = option("--hang-timeout", by_hostfile=True, value="TIME", parse=duration,
        help="end the job if for this long no rank makes a step, calls a collective or saves (default: never)")
    requeue: bool = option("--requeue", parse=_switch,
        help="in a batch job of Slurm: requeue the job after a stop that Slurm has requested")
    log_ranks: str = option("--log-ranks", group="output", value="RANKS", parse=_ranks, default=DEFAULT_RANKS,
        help="the ranks whose output is shown: all, none, or numbers such as 0,5 (default: stdout of rank 0, stderr of "
        "all ranks)")
    timestamps: bool = option("--timestamps", help="write the date and the time before each line of a rank")
    stdin: str = option("--stdin", choices=("rank0", "none"), default="rank0",
        help="who reads this program's stdin; none leaves it to the shell, as in while read (default: rank0)")
    log_dir: str | None = common("--log-dir", value="DIR",
        help="write all output of each rank to files in DIR on its host")
    log_to: tuple[str, ...] = option("--log-to", value="NAME[:WHERE]", parse=sinks.checked, repeats=True,
        help=f"also write the numbers of mpiddp.log_metrics to one of: {', '.join(sinks.SINKS)} (repeatable)")
    report: str | None = option("--report", value="FILE", help="write how the job ended to FILE, as JSON")
    on_end: tuple[str, ...] | None = option("--on-end", value="COMMAND", parse=shell_command,
        help="run this command when the job has ended, with the path of its report")
    detach: bool = common("--detach", help="go on without this terminal; mpiddp ps, logs and wait follow")
    dry_run: bool = common("--dry-run", help="start nothing; print the command and its reasons")
    quiet: bool = option("-q", "--quiet", help="print only errors from mpiddp, and that no hosts are given: no hints, no status")
    verbose: bool = option("-v", "--verbose", help="print each choice and its reason, and the host of every rank")
    # fmt: on

    @property
    def command(self) -> tuple[str, ...]:
        """The job without its -m or --."""
        return self.job[self.job[0] in ("-m", "--") :]

    @property
    def terminal(self) -> Terminal:
        """The terminal of this process, described for the ranks."""
        terminal = Terminal.of_this_process()
        if self.timestamps:
            terminal = terminal.behind(log.stamp())
        if self.stdin == "none":
            terminal = terminal._replace(files=terminal.files.replace("0", ""))
        return terminal

    @property
    def orders(self) -> Orders:
        """Those of the agents that are options."""
        return Orders(
            **{name: value for name, value in vars(self).items() if name in Orders._fields}
        )

    @property
    def names_hosts(self) -> bool:
        return (self.hostfile, self.host_list) != (None, None)


def add_options(parser: argparse.ArgumentParser, *only: str) -> list[argparse.Action]:
    """Add the options, each with all of its spellings. `only`: first words of groups, or names of fields."""
    group: Any = None
    actions = []
    for name, row in options_of(LaunchOptions).items():
        argument, default = row.metadata["option"], row.default
        if title := row.metadata["group"]:
            group = parser.add_argument_group(title)
        if only and not {group.title.split()[0], name} & {*only}:
            continue
        if (variable := variables_of_options().get(name)) and (text := os.environ.get(variable)):
            default = argument.parsed(text, variable)
        # An empty text takes the option of a hostfile back.
        how = (
            {"type": lambda text, parse=argument.parse: text and parse(text)}
            if name in BY_HOSTFILE
            else {}
        )
        # The default of a switch says what the option does, also if a variable has turned it on.
        usual = default if argument.value else row.default
        action = argument.add_to(group, dest=name, default=usual, **how)
        if not argument.value:
            action.default = default
        actions.append(action)
    return actions


@cache
def variables_of_options() -> dict[str, str]:
    """The variables that stand for options, by their fields: MPIDDP_LOG_DIR for --log-dir DIR.

    A job's hosts and ranks, most switches, and an option that may be repeated, stand on the command line alone.
    """
    arguments = {name: row.metadata["option"] for name, row in options_of(LaunchOptions).items()}
    names = [*arguments]
    taken = [
        name
        for name in names[names.index("bind") :]
        if (arguments[name].value or arguments[name].parse is _switch)
        and not arguments[name].repeats
    ]
    return {
        name: f"MPIDDP_{arguments[name].names[-1][2:].upper().replace('-', '_')}" for name in taken
    }


def option_parser() -> argparse.ArgumentParser:
    """The parser. The value `module` or `script` is the command line of the job."""
    parser = OneSentenceParser(
        prog="mpiddp launch",
        usage="%(prog)s [options] (SCRIPT | -m MODULE | -- COMMAND) [ARGS ...]",
        epilog="Exit codes: 0 done, 1 the job failed, 2 bad input, 75 stopped on request, 130 interrupted.",
        record=LaunchOptions,
    )
    parser.elsewhere = table("elsewhere.txt")
    add_options(parser)
    parser.add_argument(
        "--standalone", dest="host_list", action="store_const", const="localhost", help=_HIDDEN
    )
    parser.add_argument("--nnodes", help=_HIDDEN)
    for flag in _OF_ONE_HOST:
        parser.add_argument(flag, f"--{flag[2:].replace('-', '_')}", help=_HIDDEN)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=_HIDDEN)
    parser.add_argument("script", nargs=argparse.REMAINDER, help=_HIDDEN)
    return parser


def parse_options(argv: list[str], verb: str = "mpiddp launch") -> LaunchOptions:
    """The options of `argv`. If the job is one of mpiddp's own verbs, its options are checked too."""
    parser = option_parser()
    line = in_our_words(argv, _spellings(parser))
    is_of_mpirun, argv = line.argv != argv, line.argv
    values = vars(parser.parse_args(argv))
    if is_of_mpirun and not values["quiet"]:
        for sentence in line.sentences(without_values(argv, values["exports"])):
            log.info(sentence)
    if hosts := named_hosts(
        values["hostfile"], values["host_list"], {}, values["login_s"] or SSH.login_s
    ):
        values = vars(parser.parse_args(argv, _of_hostfile(hosts)))
    values |= {name: getattr(LaunchOptions, name) for name in BY_HOSTFILE if values[name] == ""}
    _as_torchrun(parser, values)
    job = entrypoint.read_job(values.pop("module"), values.pop("script"))
    command = job[job[0] in ("-m", "--") :]
    before = without_values(argv[: -len(command)], values["exports"])
    before = before[: -1 if before[-1:] == ["-m"] else None]
    entrypoint.refuse_misplaced(job, _spellings(parser), before, verb)
    if job[:3] == ("-m", "mpiddp", "train"):
        backends = re.findall(r"(?<=\s)--backend[=\s](\S+)", " ".join(job))
        values["backend"] = ["auto", *backends][-1]
    if values["mounts"] and not values["image"]:
        raise UserError("--mount needs an image.", fix="--image IMAGE")
    prefix = values["prefix"] = os.environ.get(variables.PREFIX) or "auto"
    if prefix not in ("auto", "always", "never"):
        raise UserError(f"{variables.PREFIX}={shown(prefix)}: expected auto, always or never.")
    if values["log_dir"] == "":
        raise UserError('--log-dir "": expected a folder.')
    refuse_both({"--hostfile": values["hostfile"], "-H": values["host_list"]})
    values["mpi_args"] = [word for text in values["mpi_args"] for word in shell_words(text)]
    settings = values.setdefault("settings", {})  # of a hostfile; what follows precedes it
    for path in values["env_files"]:
        settings |= read_env_file(path, os.environ)
    settings |= parse_exports(values["exports"], os.environ)
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return LaunchOptions(job, **values)


# A hostfile may choose these: networks, time limits, hosts to leave out, and an image that its runtime keeps: a
# file could be a colleague's. Of variables it may set those of a list, because nobody knows all variables that run
# a program or write a file. None of the list takes a path.
BY_HOSTFILE = tuple(
    name for name, row in options_of(LaunchOptions).items() if row.metadata["by_hostfile"]
)
_OF_A_CLUSTER = (
    "a hostfile may only choose networks, time limits, an image, and hosts to leave out, and set some variables "
    "of NCCL, gloo and UCX"
)


@cache
def variables_of_hostfiles() -> dict[str, str]:
    """The variables that a hostfile may set, each with the reason."""
    return table("hostfile_variables.txt")


def _of_hostfile(hosts: Hosts) -> argparse.Namespace:
    """The values of the options that a hostfile has in lines "#: OPTIONS".

    Colleagues share hostfiles, so these lines run no program and write no file.
    """
    parser = OneSentenceParser(prog="mpiddp launch", add_help=False)
    add_options(parser, *BY_HOSTFILE)
    values = argparse.Namespace(of_hostfile=(), settings={})
    for number, text in hosts.options:
        where = f"{hosts.source}:{number}"
        try:
            words = shell_words(text)
            _, others = parser.parse_known_args(words, values)
            exports, values.exports = values.exports, []
            values.settings |= parse_exports(exports, os.environ)
            others += [values.image] if values.image and Image.of(values.image).is_file else []
            if others:
                raise UserError(f"{shown(others[0])}: {_OF_A_CLUSTER}.")
            for text in exports:
                name, _, value = text.partition("=")
                if name.removesuffix("-") not in variables_of_hostfiles() or "/" in value:
                    (word,) = without_values([text], [text])
                    raise UserError(f"-x {name}: {_OF_A_CLUSTER}.", fix=f"mpiddp launch -x {word}")
        except (UserError, argparse.ArgumentTypeError) as error:
            raise UserError(f"{where}: {str(error).removeprefix('mpiddp launch: ')}") from None
        values.of_hostfile += (f"{where}: {shlex.join(without_values(words, exports))}",)
    return values


def _spellings(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Each option by each of its spellings, including those of other launchers."""
    return {flag: action for flag, action in parser._option_string_actions.items() if flag != "-m"}


def launch_of_train(arguments: Sequence[str]) -> list[str] | None:
    """The arguments of `mpiddp launch` for those of `mpiddp train`; None if none is an option of a launch."""
    options, others = entrypoint.split(arguments, _spellings(option_parser()))
    return [*options, "-m", "mpiddp", "train", *others] if options else None


def _as_torchrun(parser: argparse.ArgumentParser, values: dict[str, Any]) -> None:
    """Accept torchrun's options for one host and for a range of hosts, and refuse those for each host."""
    nnodes = values.pop("nnodes")
    if hosts := re.fullmatch("([1-9][0-9]{0,5}):([1-9][0-9]{0,5})", nnodes or ""):
        least, most = map(int, hosts.groups())
        if least > most or values["min_hosts"] not in (None, least):
            parser.error(f"--nnodes {nnodes}: expected MIN:MAX, and no other --min-hosts")
        if most > 1:
            values["min_hosts"], values["max_hosts"] = least, most
    elif nnodes not in (None, "1"):
        parser.error("unrecognized arguments: --nnodes")
    if nnodes in ("1", "1:1") and (values["hostfile"], values["host_list"]) == (None, None):
        values["host_list"] = "localhost"
    for flag in _OF_ONE_HOST:
        is_given = values.pop(flag[2:].replace("-", "_")) is not None
        if is_given and not (nnodes or values["host_list"] == "localhost"):
            parser.error(f"unrecognized arguments: {flag}")
    values["needs_gpus"] = values["npernode"] == "gpu"
    for name in ("n", "npernode"):
        values[name] = None if values[name] in _BY_GPU else values[name]
