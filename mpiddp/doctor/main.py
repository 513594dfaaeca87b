"""`mpiddp doctor`: what will break on these hosts, before a job does.

    mpiddp doctor hostfiles/two_nodes
    mpiddp doctor -H node1,node2 --script train.py --data /data/imagenet
    mpiddp doctor hostfiles/two_nodes --quick --json

Its parts are the preflight of a launch, the facts of each host, all pairs of hosts over TCP, and a small real
job. All but the job share one login to each host, and each shows its lines at its end. `--quick`: the preflight.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from mpiddp.arguments import OURS, OneSentenceParser, Option, as_arguments
from mpiddp.doctor import compare, there, trial_job
from mpiddp.doctor.compare import FAIL, OK, UNKNOWN, WARN, Line, results
from mpiddp.errors import DONE, FAILED, UserError
from mpiddp.hosts import interfaces, program_files, reachability
from mpiddp.hosts.complaints import Answer
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.processes import child_process
from mpiddp.hosts.ssh import Logins, ask_hosts, program_that_prints
from mpiddp.hosts.where import FILE, settle
from mpiddp.launch.plan import job_plan, preflight
from mpiddp.launch.plan.command import Request
from mpiddp.launch.plan.environment import Environment
from mpiddp.launch.plan.job_network import find_network
from mpiddp.launch.plan.options import add_options, parse_options
from mpiddp.launch.plan.starters import find_starter
from mpiddp.launch.run.outcome_file import why_failed
from mpiddp.text import all_of, as_json, counted, escaped, parts, sentence_and_fix
from mpiddp.world import leave_enclosing_job

_FACTS_S = 110.0  # a host with a slow name server and slow disks takes so long
_START_S = 10.0  # at least, for the program that tries all pairs to start on all hosts
_JOB_S, _HANG_S = 90.0, 20  # the launcher names a hang before the doctor ends the job
_ORDER = (FAIL, WARN, UNKNOWN, OK)
_WIDTH = len("preflight")  # the longest name of a check
_NEEDED = ("preflight", "ssh", "versions", "network")  # if one has failed, the job does not run

Ask = Callable[..., dict[Host, Answer]]  # `ask_hosts` with the Python of the ranks


def main(argv: list[str]) -> int:
    """Run `mpiddp doctor ARGV`. Returns 1 if a check has failed, else 0. Raises UserError."""
    began = time.monotonic()
    leave_enclosing_job(os.environ)
    options, where = _parse(argv)
    job = [*where, "--npernode", "1", "--hang-timeout", str(_HANG_S), "-m", trial_job.__name__]
    launch = parse_options(job)
    folders = _folders(options)
    hosts = job_plan.read_hosts(launch, os.environ)
    starter = find_starter(hosts.starter, launch.mpirun, job_plan.PYTHON, os.environ)
    lines = list[Line]()

    def add(new: Sequence[Line]) -> None:
        """Show the lines of checks that have ended. With --json, all lines are printed at the end."""
        lines.extend(new)
        if new and not options.json:
            print(text(new), flush=True)

    with closing(Logins()) as logins:
        checked = job_plan.run_preflight(
            launch, hosts, starter, Environment.of(os.environ, launch.settings), logins
        )
        add(_of_preflight(checked, starter.name))
        if not options.quick:
            ask = partial(
                ask_hosts, python=str(job_plan.PYTHON), transport=hosts.transport, logins=logins
            )
            asked = [host for host in hosts.usable if host not in checked.silent]
            library = os.environ.get("MPI4PY_LIBMPI", "") if launch.mpirun is None else ""
            library = library or str(starter.libmpi or "")
            program = _facts_program(options, hosts, folders, library)
            answers = ask(asked, program, work_s=_FACTS_S)
            for host, answer in answers.items():
                if answer.why and host not in checked.complaints:
                    check = "versions" if answer.has_failed_there else "ssh"
                    fact, fix = sentence_and_fix(answer.why)
                    add([Line(check, FAIL, fact.rstrip("."), fix)])
            if answered := [host for host, answer in answers.items() if not answer.why]:
                facts = {host.name: answers[host].value for host in answered}
                every = "every host" + ("" if len(facts) == len(hosts.usable) else " that answers")
                add(_of_facts(facts, folders, every))
                request = Request(hosts, (), folders[0])
                request = find_network(request, checked.infos, launch.interface, dry_run=True)
                # If a host has no address on the job's network, the address to which ssh connects is tried.
                by_ssh = {host.name: info.address for host, info in checked.infos.items()}
                add(_pairs(ask, answered, {**by_ssh, **request.addresses}, checked.start_s))
            add([_run_job(lines, job)])
    seconds = time.monotonic() - began
    names = [host.name for host in hosts.usable]
    if options.json:
        worst = min((line.status for line in lines), key=_ORDER.index, default=OK)
        report = {"hosts": names, "seconds": round(seconds, 2), "status": worst}
        print(as_json("doctor", {**report, "lines": [asdict(line) for line in lines]}))
    else:
        print(summary(lines, len(names), seconds))
    return FAILED if any(line.status == FAIL for line in lines) else DONE


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the arguments for `mpiddp launch` that are among them."""
    parser = OneSentenceParser(
        prog="mpiddp doctor",
        description="Check the hosts of a job, and all pairs of them: names, ssh, versions, GPUs, limits, "
        "folders, the network, and a small real job. Each line is ok, warn, fail or unknown.",
        epilog="Exit codes: 0 nothing failed, 1 a check failed, 2 it could not run.",
    )
    where = add_options(parser, "hostfile", "host_list", "mpirun", "interface", "login_s")
    for option in (
        FILE,
        Option("--script", value="FILE", help="compare this script on all hosts"),
        Option("--data", value="DIR", help="check this folder of data on all hosts"),
        Option("--quick", help="the preflight of a launch alone"),
        Option("--json", help="print JSON"),
    ):
        option.add_to(parser)
    settle(options := parser.parse_args(argv))
    return options, as_arguments(where, options)


