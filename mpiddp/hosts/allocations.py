"""The table of schedulers, and the hosts that they grant, for a launch without --hostfile and -H.

    salloc --nodes 2 --ntasks-per-node 4 mpiddp launch train.py

A row's reader returns None if the job has no other host: then it is no allocation. A UserError says what is
missing, because a job must never start on one host of several in silence.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

from mpiddp.errors import UserError
from mpiddp.hosts.gpus import tool_output
from mpiddp.hosts.hostfile import Host, Hosts, parse_hostfile, read_hostfile
from mpiddp.hosts.names import MAX_HOSTS, expand_nodelist
from mpiddp.hosts.processes import fact_of
from mpiddp.hosts.transport import BLAUNCH, QRSH, SRUN, SSH, SSH_IN_PBS, Transport
from mpiddp.text import parse_whole, shown

# Kubeflow's MPI operator sets the first three, and Kubeflow Trainer the fourth.
MPIJOB_HOSTFILES = (
    "OMPI_MCA_orte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
    "PRTE_MCA_prte_default_hostfile",
)
# Variables with a number of hosts whose names are not read, who sets them, and what to do instead.
UNLISTED = {
    "PET_NNODES": ("a PyTorchJob or TrainJob", "start the script with torchrun, or use an MPIJob"),
    "AWS_BATCH_JOB_NUM_NODES": ("AWS Batch", "start the script with torchrun on each node"),
}
NAME_THEM = "name the hosts with --hostfile or -H, or write -H localhost for this machine alone"
_ISO = "%Y-%m-%dT%H:%M:%S"
_FLUX_S = 20.0  # that flux may take to name the hosts
_CLOCK_S = 5.0  # that a scheduler's program may take to tell the end of the job


def slurm(env: Mapping[str, str]) -> Hosts | None:
    """Slurm: SLURM_JOB_NODELIST has the hosts, and their slots are the tasks that the job requested.

    Without --ntasks or --ntasks-per-node they are its GPUs, or 1 on a CPU host. Slurm would count cores.
    """
    job = env["SLURM_JOB_ID"]
    if (components := env.get("SLURM_HET_SIZE", "")) not in ("", "1"):
        raise UserError(
            f"SLURM_HET_SIZE={shown(components)}: Slurm job {job} is heterogeneous, and the hosts of its "
            "components are not read.",
            fix=NAME_THEM,
        )
    nodelist = _needed(env, "SLURM_JOB_NODELIST", "SLURM_JOB_ID")
    try:
        names = expand_nodelist(nodelist)
        if "SLURM_NTASKS" in env or "SLURM_NTASKS_PER_NODE" in env:
            counts = env.get("SLURM_TASKS_PER_NODE", f"1(x{len(names)})")
            slots = expand_counts(counts)
            if len(slots) != len(names):
                fit = f"SLURM_TASKS_PER_NODE={shown(counts)} does not fit SLURM_JOB_NODELIST={shown(nodelist)}"
                raise UserError(
                    f"{fit}, as in a step of srun.", fix="start mpiddp launch without srun"
                )
        else:
            slots = _gpus_of_slurm(env, names)
    except ValueError as error:
        raise UserError(
            f"the variables of Slurm job {job} cannot be read: {error}.", fix=NAME_THEM
        ) from None
    hosts = (Host(name, slots=count) for name, count in zip(names, slots, strict=True))
    return Hosts(f"Slurm job {job}", tuple(hosts))


def _gpus_of_slurm(env: Mapping[str, str], names: Sequence[str]) -> list[int]:
    """The GPUs of each host, 1 on CPU hosts. Raises ValueError if nothing says it.

    A batch script has the first variable, for its own host. The shell of salloc has only the request, such as
    "2" or "a100:2,h100:1". The last variable is a sum over all hosts, of which only scontrol tells the parts.
    """
    sums = []
    for variable in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_GPUS"):
        numbers = [part.rpartition(":")[2] for part in (env.get(variable) or "0").split(",")]
        if not all(re.fullmatch("[0-9]{1,6}", number) for number in numbers):
            raise ValueError(f"{variable}={shown(env[variable])} is not a number of GPUs")
        sums.append(sum(map(int, numbers)))
    on_node, per_node, total = sums
    if not per_node and total not in (0, on_node * len(names)):
        text = _answer(env, "scontrol", "--details", "show", "job", env["SLURM_JOB_ID"])
        gpus = dict[str, int]()  # "Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=gpu:a100:2(IDX:0-1)"
        for nodes, granted in re.findall(r"\bNodes=(\S+) CPU_IDs=.* GRES=(\S*)", text):
            count = sum(map(int, re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", granted)))
            gpus |= dict.fromkeys(expand_nodelist(nodes), count)
        if sum(gpus.values()) != total or not gpus.keys() >= {*names}:
            raise ValueError(
                f"SLURM_GPUS={total} does not tell which of {len(names)} hosts has how many"
            )
        return [gpus[name] for name in names]
    return [on_node or per_node or 1] * len(names)


def pbs(env: Mapping[str, str]) -> Hosts | None:
    """PBS Pro, OpenPBS and Torque: PBS_NODEFILE has a line for each slot.

    If it lists each host once, the slots are the GPUs of each host, or 1 on a CPU host.
    """
    return _of_file(env, "PBS_NODEFILE", _job(env, "PBS", "PBS_JOBID"), "PBS_JOBID")


def lsf(env: Mapping[str, str]) -> Hosts | None:
    """LSF: LSB_MCPU_HOSTS has each host with its slots. LSB_DJOB_HOSTFILE has a line for each slot."""
    source, name = _job(env, "LSF", "LSB_JOBID"), "LSB_MCPU_HOSTS"
    if not env.get(name):
        return _of_file(env, "LSB_DJOB_HOSTFILE", source, "LSB_JOBID")
    words = env[name].split()
    pairs = zip_longest(words[::2], words[1::2], fillvalue="")
    lines = "\n".join(f"{host} slots={count}" for host, count in pairs)
    return replace(parse_hostfile(os.fsencode(lines), name, may_repeat=True), source=source)


def grid_engine(env: Mapping[str, str]) -> Hosts | None:
    """Grid Engine: PE_HOSTFILE has a line for each host, or for each of its queues, with the slots."""
    if not env.get("PE_HOSTFILE") and env.get("NHOSTS", "1") in ("", "1"):
        return None  # a job without a parallel environment
    return _of_file(env, "PE_HOSTFILE", _job(env, "Grid Engine", "JOB_ID"), "NHOSTS")


def flux(env: Mapping[str, str]) -> Hosts | None:
    """Flux: the `flux` program knows the hosts of the instance that FLUX_URI names."""
    arguments = ("getattr", "hostlist")
    answer = tool_output("flux", arguments, env.get("PATH"), _FLUX_S, env, subprocess.STDOUT)
    last = "no answer" if answer is None else answer.strip().rpartition("\n")[2]
    try:
        names = expand_nodelist(last)
    except ValueError:
        reason = shown(last) or "it is not on PATH, or prints nothing"
        raise UserError(
            f"FLUX_URI is set, but flux getattr hostlist fails: {reason}.", fix=NAME_THEM
        ) from None
    # An instance may have several brokers on a host.
    return Hosts("the Flux instance", tuple(map(Host, dict.fromkeys(names))))


def mpijob(env: Mapping[str, str]) -> Hosts | None:
    """Kubeflow's MPIJob: the launcher pod has a hostfile, which a variable of the MPI names."""
    if env.get("K_MPI_JOB_ROLE") == "worker":
        raise UserError(
            "this pod is a worker of an MPIJob, whose hosts only the launcher pod knows.",
            fix="write mpiddp launch in the command of the Launcher, and sshd in that of the Worker",
        )
    name = next(
        (name for name in MPIJOB_HOSTFILES if env.get(name)),
        f"a variable such as {MPIJOB_HOSTFILES[0]}",
    )
    return _of_file(env, name, f"the hostfile of {name}", "K_MPI_JOB_ROLE")


