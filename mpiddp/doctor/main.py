"""`mpiddp doctor`: what will break on these hosts, before a job does.

    mpiddp doctor --hostfile hostfiles/two_nodes
    mpiddp doctor -H node1,node2 --script train.py --data /data/imagenet --run-dir runs/a
    mpiddp doctor --hostfile hostfiles/two_nodes --quick --json

`--quick` is the preflight of `mpiddp launch` alone. The full part asks an agent on each host, which needs
ssh and a python3, then runs a small job with `mpiddp launch`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.arguments import OneSentenceParser
from mpiddp.doctor import compare, stack
from mpiddp.doctor.compare import GLOO
from mpiddp.doctor.examine import LINK, Examined, Wanted, ask_stacks, examine
from mpiddp.doctor.hosts import Agents
from mpiddp.doctor.job import PROOF
from mpiddp.doctor.report import FAIL, OK, UNKNOWN, Line, as_json, text
from mpiddp.errors import DONE, FAILED, UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import resolve_all
from mpiddp.hosts.sockets import port_in
from mpiddp.launch import plan, preflight, remembered
from mpiddp.launch.network import find_network
from mpiddp.launch.options import LaunchOptions, parse_options
from mpiddp.launch.starters.command import RankStarter
from mpiddp.launch.starters.table import find_starter
from mpiddp.paths import named_by
from mpiddp.text import all_of, counted
from mpiddp.world import leave_enclosing_job

_JOB_S = 90.0
_NEEDED = ("preflight", "ssh", "versions", "network", "ports")  # by the job
_PACKAGES = ("torch", "mpi4py")  # that the preflight compares

Figures = dict[str, dict[str, float]]  # of each host, by its name


class _Job(NamedTuple):
    """The small job's line, and what its ranks say of their processes by their own name of their host."""

    line: Line
    ranks: Mapping[str, dict[str, Any]]


class _Quick(NamedTuple):
    """The preflight's results, and as lines."""

    infos: Mapping[Host, preflight.HostInfo]
    complaints: Mapping[Host, str]
    lines: list[Line]


def main(argv: list[str]) -> int:
    """Run `mpiddp doctor ARGV`. Returns 1 if a check has failed, else 0.

    Raises:
        UserError: bad input, or no MPI here.
    """
    began = time.monotonic()
    leave_enclosing_job(os.environ)
    options = _parse(argv)
    job = [*_where(options), "--npernode", "1", "-m", "mpiddp.doctor.job"]
    launch = parse_options(job)
    hosts = plan.read_hosts(launch.where, os.environ)
    python = Path(sys.executable).absolute()
    starter = find_starter(hosts.starter, launch.how.mpirun, python, os.environ)
    hosts.transport.check_installed()
    resolve_all([host.name for host in hosts.usable])
    if options.quick:
        lines = _quick(launch, hosts, starter).lines
    else:
        lines = _full(options, launch, hosts, starter, job)
    seconds = time.monotonic() - began
    names = [host.name for host in hosts.usable]
    print(as_json(lines, names, seconds) if options.json else text(lines, len(names), seconds))
    return FAILED if any(line.status == FAIL for line in lines) else DONE


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = OneSentenceParser(
        prog="mpiddp doctor",
        description="Check the hosts of a job, and all pairs of them: names, ssh, versions, GPUs, limits, "
        "folders, clocks, the network, and a small real job. Each line is ok, warn, fail or unknown.",
        epilog="Exit codes: 0 nothing failed, 1 a check failed, 2 it could not run.",
        allow_abbrev=False,
    )
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--hostfile", metavar="FILE", help="file of hosts, as for mpiddp launch")
    either.add_argument("-H", dest="host_list", metavar="H1,H2", help="hosts on the command line")
    parser.add_argument("--mpirun", metavar="PATH", help="mpirun of the MPI to use")
    parser.add_argument("--interface", metavar="NAME", help="network interface for the job")
    parser.add_argument("--script", metavar="FILE", help="compare this script on all hosts")
    parser.add_argument("--data", metavar="DIR", help="check this folder of data on all hosts")
    parser.add_argument(
        "--run-dir",
        metavar="DIR",
        default="runs",
        help="the folder for checkpoints (default: runs)",
    )
    parser.add_argument("--quick", action="store_true", help="the preflight of a launch alone")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def _where(options: argparse.Namespace) -> list[str]:
    """The options for `mpiddp launch`."""
    given = {
        "--hostfile": options.hostfile,
        "-H": options.host_list,
        "--mpirun": options.mpirun,
        "--interface": options.interface,
    }
    return [part for name, value in given.items() if value is not None for part in (name, value)]