def _of_preflight(checked: preflight.Checked, mpi: str) -> list[Line]:
    lines = [
        Line("versions" if " differs: " in fact else "preflight", FAIL, fact.rstrip("."), fix)
        for complaint in checked.complaints.values()
        for fact, fix in parts(complaint)
    ]
    can_start = f"{counted(len(checked.infos), 'host')} can start ranks"
    fact = can_start if checked.infos else "no other host was to be asked"
    lines = lines or [Line("preflight", OK, f"{fact}, with {mpi}")]
    notes = [
        (WARN, fact.rstrip("."), fix)
        for texts in checked.notes.values()
        for text in texts
        for fact, fix in parts(text)
    ]
    gpus = {host.name: gpus for host, gpus in checked.gpus.items()}
    alike = "the same on every host, unused and without errors"
    fact = alike if any(gpus.values()) else "no host has any"
    return lines + results("GPUs", [*notes, *compare.gpus(gpus)], fact)


def _folders(options: argparse.Namespace) -> list[str]:
    """The folders that every host needs: the working folder, and the folder of --data."""
    folder, script = job_plan.working_folder(os.environ), options.script or ""
    if script and not os.path.isfile(Path(folder, script)):  # noqa: PTH113 - it raises nothing
        raise UserError(f"--script {script} not found (looked in {folder}).")
    return [folder, *([] if options.data is None else [str(Path(folder, options.data))])]


def _facts_program(
    options: argparse.Namespace, hosts: Hosts, folders: Sequence[str], library: str
) -> str:
    """The program that prints a host's facts. `library` is the path of MPI's, "" if mpi4py finds it."""
    script, folder = options.script or "", folders[0]
    wanted = {
        "names": [host.name for host in hosts.usable if not host.address],
        "folders": folders,
        "program": ("script" if script else "", script, folder, program_files.import_folders()),
        "library": library,
        "packages": [str(Path(folder, path)) for path in program_files.python_path(os.environ)],
    }
    return program_that_prints((interfaces, program_files, there), f"facts({wanted!a})")