def skypilot(env: Mapping[str, str]) -> Hosts | None:
    """SkyPilot: SKYPILOT_NODE_IPS has a line for each node, all of which run the task's commands."""
    name, count = "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES"
    if env.get(count, "").strip() in ("", "1") and len(env.get(name, "").split()) < 2:
        return None
    lines = _needed(env, name, count)
    if _needed(env, rank := "SKYPILOT_NODE_RANK", name) != "0":
        sentence = f"{rank}={shown(env[rank])}: node 0 of this SkyPilot task starts the ranks of all nodes."
        raise UserError(sentence, fix=f'if [ "${rank}" = 0 ]; then mpiddp launch …; fi')
    return replace(parse_hostfile(os.fsencode(lines), name), source="the SkyPilot task")


def unlisted(env: Mapping[str, str]) -> None:
    """PyTorchJob, TrainJob, AWS Batch: refused, because mpiddp does not read the names of their hosts."""
    for count, (name, instead) in UNLISTED.items():
        if env.get(count, "").strip() not in ("", "1"):
            raise UserError(
                f"{count}={shown(env[count])}: {name} has started this process on one of several hosts, "
                "whose names mpiddp does not read.",
                fix=f"{instead}; or {NAME_THEM}",
            )


def _job(env: Mapping[str, str], scheduler: str, id: str) -> str:
    return f"{scheduler} job {env.get(id, '')}".rstrip()


