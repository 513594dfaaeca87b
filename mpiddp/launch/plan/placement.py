"""The placement of a job: named hosts and their preflight come in, and the hosts with their ranks go out.

`choose` leaves out hosts with a fault, and spares. `place` fills the slots of the others: those of a host's
line, else one for each GPU, within -n and --npernode. Results of the job's earlier attempts count as well.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.gpus import NO_ANSWER, Gpu, chosen_gpus, hides_all_gpus, read_gpus
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import is_this_host
from mpiddp.launch import log
from mpiddp.launch.judge.events import Announcement
from mpiddp.launch.plan.command import Starter
from mpiddp.launch.plan.environment import Environment
from mpiddp.launch.plan.options import LaunchOptions
from mpiddp.launch.plan.preflight import Checked
from mpiddp.text import counted, listed, shown


class Past(NamedTuple):
    """All that the attempts of a job so far leave to the next one."""

    named: Hosts  # the hosts to choose from, as their list was last read without an error
    attempts: int = 0
    failures: int = 0  # they count for --max-restarts
    announced: Announcement = Announcement()
    resume_args: Sequence[
        str
    ] = ()  # the last arguments of the script, from the restart that adds them on
    made_steps: bool = False
    doubts: Mapping[str, str] = MappingProxyType({})  # by the key of a host, the reason to avoid it
    num_hosts: int = 0  # of the first attempt
    grows: bool = True  # whether a stop for hosts that can join (--grow) may be worth it


def choose(past: Past, checked: Checked, wanted: int, least: int) -> Hosts:
    """The hosts that the job takes, without its spares, which are the last.

    A spare takes the place of each host with a complaint. Without enough spares, such hosts are left out, as
    long as `least` remain. Hosts that this job doubts are replaced or left out in the same way. If fewer
    remain, it raises JobFailed if only machines or the network are to blame, and UserError otherwise.
    """
    named, reasons = past.named, dict(checked.complaints)
    usable = [host for host in named.usable if host not in reasons]
    if reasons and len(usable) < least:
        kind = JobFailed if reasons.keys() <= {*checked.failed} else UserError
        raise kind("\n".join(dict.fromkeys(reasons.values())))
    for host in usable[:]:
        if host.key in past.doubts and len(usable) > least:
            usable.remove(host)
            reasons[host] = f"{past.doubts[host.key]}."
    for reason in reasons.values():
        log.info(f"leaving out a host: {reason}")
    chosen, spares = usable[:wanted], usable[wanted:]
    if spares:
        log.info(f"kept in reserve: {', '.join(host.name for host in spares)}")
    if doubted := [host for host in chosen if host.key in past.doubts and len(usable) > 1]:
        why = listed([past.doubts[host.key] for host in doubted], most=3)
        log.info(f"{why}. To do without: --exclude {','.join(host.name for host in doubted)}")
    left_out = {*reasons, *spares}
    return replace(named, hosts=tuple(host for host in named.hosts if host not in left_out))


# --- slots and ranks ---


def _slots(
    hosts: Hosts,
    host: Host,
    gpus: Sequence[Gpu] | None,
    options: LaunchOptions,
    env: Mapping[str, str],
) -> int:
    """A host's slots: the number of its line, else that of its GPUs.

    A scheduler may count cores, so its slots are at most the GPUs. `gpus`: None if no preflight has asked.
    """
    is_gloo, slots = options.backend == "gloo", host.slots or 0
    # The vendor's tool of this machine may take seconds, so it runs only if its answer matters.
    may_share = len(hosts.hosts) == 1 and slots > 1 and not is_gloo
    matters = host.slots is None or host.gpus or may_share
    if gpus is None and matters and is_this_host(host.name):
        gpus = () if hides_all_gpus(env) else read_gpus(env.get("PATH"))
        if gpus is None:
            raise UserError(NO_ANSWER.format(name=host.name))
    if gpus is None and host.slots is None:
        if not options.dry_run:
            fix = f"{host.name} slots=N"
            raise UserError(f"{hosts.where(host)}: {host.name} has no slot count.", fix=fix)
        log.info(f"{host.name} has no slot count, and a dry run contacts no host: assuming slots=1")
        return 1
    count = 0 if gpus is None else _visible_gpus(host, gpus, env)
    if options.needs_gpus and gpus is not None and not count:
        raise UserError(f"{host.name} has no GPU, and --nproc-per-node gpu starts a rank on each.")
    if host.slots is None:
        has_hosts = options.names_hosts or hosts.scheduler
        is_default = options.host_list == "localhost" or not has_hosts
        if is_default and (options.n, options.npernode) != (None, None):
            count = (0 if is_gloo else count) or max(
                len(os.sched_getaffinity(0)), options.npernode or 0
            )
        return min(host.max_slots or sys.maxsize, count or 1)
    if is_gloo or not 0 < count < slots:
        return slots
    excess = f"{host.name} has {counted(count, 'GPU')} but {slots} slots"
    if hosts.scheduler:
        hides = "for a script that uses gloo, -x CUDA_VISIBLE_DEVICES= hides all GPUs"
        log.info(f"{excess}: starting only {counted(count, 'rank')} there; {hides}")
        return count
    if options.backend is not None:  # "auto" is nccl on GPUs
        raise UserError(f"{excess}: ranks would share GPUs.", fix=f"{host.name} slots={count}")
    log.info(f"{excess}: ranks that use GPUs would share them, which NCCL refuses")
    return slots


def _visible_gpus(host: Host, gpus: Sequence[Gpu], env: Mapping[str, str]) -> int:
    """The number of a host's GPUs that its line, or else `env` of its ranks, leave visible."""
    chosen = chosen_gpus(gpus, env, host.gpus)
    numbers = [number for number in host.gpus or () if isinstance(number, int)]
    if chosen and numbers and (last := max(numbers)) >= len(gpus):
        raise UserError(
            f"{host.name} has {counted(len(gpus), 'GPU')}, so there is no GPU {last} "
            f"(gpus={','.join(map(str, numbers))}). They are numbered from 0."
        )
    return max(min(len(gpus), len(chosen)), chosen.count(None))  # a GPU may have several parts