def _of_facts(facts: compare.Facts, folders: Sequence[str], every: str) -> list[Line]:
    """The lines of the checks that compare the facts of hosts. `every` stands for all these hosts."""
    stacks = {name: host["stack"] for name, host in facts.items()}
    packages = ("mpi4py", "python", "torch")
    versions = {f"{name} {stack[name]}" for stack in stacks.values() for name in packages}
    alike = f"the same on {every}: {', '.join(sorted(versions))}"
    return [
        *results("names", compare.names(facts), f"{every} resolves every name to the same host"),
        *results("files", compare.files(facts), "no file of a script differs"),
        *results("folders", compare.folders(facts, folders), f"{every} can read them"),
        *results("limits", compare.processes(facts), "ulimit and /dev/shm suffice"),
        *results("versions", compare.stacks(stacks), alike),
    ]


def _pairs(
    ask: Ask, hosts: Sequence[Host], addresses: Mapping[str, str], start_s: float
) -> list[Line]:
    """The lines about pairs of hosts that do not reach each other. All directions are tried at once."""
    if len(hosts) < 2:
        return []
    to_meet = {host.name: addresses[host.name] for host in hosts if addresses.get(host.name)}
    hosts = [host for host in hosts if host.name in to_meet]
    start_s = max(start_s, _START_S)
    for port in random.sample(reachability.PORTS, reachability.MOST_PORTS):
        call = f"meet({to_meet!a}, {port}, {start_s}, {len(to_meet)})"
        program = program_that_prints((interfaces, reachability), call)
        answers = ask(hosts, program, work_s=2 * start_s)
        met = {host.name: answer.value for host, answer in answers.items() if not answer.why}
        if None not in met.values():
            break
        met = {}  # another program has this port on a host
    if not (count := sum(map(len, met.values()))):
        return [Line("network", UNKNOWN, "no direction between the hosts was tried")]
    findings = [(FAIL, fact, fix) for _, fact, fix in reachability.blocked(met, to_meet, port)]
    return results("network", findings, f"all {count} directions open")


def _run_job(lines: Sequence[Line], job: Sequence[str]) -> Line:
    """The line of the job, which runs if nothing that it needs has failed."""
    if failed := [line.check for line in lines if line.check in _NEEDED and line.status == FAIL]:
        why = f"not run: it needs what has failed ({all_of(list(dict.fromkeys(failed)))})"
        return Line("job", UNKNOWN, why)
    fix = shlex.join(["mpiddp", "launch", *job])
    with TemporaryDirectory(prefix="mpiddp-doctor-") as folder:
        report = Path(folder, "report.json")
        launch = [sys.executable, *OURS, "launch", "--grace", "1s", "--report", str(report), *job]
        with child_process(launch, subprocess.PIPE, subprocess.PIPE) as launcher:
            try:
                stdout, stderr = launcher.communicate(timeout=_JOB_S)
            except subprocess.TimeoutExpired:
                return Line("job", FAIL, f"no end in {_JOB_S:g} s", fix)
        _, proof, printed = stdout.rpartition(trial_job.PROOF)
        if launcher.returncode != DONE or not proof:
            return Line(
                "job", FAIL, f"exit code {launcher.returncode}: {why_failed(report, stderr)}", fix
            )
    ranks = json.loads(printed.splitlines()[0])
    if wrong := [rank["hostname"] for rank in ranks if rank["wrong"]]:
        return Line("job", FAIL, f"an all-reduce has a wrong sum on {all_of(wrong)}", fix)
    slowest = max(rank["seconds"] for rank in ranks)
    fact = f"an all-reduce of 16 MB is right on {counted(len(ranks), 'host')}, {slowest:.2f} s"
    return Line("job", OK, fact)


def text(lines: Sequence[Line]) -> str:
    """The lines of checks as a text: failures first, then warnings, and the ok lines last."""
    rows = []
    for line in sorted(lines, key=lambda line: _ORDER.index(line.status)):
        rows.append(f"{line.status:<7}  {line.check:<{_WIDTH}}  {escaped(line.fact)}")
        if line.fix:
            rows.append(f"{'':<7}  {'':<{_WIDTH}}  → {escaped(line.fix)}")
    return "\n".join(rows)


def summary(lines: Sequence[Line], hosts: int, seconds: float) -> str:
    """ "4 hosts, 2 fail, 11 ok, in 9.2 s"."""
    counts = {status: sum(line.status == status for line in lines) for status in _ORDER}
    results = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{counted(hosts, 'host')}, {results}, in {seconds:.1f} s"