def _of_file(env: Mapping[str, str], name: str, source: str, proof: str) -> Hosts:
    """The hosts in the file that the variable `name` names. `source` is the job, for messages."""
    return replace(read_hostfile(_needed(env, name, proof)), source=source)


def _needed(env: Mapping[str, str], name: str, proof: str) -> str:
    """The value of the variable `name`, which comes with `proof`. Raises UserError."""
    if not env.get(name):
        raise UserError(
            f"{proof}={shown(env.get(proof, ''))} is set but {name} is not: this is only a part of an "
            "allocation's environment.",
            fix=NAME_THEM,
        )
    return env[name]


def _left_of_slurm(env: Mapping[str, str]) -> float:
    """By the variable of newer versions, else by `squeue`: "2026-11-29T12:16:44"."""
    if end := env.get("SLURM_JOB_END_TIME"):
        return float(end) - time.time()
    env = {**env, "SLURM_TIME_FORMAT": "standard"}
    text = _answer(env, "squeue", "--noheader", "--format=%e", f"--jobs={env['SLURM_JOB_ID']}")
    return _until(time.strptime(text.strip(), _ISO), "0")


def _left_of_pbs(env: Mapping[str, str]) -> float:
    """By `qstat -f` of PBS Pro or Torque: "Resource_List.walltime = 04:00:00", and when the job began."""
    text = _answer(env, "qstat", "-f", env["PBS_JOBID"])
    (limit,) = re.findall(r"Resource_List\.walltime = (\S+)", text)
    (began,) = re.findall(r"\b(?:stime|start_time) = (.+)", text)
    return _until(time.strptime(began), limit)


def _left_of_lsf(env: Mapping[str, str]) -> float:
    """By `bjobs`: "3:58 L" are hours and minutes up to a limit; an estimate has another letter."""
    text = _answer(env, "bjobs", "-noheader", "-o", "time_left", env["LSB_JOBID"])
    ((hours, minutes),) = re.findall(r"^(\d+):(\d+) +L", text)
    return 3600.0 * int(hours) + 60.0 * int(minutes)


def _left_of_grid_engine(env: Mapping[str, str]) -> float:
    """By `qstat -r -xml`: the start of the job, and the h_rt that it has requested."""
    jobs = _answer(env, "qstat", "-r", "-xml")
    (job,) = re.findall(rf"<JB_job_number>{env['JOB_ID']}<.*?</job_list>", jobs, re.DOTALL)
    (began,) = re.findall(r"<JAT_start_time>([^.<]+)", job)
    (limit,) = re.findall(r'<hard_request name="h_rt"[^>]*>([\d:]+)<', job)
    return _until(time.strptime(began, _ISO), limit)


def _answer(env: Mapping[str, str], program: str, *arguments: str) -> str:
    return tool_output(program, arguments, env.get("PATH"), _CLOCK_S, env) or ""


def _until(began: time.struct_time, limit: str) -> float:
    """The seconds until a job ends that began then, with a limit such as 04:00:00 or 14400."""
    seconds = 0
    for part in limit.split(":"):
        seconds = 60 * seconds + int(part)
    return time.mktime(began) + seconds - time.time()


class Scheduler(NamedTuple):
    """One scheduler as data."""

    name: str
    proof: tuple[str, ...]  # it is present if one of these variables has a value
    # None if the job has no other host. Slots are the tasks that the user asked for, and never cores.
    read: Callable[[Mapping[str, str]], Hosts | None]
    sets: str = "$"  # a pattern of the variables that it sets for one host, while it is present
    ids: str = "$"  # and of those among them that all ranks get: scripts use them as names of runs and as seeds
    # The seconds until the job's time limit. If it raises an error, the limit is unknown.
    seconds_left: Callable[[Mapping[str, str]], float] = lambda _: math.inf
    followed_by: str = ""  # the components of Open MPI that would follow its variables
    transport: Transport = SSH  # reaches the hosts of the job
    starter: str = "mpirun"  # the program that starts the ranks there

    def is_present(self, env: Mapping[str, str]) -> bool:
        return any(env.get(name) for name in self.proof)


