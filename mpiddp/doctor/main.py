"""`mpiddp doctor`: what will break on these hosts, before a job does.

    mpiddp doctor --hostfile hostfiles/two_nodes
    mpiddp doctor -H node1,node2 --script train.py --data /data/imagenet --run-dir runs/a
    mpiddp doctor --hostfile hostfiles/two_nodes --quick --json

preflight → facts of each host → all pairs over TCP → a small real job → lines. `--quick` is the preflight of
`mpiddp launch` alone. The rest needs ssh and a python3 on each host.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.arguments import OneSentenceParser
from mpiddp.doctor import compare, network
from mpiddp.doctor import job as small_job
from mpiddp.doctor.job import HEAVY, LIGHT, PROOF
from mpiddp.doctor.report import FAIL, OK, UNKNOWN, Line, as_json, text
from mpiddp.errors import DONE, FAILED, UserError
from mpiddp.hosts import facts, gpus, interfaces
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.interfaces import Interface
from mpiddp.hosts.names import resolve_all
from mpiddp.hosts.remote import Connections, program_with
from mpiddp.launch import plan, preflight
from mpiddp.launch.network import find_network
from mpiddp.launch.options import LaunchOptions, parse_options
from mpiddp.launch.starters.command import RankStarter
from mpiddp.launch.starters.table import find_starter
from mpiddp.paths import named_by
from mpiddp.text import all_of, counted
from mpiddp.world import leave_enclosing_job

_FACTS_S, _STACK_S, _NETWORK_S = 40.0, 70.0, 20.0
_JOB_S, _HANG_S = 90.0, 20  # the launcher names a hang before the doctor ends the job
_NEEDED = ("preflight", "ssh", "versions", "network")  # by the job
_PACKAGES = ("torch", "mpi4py")  # that the preflight compares


class _Preflight(NamedTuple):
    infos: Mapping[Host, preflight.HostInfo]
    complaints: Mapping[Host, str]
    lines: list[Line]


class _Asked(NamedTuple):
    """What the hosts are asked: the question for their facts, that for their libraries, the job's network."""

    facts: dict[str, Any]
    stack: dict[str, Any]
    networks: tuple[str, ...]


def main(argv: list[str]) -> int:
    """Run `mpiddp doctor ARGV`. Returns 1 if a check has failed, else 0.

    Raises:
        UserError: bad input, or no MPI here.
    """
    began = time.monotonic()
    leave_enclosing_job(os.environ)
    options = _parse(argv)
    job = [*_where(options), "--npernode", "1", "--hang-timeout", str(_HANG_S)]
    job += ["-m", small_job.__name__]
    launch = parse_options(job)
    hosts = plan.read_hosts(launch, os.environ)
    python = Path(sys.executable).absolute()
    starter = find_starter(hosts.starter, launch.mpirun, python, os.environ)
    hosts.transport.check_installed()
    resolve_all([host.name for host in hosts.usable])
    checked = _preflight(launch, hosts, starter)
    lines = checked.lines
    if not options.quick:
        asked = _asked(options, launch, hosts, starter, checked.infos)
        lines = _full(hosts, checked, asked, job)
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


def _preflight(launch: LaunchOptions, hosts: Hosts, starter: RankStarter) -> _Preflight:
    checked = plan.run_preflight(launch, hosts, starter, os.environ)
    lines = [Line("preflight", FAIL, *_split(each)) for each in checked.complaints.values()]
    differing = preflight.disagreements(checked.infos.values(), str(starter.program))
    lines += [Line("versions", FAIL, *_split(sentence)) for sentence in differing]
    if not lines:
        count = counted(len(checked.infos), "host")
        said = f"{count} can start ranks" if checked.infos else "no other host was to be asked"
        lines = [Line("preflight", OK, f"{said}, with {starter.name}")]
    return _Preflight(checked.infos, checked.complaints, lines)


def _asked(
    options: argparse.Namespace,
    launch: LaunchOptions,
    hosts: Hosts,
    starter: RankStarter,
    infos: Mapping[Host, preflight.HostInfo],
) -> _Asked:
    folder = plan.working_folder(os.environ)
    folders = {"working": folder, "run": str(Path(folder, options.run_dir))}
    if options.data is not None:
        folders["data"] = str(Path(folder, options.data))
    named = None if launch.mpirun else os.environ.get("MPI4PY_LIBMPI")
    library = named or str(starter.libmpi or "")
    wanted = {
        "names": [host.name for host in hosts.usable],
        "folders": folders,
        "files": _files(Path(folder), options.script),
        "path": os.environ.get("PATH", os.defpath),
    }
    stack = {
        "python": str(Path(sys.executable).absolute()),
        "env": {"MPI4PY_LIBMPI": library} if library else {},
    }
    found = find_network(hosts, infos.values(), launch.interface, dry_run=True)
    return _Asked(wanted, stack, tuple(found.networks))


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