def _quick(launch: LaunchOptions, hosts: Hosts, starter: RankStarter) -> _Quick:
    """The preflight, and its comparison of versions."""
    checked = plan.run_preflight(launch, hosts, starter, os.environ)
    infos, complaints = checked.infos, checked.complaints
    lines = [Line("preflight", FAIL, *_split(complaint)) for complaint in complaints.values()]
    differing = preflight.disagreements(infos.values(), str(starter.program))
    lines += [Line("versions", FAIL, *_split(sentence)) for sentence in differing]
    if not lines:
        names = [host.name for host in infos]
        said = (
            f"{counted(len(names), 'host')} can start ranks"
            if names
            else "no other host was to be asked"
        )
        lines = [Line("preflight", OK, f"{said}, with {starter.name}")]
    return _Quick(infos, complaints, lines)


def _full(
    options: argparse.Namespace,
    launch: LaunchOptions,
    hosts: Hosts,
    starter: RankStarter,
    job: Sequence[str],
) -> list[Line]:
    with Agents(hosts.usable, hosts.transport) as agents:  # they log in meanwhile
        quick = _quick(launch, hosts, starter)
        wanted = _wanted(options, launch, hosts, starter, quick.infos)
        found = examine(agents, wanted)
        lost = {h: each for h, each in agents.failures.items() if h not in quick.complaints}
        lines = [
            *quick.lines,
            *(Line("ssh", FAIL, *_split(sentence)) for sentence in lost.values()),
            *found.lines,
        ]
        done = _run_with(lines, job)
        # The ranks have loaded torch already, which takes seconds.
        stacks = {n: done.ranks.get(each["hostname"]) for n, each in found.facts.items()}
        if found.facts and all(stacks.values()):
            loaded = {name: rank["stack"] for name, rank in stacks.items() if rank}
            lines += compare.stacks(loaded, wanted.known)
        else:
            lines += ask_stacks(agents, wanted, stack.HEAVY)
    figures = _with_job(found, done.ranks)
    if any(what not in found.figures[name] for name, what in compare.slow_hosts(figures)):
        again = _run_job(job)  # another program may have disturbed one
        figures = _best(figures, _with_job(found, again.ranks))
    remembered.note_figures(launch.where, hosts, figures, compare.slow_hosts(figures))
    named = {name: _without_link(each) for name, each in figures.items()}
    speeds = compare.speeds(named) if found.facts else []
    speeds += compare.unjudged(found.facts) if done.ranks else []
    return [*lines, *speeds, done.line, *_processes(found.facts, done.ranks)]


def _run_with(lines: Sequence[Line], job: Sequence[str]) -> _Job:
    """Run the job, if what it needs has not failed."""
    if failed := [line.check for line in lines if line.check in _NEEDED and line.status == FAIL]:
        why = f"not run: it needs what has failed ({all_of(list(dict.fromkeys(failed)))})"
        return _Job(Line("job", UNKNOWN, why), {})
    return _run_job(job)


def _with_job(found: Examined, ranks: Mapping[str, Mapping[str, Any]]) -> Figures:
    """The figures with those of the job."""
    figures = {name: dict(each) for name, each in found.figures.items()}
    is_judged = not compare.busy(found.facts)
    for name, own in figures.items():
        measured = ranks.get(found.facts[name]["hostname"], {}).get("figures", {})
        own |= {w: value for w, value in measured.items() if is_judged or not w.endswith(GLOO)}
    return figures