# The first row that has other hosts counts. Flux starts its jobs inside those of other schedulers; a variable
# of an MPIJob may also be the user's own setting inside a job of Slurm.
# KUBERNETES_SERVICE_HOST is not among the variables: every pod has it, also those that Slurm runs in.
SCHEDULERS = (
    Scheduler("Flux", ("FLUX_URI",), flux, "FLUX_", followed_by="flux"),
    Scheduler(
        "Slurm",
        ("SLURM_JOB_ID",),
        *(
            slurm,
            "SLURMD?_",
            "SLURM_(JOB_(ID|NAME)|ARRAY_(JOB|TASK)_ID)",
            _left_of_slurm,
            "slurm",
            SRUN,
            "srun",
        ),
    ),
    Scheduler(
        "PBS",
        ("PBS_JOBID", "PBS_NODEFILE"),
        *(pbs, "PBS_", "PBS_(JOBID|ARRAY_INDEX)", _left_of_pbs, "tm,pbs", SSH_IN_PBS),
    ),
    Scheduler(
        "LSF",
        ("LSB_JOBID", "LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS"),
        *(lsf, "(LSB|LSF|LS|EGO)_", "LSB_JOB(ID|INDEX)", _left_of_lsf, "lsf", BLAUNCH),
    ),
    Scheduler(
        "Grid Engine",
        ("PE_HOSTFILE", "SGE_TASK_ID"),
        grid_engine,
        "SGE_|(PE|PE_HOSTFILE|NSLOTS|NHOSTS|NQUEUES|QUEUE|ARC|RESTARTED|REQUEST|JOB_(ID|NAME|SCRIPT))$",
        *("JOB_(ID|NAME)|SGE_TASK_ID", _left_of_grid_engine, "gridengine", QRSH),
    ),
    Scheduler("MPIJob", ("K_MPI_JOB_ROLE", *MPIJOB_HOSTFILES), mpijob),
    Scheduler(
        "SkyPilot", ("SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES"), skypilot, "SKYPILOT_NODE_RANK$"
    ),
    Scheduler("Kubeflow or AWS Batch", tuple(UNLISTED), unlisted),
)


def find_allocation(env: Mapping[str, str]) -> Hosts | None:
    """The hosts of the allocation that this process runs in, None outside of any.

    Its own transport reaches them, or ssh where that is not installed. Raises UserError if the variables or
    files of the scheduler are incomplete, and JobFailed if a machine failed.
    """
    for row in SCHEDULERS:
        if row.is_present(env) and (hosts := row.read(env)):
            transport = row.transport
            transport = transport if transport.is_ssh or transport.is_installed else SSH
            return replace(hosts, scheduler=row.name, transport=transport, starter=row.starter)
    return None


def seconds_left(env: Mapping[str, str]) -> tuple[float, str]:
    """The seconds until this process's allocation ends, infinity if nothing tells it, and the scheduler."""
    for row in SCHEDULERS:
        if row.is_present(env):
            with suppress(LookupError, ValueError, OverflowError):
                return row.seconds_left(env), row.name
    return math.inf, ""


def expand_counts(counts: str) -> list[int]:
    """`2(x3),1` → 2, 2, 2, 1. Raises ValueError for any other text."""
    expanded: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise ValueError(f"{shown(part)!r} is not a count such as 2 or 2(x3)")
        expanded += [parse_whole(match[1])] * parse_whole(match[2] or "1", 1, MAX_HOSTS)
    return expanded


def in_slurm_terminal(env: Mapping[str, str]) -> bool:
    """Whether Slurm's task with these variables is the shell of `srun --pty`, which may launch.

    SLURM_PTY_PORT alone proves nothing, because an srun in that shell passes it on to its own tasks. They
    have no terminal, so the terminal of the task decides. That of this process would not, because the kernel
    of a notebook has none either.
    """
    if "SLURM_PTY_PORT" not in env or env.get("SLURM_PROCID") != "0":
        return False
    # In a container, the task has another pid.
    stat = fact_of(env.get("SLURM_TASK_PID") or "self", "stat") or fact_of("self", "stat")
    # "pid (name) state ppid pgrp session tty_nr …". The name may contain any bytes, including parentheses.
    return stat.rpartition(b")")[2].split()[4] != b"0"