def _full(hosts: Hosts, checked: _Preflight, asked: _Asked, job: Sequence[str]) -> list[Line]:
    begin = f"sys.modules[{network.__name__!r}].main()"
    program = program_with((interfaces, gpus, facts, network), begin)
    known = _PACKAGES if checked.infos else ()
    lines = list(checked.lines)
    with Connections(hosts.usable, hosts.transport, program) as connected:
        answers = connected.ask("facts", asked.facts, limit_s=_FACTS_S)
        found: dict[str, Any] = {host.name: answer for host, answer in answers.items()}
        if found:
            printed = {host.name: each for host, each in connected.printed_before.items()}
            lines += [*compare.shells(printed), *compare.names(found)]
            lines += _stacks(connected, asked.stack, LIGHT, known)
            lines += compare.gpus(found)
            lines += compare.files(found) if asked.facts["files"] else []
            lines += compare.folders(found)
            lines += compare.clocks({host.name: skew for host, skew in connected.skews.items()})
            lines += _pairs(connected, found, asked.networks) if len(found) > 1 else []
        lost = {h: each for h, each in connected.failures.items() if h not in checked.complaints}
        lines += [Line("ssh", FAIL, *_split(sentence)) for sentence in lost.values()]
        line, ranks = _run_job(lines, job)
        of_ranks = {name: ranks.get(each["hostname"], {}) for name, each in found.items()}
        if found and all(
            of_ranks.values()
        ):  # the ranks have loaded torch already, which takes seconds
            loaded = {name: rank["stack"] for name, rank in of_ranks.items()}
            lines += compare.stacks(loaded, known)
            lines += compare.speeds({name: rank["speed"] for name, rank in of_ranks.items()})
            lines += compare.processes(of_ranks, "in a launched process")
        elif found:
            lines += _stacks(connected, asked.stack, HEAVY, known)
            lines += compare.processes(found, "in a login over ssh")
        lines += [Line(question, UNKNOWN, sentence) for question, sentence in connected.refusals]
    return [*lines, line]


def _stacks(
    hosts: Connections, question: dict[str, Any], packages: tuple[str, ...], known: Sequence[str]
) -> list[Line]:
    """Whether the interpreter of the ranks loads the same of these packages on all hosts."""
    name = small_job.__name__
    program = program_with(
        (small_job,), f"import json; print(json.dumps(sys.modules[{name!r}].stack({packages!r})))"
    )
    found = hosts.ask("stack", {**question, "program": program}, limit_s=_STACK_S)
    named = {host.name: each for host, each in found.items()}
    return compare.stacks(named, known) if named else []


def _pairs(hosts: Connections, found: compare.Facts, networks: Sequence[str]) -> list[Line]:
    """Whether each host reaches each other, in each direction at once."""
    secret = secrets.token_hex(32)
    addresses = {name: _address(name, found, networks) for name in found}
    own = {host: addresses[host.name] for host in hosts.hosts if addresses.get(host.name)}
    wanted = {host: {"address": address, "secret": secret} for host, address in own.items()}
    ports = hosts.ask_each("listen", wanted, limit_s=_NETWORK_S)
    peers = {
        host: {"name": host.name, "address": own[host], "port": port}
        for host, port in ports.items()
    }
    questions = {
        host: {"secret": secret, "peers": [peers[other] for other in peers if other != host]}
        for host in peers
    }
    answers = hosts.ask_each("reach", questions, limit_s=_NETWORK_S + len(peers))
    reached = {host.name: answer for host, answer in answers.items()}
    return [*compare.links(found, addresses), *compare.reach(reached, addresses, found)]


def _address(name: str, found: compare.Facts, networks: Sequence[str]) -> str:
    """The host's address on the job's network, else that to which its name leads; "" without any."""
    named = {address for each in found.values() for address in each["names"].get(name, [])}
    best = sorted(
        (each for each in (Interface(**one) for one in found[name]["interfaces"])),
        key=lambda each: (
            each.is_loopback,
            not any(each.matches(network) for network in networks),
            each.address not in named,
            each.is_virtual,
        ),
    )
    return best[0].address if best and not best[0].is_loopback else ""


def _run_job(lines: Sequence[Line], job: Sequence[str]) -> tuple[Line, dict[str, dict[str, Any]]]:
    """Run the job, if nothing that it needs has failed: its line, and what its rank on each host says."""
    if failed := [line.check for line in lines if line.check in _NEEDED and line.status == FAIL]:
        why = f"not run: it needs what has failed ({all_of(list(dict.fromkeys(failed)))})"
        return Line("job", UNKNOWN, why), {}
    fix = shlex.join(["mpiddp", "launch", *job])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mpiddp", "launch", *job],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_JOB_S,
        )
    except subprocess.TimeoutExpired:
        return Line("job", FAIL, f"no end in {_JOB_S:g} s", fix), {}
    proof = [line.partition(PROOF)[2] for line in done.stdout.splitlines() if PROOF in line]
    if done.returncode != DONE or not proof:
        said = [line for line in done.stderr.splitlines() if line.startswith("mpiddp: ")]
        last = (said or done.stderr.splitlines() or ["no output"])[-1].removeprefix("mpiddp: ")
        return Line("job", FAIL, f"exit code {done.returncode}: {last}", fix), {}
    ranks = {rank["hostname"]: rank for rank in json.loads(proof[-1])}
    if wrong := [name for name, rank in ranks.items() if rank["wrong"]]:
        return Line("job", FAIL, f"an all-reduce has a wrong sum on {all_of(wrong)}", fix), ranks
    slowest = max(rank["seconds"] for rank in ranks.values())
    fact = f"an all-reduce of 16 MB is right on {counted(len(ranks), 'host')}, {slowest:.2f} s"
    return Line("job", OK, fact), ranks


def _split(sentence: str) -> tuple[str, str]:
    """A sentence of the preflight into the fact, and what fixes it."""
    fact, _, fix = sentence.partition(". ")
    return fact.rstrip("."), fix.rstrip(".")
