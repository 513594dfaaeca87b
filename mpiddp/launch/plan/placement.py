"""Which of the named hosts a job takes, and the slots and ranks of each.

The hosts are those that passed the preflight, without spares. Slots are a host's line, else its GPUs; ranks
fill them within -n and --npernode. What earlier attempts have shown of the hosts counts as well.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.gpus import NO_ANSWER, Gpu, chosen_gpus, hides_all_gpus, read_gpus
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.names import is_this_host
from mpiddp.launch import log
from mpiddp.launch.plan.command import Starter
from mpiddp.launch.plan.environment import of_host
from mpiddp.launch.plan.options import LaunchOptions
from mpiddp.launch.plan.preflight import Checked
from mpiddp.text import counted, listed, shown


class Past(NamedTuple):
    """The hosts to choose from, and what the earlier attempts of this job have shown."""

    named: Hosts  # as their list was last read without an error
    doubts: Mapping[str, str]  # why the job would do better without a host, by its key
    enough: int | None = None  # the number of hosts of the first attempt; None before it
    max_ranks: int | None = None  # the most that the job has announced


def wanted_hosts(options: LaunchOptions, past: Past) -> tuple[int, int]:
    """The number of hosts that the job takes, and the fewest with which it starts."""
    usable, spares, min_hosts = len(past.named.usable), options.spares, options.min_hosts
    wanted = usable - spares
    if wanted < 1:
        given = f"{past.named.source} has {counted(usable, 'host')}"
        raise UserError(f"--spares {spares} leaves no host for the ranks: {given}.")
    if wanted < (min_hosts or 1):
        beside = f" beside {counted(spares, 'spare')}" if spares else ""
        only = f"only {counted(wanted, 'host')} given{beside}"
        raise UserError(f"{only}, but --min-hosts is {min_hosts}.")
    return wanted, min_hosts or min(wanted, past.enough or wanted)


def choose(past: Past, checked: Checked, wanted: int, least: int) -> Hosts:
    """The hosts that the job takes, without its spares, which are the last.

    A spare takes the place of each host with a complaint. Without enough spares, such hosts are left out, as
    long as `least` remain. Hosts that this job doubts are replaced or left out in the same way. Raises
    UserError, or JobFailed if machines or the network alone are to blame, if fewer remain.
    """
    named, reasons = past.named, dict(checked.complaints)
    left = [host for host in named.usable if host not in reasons]
    if reasons and len(left) < least:
        kind = JobFailed if reasons.keys() <= {*checked.failed} else UserError
        raise kind("\n".join(dict.fromkeys(reasons.values())))
    for host in left[:]:
        if host.key in past.doubts and len(left) > least:
            left.remove(host)
            reasons[host] = f"{past.doubts[host.key]}."
    for reason in reasons.values():
        log.info(f"leaving out a host: {reason}")
    taken, spares = left[:wanted], left[wanted:]
    if spares:
        log.info(f"kept in reserve: {', '.join(host.name for host in spares)}")
    if known := [host for host in taken if host.key in past.doubts and len(left) > 1]:
        why = listed([past.doubts[host.key] for host in known], most=3)
        names = ",".join(host.name for host in known)
        log.info(f"{why}. To do without: --exclude {names}")
    left_out = {*reasons, *spares}
    return replace(named, hosts=tuple(host for host in named.hosts if host not in left_out))


# --- slots and ranks ---


def _slots(hosts: Hosts, host: Host, known: Sequence[Gpu] | None, options: LaunchOptions) -> int:
    """A host's slots: those of its line, else its GPUs. A scheduler's, which may be cores, are no more."""
    is_gloo, is_here, slots = options.backend == "gloo", is_this_host(host.name), host.slots or 0
    if host.slots is None and known is None and not is_here:  # nobody has asked it
        if not options.dry_run:
            need = f"{host.name} has no slot count. Write: {host.name} slots=N"
            raise UserError(f"{hosts.where(host)}: {need}")
        log.info(f"{host.name} has no slot count, and a dry run contacts no host: assuming slots=1")
        return 1
    # The vendor's tool of this machine may take seconds, so it runs only if its answer matters.
    may_share = len(hosts.hosts) == 1 and slots > 1 and not is_gloo
    matters = is_here and (host.slots is None or host.gpus or may_share)
    is_asked = known is not None or matters
    gpus = _visible_gpus(host, known, options.variables) if is_asked else 0
    if options.needs_gpus and is_asked and not gpus:
        raise UserError(f"{host.name} has no GPU, and --nproc-per-node gpu starts a rank on each.")
    if host.slots is None:
        has_hosts = options.names_hosts or hosts.scheduler
        is_default = options.host_list == "localhost" or not has_hosts
        if is_default and (options.n, options.npernode) != (None, None):
            gpus = (0 if is_gloo else gpus) or len(os.sched_getaffinity(0))
        return min(host.max_slots or sys.maxsize, gpus or 1)
    if is_gloo or not 0 < gpus < slots:
        return slots
    found = f"{host.name} has {counted(gpus, 'GPU')} but {slots} slots"
    if hosts.scheduler:
        hides = "for a script that uses gloo, -x CUDA_VISIBLE_DEVICES= hides all GPUs"
        log.info(f"{found}: starting only {counted(gpus, 'rank')} there; {hides}")
        return gpus
    if options.backend is not None:  # "auto" is nccl on GPUs
        raise UserError(f"{found}: ranks would share GPUs. Write: {host.name} slots={gpus}")
    log.info(f"{found}: ranks that use GPUs would share them, which NCCL refuses")
    return slots


def _visible_gpus(host: Host, known: Sequence[Gpu] | None, variables: Mapping[str, str]) -> int:
    """The number of a host's GPUs that its hostfile entry, or else the variables of its ranks, leave visible.

    Without `known` ones, the host is this machine. The preflight has named others whose tool does not answer.
    """
    env = of_host(host, os.environ, variables)
    if hides_all_gpus(env):
        return 0
    found = read_gpus(env.get("PATH")) if known is None else known
    if found is None:
        raise UserError(NO_ANSWER.format(name=host.name))
    for missing in (number for number in host.gpus or () if number >= len(found)):
        raise UserError(
            f"{host.name} has {counted(len(found), 'GPU')}, so there is no GPU {missing} "
            f"(gpus={','.join(map(str, host.gpus or ()))}). They are numbered from 0."
        )
    return min(len(found), len(chosen_gpus(found, env, host.gpus)))


def place(
    hosts: Hosts,
    known: Mapping[Host, Sequence[Gpu]],  # the GPUs of hosts that were asked
    starter: Starter,
    options: LaunchOptions,
    past: Past,
    wanted: int,
) -> Hosts:
    """The hosts that take ranks, each with its number, under the names that mpirun gets.

    The ranks of -n fill the slots (or --npernode) in order. On fewer hosts than `wanted`, or than at first,
    fewer ranks may start.
    """
    n, npernode = options.n, options.npernode
    room = {host: _slots(hosts, host, known.get(host), options) for host in hosts.hosts}
    if not options.names_hosts and past.enough is None:  # said once
        gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
        are_idle = (
            hosts.starter == "srun" and {*room.values()} == {1} and gpus not in ("", "0", "1")
        )
        more = f"; for a rank on each GPU: #SBATCH --ntasks-per-node={shown(gpus)}" * are_idle
        log.info(f"no hosts given: using {hosts.source}, slots={sum(room.values())}{more}")
    for host, slots in room.items():
        if 0 < slots < (npernode or 0):
            where = f"{host.name} ({hosts.where(host)})"
            more = f" To start more: -H {host.name}:{npernode}" if len(room) == 1 else ""
            if hosts.starter == "srun":  # its slots are tasks
                more = f" To start more: #SBATCH --ntasks-per-node={npernode}"
            most = f"the {slots} slots of {where}.{more}"
            raise UserError(f"{npernode} ranks per host are more than {most}")
        room[host] = min(slots, npernode or slots)
    total = sum(room.values())
    if n is not None and n > total and len(hosts.usable) >= max(wanted, past.enough or 0):
        within = f" with --npernode {npernode}" if npernode else ""
        each = listed([f"{host.name}={slots}" for host, slots in room.items()])
        is_unnamed = not (options.names_hosts or hosts.scheduler or npernode)
        more = f" To start more: -H localhost:{n}" * is_unnamed
        if hosts.starter == "srun" and not npernode:
            more = f" To start more: #SBATCH --ntasks={n}"
        raise UserError(
            f"-n {n} is more than the {total} slots of {hosts.source}{within} ({each}).{more}"
        )
    left = min(limit for limit in (total, n, past.max_ranks) if limit is not None)
    # A restart may have fewer ranks.
    shown_ranks = options.log_ranks.split(",") if past.enough is None else ()
    if missing := [each for each in shown_ranks if each.isdigit() and int(each) >= left]:
        ranks = "rank 0 only" if left == 1 else f"ranks 0 to {left - 1}"
        no = f"there is no rank {listed(missing)}; the job has {ranks}"
        raise UserError(f"--log-ranks {shown(options.log_ranks)}: {no}.")
    placed, own = [], list[Host]()
    for host, slots in room.items():
        if not (count := min(left, slots)):
            continue
        left -= count
        if is_this_host(host.name) and not starter.has_scheduler:
            own.append(host)
            # This machine under its own name: mpirun recognizes it by that, and does not use ssh to reach it.
            name = socket.gethostname()
            name = name.partition(".")[0] if starter.cuts_own_name else name
            host = replace(host, name=name, user=None, port=None)
        placed.append(replace(host, ranks=count))
    if len(own) > 1:
        both = f"{own[0].name} and {own[1].name} are both this machine"
        raise UserError(f"{hosts.where(own[1])}: {both}. Merge them into one.")
    return replace(hosts, hosts=tuple(placed))
