"""The arguments of --mpi-args: the MPI's own options, refused where they contradict those of the launcher.

    mpiddp launch --mpi-args='--mca pml ucx --report-bindings' -H node1:4,node2:4 train.py

An option that is not in these tables is the MPI's own affair. One that moves ranks all the same is found
by the ranks, which compare their hosts with the hostfile.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

from mpiddp.errors import UserError
from mpiddp.launch.starters.detect import RankStarter, StarterKind
from mpiddp.text import shown

# What each kind of option would contradict, and what to write instead.
_INSTEAD = {
    "hosts": "the hosts of the job. Write: mpiddp launch --hostfile FILE, -H or --exclude",
    "counts": "the number of ranks. Write: mpiddp launch -n N or --npernode K",
    "mapping": "the order of the ranks, which is the hostfile's. Leave it out",
    "binding": "--bind. Write: mpiddp launch --bind numa or --bind core",
    "variables": "the variables of the ranks. Write: mpiddp launch -x VAR or --env-file FILE",
    "folder": "the working folder of the ranks, which is this one. Leave it out",
    "agent": "the way to the other hosts. Put options of ssh into ~/.ssh/config",
    "network": "the network of the job. Write: mpiddp launch --interface NAME",
    "program": "the program of the ranks. Leave it out",
    "supervision": "the supervision of the ranks. Leave it out",
}

_OPTIONS: dict[StarterKind, dict[str, str]] = {
    "openmpi": {
        "hosts": "H host hostfile machinefile default-hostfile add-host add-hostfile nolocal novm dvm hnp",
        "counts": "n np c N npernode pernode npersocket ppr max-vm-size oversubscribe",
        "mapping": "map-by rank-by bynode byslot bycore rankfile rf cpus-per-proc cpus-per-rank",
        "binding": "bind-to bind-to-core bind-to-socket bind-to-none cpu-set cpu-list use-hwthread-cpus",
        "variables": "x am tune",
        "folder": "wd wdir set-cwd-to-session-dir preload-binary preload-files",
        "agent": "launch-agent prefix noprefix no-prefix path",
        "program": "app : do-not-launch",
        "supervision": "enable-recovery continuous max-restarts",
    },
    "mpich": {
        "hosts": "f hosts host hostfile machinefile rankmap rmk skip-launch-node order-nodes localhost",
        "counts": "n np ppn",
        "mapping": "map-by",
        "binding": "bind-to membind",
        "variables": "env envlist envall envnone genv genvlist genvall genvnone",
        "folder": "wdir",
        "agent": "launcher launcher-exec bootstrap bootstrap-exec",
        "network": "iface",
        "program": "configfile :",
        "supervision": "disable-auto-cleanup",
    },
    "slurm": {
        "hosts": "w nodelist F nodefile x exclude N nodes jobid r relative",
        "counts": "n ntasks ntasks-per-node ntasks-per-core ntasks-per-socket O overcommit",
        "mapping": "m distribution",
        "binding": "cpu-bind mem-bind",
        "variables": "export export-file mpi",
        "folder": "D chdir",
        "program": "multi-prog preserve-env het-group",
        "supervision": "K kill-on-bad-exit no-kill k",
    },
}
_OPTIONS["intelmpi"] = {
    **_OPTIONS["mpich"],
    "hosts": f"{_OPTIONS['mpich']['hosts']} nolocal hosts-group machine",
    "counts": "n np ppn perhost rr grr",
    "binding": "bind-to membind cpu-bind",
    "folder": "wdir gwdir path gpath",
    "variables": "env envlist envall envnone envexcl genv genvlist genvall genvnone genvexcl",
}

# Open MPI's parameters, as patterns. Others replace those that the launcher would set.
_PARAMETERS = {
    "hosts": "ras ras_* orte_default_hostfile prte_default_hostfile",
    "mapping": "rmaps rmaps_*",
    "binding": "hwloc_base_binding_policy hwloc_default_binding_policy hwloc_base_cpu_*",
    "variables": "mca_base_env_list mca_base_param_files mca_base_envar_file_prefix",
    "agent": "plm plm_* orte_launch_agent prte_launch_agent",
    "network": "btl_tcp_if_* oob_tcp_if_* prte_if_* if_include if_exclude",
    "supervision": "orte_enable_recovery prte_enable_recovery",
}
_PARAMETER_OPTIONS = ("mca", "gmca", "omca", "prtemca", "pmixmca")


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


def check_mpi_args(starter: RankStarter, arguments: Sequence[str]) -> None:
    """Raise UserError for an argument that contradicts what the launcher itself tells this MPI."""
    options = _by_name(_OPTIONS[starter.kind])
    for index, argument in enumerate(arguments):
        for name in _names(starter.kind, argument):
            if kind := options.get(name):
                raise _contradiction(argument, kind)
        if starter.kind == "openmpi" and _names_parameter(argument):
            name = (*arguments, "")[index + 1]
            for pattern, kind in _by_name(_PARAMETERS).items():
                if fnmatchcase(name, pattern):
                    raise _contradiction(f"{argument} {name}", kind)


def parameters_in(arguments: Sequence[str]) -> frozenset[str]:
    """The names of Open MPI's parameters that `arguments` set."""
    return frozenset(name for option, name in pairwise(arguments) if _names_parameter(option))


def _names_parameter(argument: str) -> bool:
    return argument.startswith("-") and argument.lstrip("-") in _PARAMETER_OPTIONS


def _by_name(table: dict[str, str]) -> dict[str, str]:
    return {name: kind for kind, names in table.items() for name in names.split()}


def _names(kind: StarterKind, argument: str) -> Iterator[str]:
    """The names under which the tables may have this argument. Values have none."""
    if argument == ":":
        yield argument
    if not argument.startswith("-"):
        return
    name = argument.lstrip("-").partition("=")[0]
    yield name
    # getopt accepts -n4, but MPIs without it have options of several letters after one dash.
    if kind == "slurm" and re.match("-[A-Za-z]", argument):
        yield argument[1]


def _contradiction(written: str, kind: str) -> UserError:
    return UserError(f"--mpi-args: {shown(written)} would contradict {_INSTEAD[kind]}.")