def _without_link(figures: Mapping[str, float]) -> dict[str, float]:
    """The figures but that of the link, whose directions have lines of their own."""
    return {what: value for what, value in figures.items() if what != LINK}


def _best(figures: Figures, others: Figures) -> Figures:
    return {
        name: {what: max(value, others[name].get(what, 0.0)) for what, value in each.items()}
        for name, each in figures.items()
    }


def _wanted(
    options: argparse.Namespace,
    launch: LaunchOptions,
    hosts: Hosts,
    starter: RankStarter,
    infos: Mapping[Host, preflight.HostInfo],
) -> Wanted:
    folder = plan.working_folder(os.environ)
    folders = {"working": folder, "run": str(Path(folder, options.run_dir))}
    if options.data is not None:
        folders["data"] = str(Path(folder, options.data))
    named = None if launch.how.mpirun else os.environ.get("MPI4PY_LIBMPI")
    library = named or str(starter.libmpi or "")
    return Wanted(
        python=str(Path(sys.executable).absolute()),
        env={"MPI4PY_LIBMPI": library} if library else {},
        path=os.environ.get("PATH", os.defpath),
        folders=folders,
        files=_files(Path(folder), options.script),
        port=port_in(os.environ),
        known=_PACKAGES if infos else (),
        networks=find_network(hosts, infos.values(), launch.how.interface, dry_run=True).networks,
    )


def _files(folder: Path, script: str | None) -> tuple[str, ...]:
    """The script, and the modules beside it."""
    if script is None:
        return ()
    path = folder / script
    with named_by("--script"):
        is_file = path.is_file()
    if not is_file:
        raise UserError(f"--script {script} not found (looked in {folder}).")
    return (str(path), *sorted(str(each) for each in path.parent.glob("*.py") if each != path))


def _run_job(job: Sequence[str]) -> _Job:
    command = [sys.executable, "-m", "mpiddp", "launch", "--prefix", "never", *job]
    mend = shlex.join(["mpiddp", "launch", *job])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_JOB_S,
        )
    except subprocess.TimeoutExpired:
        return _Job(Line("job", FAIL, f"no end in {_JOB_S:g} s", mend), {})
    proof = [line for line in done.stdout.splitlines() if line.startswith(PROOF)]
    if done.returncode != DONE or not proof:
        said = [line for line in done.stderr.splitlines() if line.startswith("mpiddp: ")]
        last = (said or done.stderr.splitlines() or ["no output"])[-1].removeprefix("mpiddp: ")
        return _Job(Line("job", FAIL, f"exit code {done.returncode}: {last}", mend), {})
    ranks = {rank["hostname"]: rank for rank in json.loads(proof[-1].removeprefix(PROOF))}
    if wrong := [name for name, rank in ranks.items() if rank["wrong"]]:
        fact = f"an all-reduce has a wrong sum on {all_of(wrong)}"
        return _Job(Line("job", FAIL, fact, mend), ranks)
    slowest = max(rank["seconds"] for rank in ranks.values())
    fact = f"an all-reduce of 16 MB is right on {counted(len(ranks), 'host')}, {slowest:.2f} s"
    return _Job(Line("job", OK, fact), ranks)


def _processes(facts: compare.Facts, ranks: Mapping[str, dict[str, Any]]) -> list[Line]:
    """Limits as the ranks of the job have them; without a job, as a login over ssh has them."""
    named = {name: ranks.get(found["hostname"]) for name, found in facts.items()}
    if facts and all(named.values()):
        ranked = {name: found for name, found in named.items() if found}
        return compare.processes(ranked, "in a launched process")
    return compare.processes(facts, "in a login over ssh") if facts else []


def _split(sentence: str) -> tuple[str, str]:
    """A sentence of the preflight into the fact, and what mends it."""
    fact, _, mend = sentence.partition(". ")
    return fact.rstrip("."), mend.rstrip(".")