def place(
    hosts: Hosts,
    gpus: Mapping[Host, Sequence[Gpu]],  # of the hosts that a preflight has asked
    starter: Starter,
    options: LaunchOptions,
    environment: Environment,
    past: Past,
    wanted: int,
) -> Hosts:
    """The hosts that take ranks, each with its number, under the names that mpirun gets.

    The ranks of -n fill the slots (or --npernode) in order. On fewer hosts than `wanted`, or than at first,
    fewer ranks may start.
    """
    n, npernode = options.n, options.npernode
    room = {
        host: _slots(hosts, host, gpus.get(host), options, environment.on(host))
        for host in hosts.hosts
    }
    if not (options.names_hosts or past.attempts):
        on_node = environment.shell.get("SLURM_GPUS_ON_NODE", "")
        are_idle = {*room.values()} == {1} and on_node not in ("", "0", "1")
        more = f"; for a rank on each GPU: #SBATCH --ntasks-per-node={shown(on_node)}"
        more *= hosts.starter == "srun" and are_idle
        # Also with --quiet, no job starts on this machine alone without a word.
        say = log.info if hosts.scheduler or options.dry_run else log.error
        say(f"no hosts given: using {hosts.source}, slots={sum(room.values())}{more}")
    for host, slots in room.items():
        if 0 < slots < (npernode or 0):
            where = f"{host.name} ({hosts.where(host)})"
            more = f"-H {host.name}:{npernode}" if len(room) == 1 else ""
            if hosts.starter == "srun":  # its slots are tasks
                more = f"#SBATCH --ntasks-per-node={npernode}"
            most = f"the {slots} slots of {where}"
            raise UserError(f"{npernode} ranks per host are more than {most}.", fix=more)
        room[host] = min(slots, npernode or slots)
    total = sum(room.values())
    if n is not None and n > total and len(hosts.usable) >= max(wanted, past.num_hosts):
        within = f" with --npernode {npernode}" if npernode else ""
        by_host = listed([f"{host.name}={slots}" for host, slots in room.items()])
        is_unnamed = not (options.names_hosts or hosts.scheduler or npernode)
        # More ranks than GPUs would share them, which NCCL refuses.
        seen = [_visible_gpus(host, gpus.get(host) or (), environment.on(host)) for host in room]
        on_cpus = any(seen) and options.backend != "gloo"
        flags = "-x CUDA_VISIBLE_DEVICES= " * on_cpus
        more = f"{'on CPUs: ' * on_cpus}{flags}-H localhost:{n}" * is_unnamed
        if hosts.starter == "srun" and not npernode:
            more = f"#SBATCH --ntasks={n}"
        raise UserError(
            f"-n {n} is more than the {total} slots of {hosts.source}{within} ({by_host}).",
            fix=more,
        )
    left = min(limit for limit in (total, n, past.announced.max_ranks) if limit is not None)
    shown_ranks = options.log_ranks.split(",")
    if missing := [rank for rank in shown_ranks if rank.isdigit() and int(rank) >= left]:
        ranks = "rank 0 only" if left == 1 else f"ranks 0 to {left - 1}"
        sentence = f"--log-ranks {shown(options.log_ranks)}: there is no rank {listed(missing)}; the job has {ranks}."
        if not past.attempts:  # a restart may have fewer ranks
            raise UserError(sentence)
        log.info(sentence)
    placed, here = [], list[Host]()
    for host, slots in room.items():
        if not (count := min(left, slots)):
            continue
        left -= count
        if is_this_host(host.name):
            here.append(host)
            # mpirun recognizes this machine by the name that it calls itself, and then needs no ssh to it.
            name = socket.gethostname()
            name = name.partition(".")[0] if starter.cuts_own_name else name
            host = replace(host, name=name, listed=host.name, user=None, port=None)
        placed.append(replace(host, ranks=count))
    if len(here) > 1:
        both = f"{here[0].name} and {here[1].name} are both this machine"
        raise UserError(f"{hosts.where(here[1])}: {both}.", fix="merge them into one")
    return replace(hosts, hosts=tuple(placed))
