"""The plan of a job: the options of `mpiddp launch` come in, and the Request for one command goes out.

options -> read_hosts -> run_preflight -> choose -> place -> Request -> find_network
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from mpiddp.arguments import OURS
from mpiddp.errors import JobFailed, UserError, cause_of
from mpiddp.hosts.containers import Image, job_in_image
from mpiddp.hosts.gpu_health import read_health
from mpiddp.hosts.gpus import NO_ANSWER, VISIBLE, chosen_gpus, hides_all_gpus
from mpiddp.hosts.hostfile import Host, Hosts, without
from mpiddp.hosts.names import forget_addresses
from mpiddp.hosts.program_files import python_path
from mpiddp.hosts.ssh import Logins, other_hosts
from mpiddp.hosts.transport import SSH
from mpiddp.hosts.where import named_hosts
from mpiddp.launch import log
from mpiddp.launch.plan.command import Request, Starter
from mpiddp.launch.plan.environment import Environment, gpu_table
from mpiddp.launch.plan.job_network import find_network, requested_network
from mpiddp.launch.plan.options import LaunchOptions
from mpiddp.launch.plan.placement import Past, choose, place
from mpiddp.launch.plan.preflight import NOT_AT_ALL, Checked, Waits, check_gpus, preflight
from mpiddp.launch.plan.starters import find_starter
from mpiddp.protocol import variables
from mpiddp.text import all_of, counted

# This Python. Links are not resolved: its path identifies a virtual environment.
PYTHON = Path(sys.executable).absolute()


class Plan(NamedTuple):
    """One attempt at a job, with the result of each step that led to its request."""

    options: LaunchOptions
    starter: Starter
    past: Past
    checked: Checked
    hosts: Hosts  # the chosen hosts, before their ranks were placed
    request: Request

    @property
    def shared_names(self) -> set[str]:
        """The names that several hosts call themselves. Only the hostfile tells such hosts apart."""
        counts = Counter(info.hostname for info in self.checked.infos.values())
        return {name for name, count in counts.items() if count > 1}

    @property
    def holds(self) -> bool:
        """Whether its agents wait for a restart: a host that was left out may join only in new agents."""
        has_all = len(self.hosts.hosts) == len(self.past.named.hosts)
        return has_all and self.past.failures < self.options.max_restarts

    def key_of(self, name: str) -> str:
        """The key of the host that mpirun got as `name`."""
        return next(host.key for host in self.request.hosts.hosts if host.name == name)


def make_plan(
    options: LaunchOptions,
    env: Mapping[str, str],
    past: Past | None = None,
    logins: Logins | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Plan:
    """Find the hosts, the starter and the network, and log the choices that the user should know.

    `past` is None for the first attempt, which reads the hosts and pushes. `logins` gets the logins of the
    preflight, which remain open. `on_wait` is told for what the start waits. Raises UserError for bad input and
    JobFailed if a machine failed.
    """
    past = past or Past(read_hosts(options, env))
    named, is_first = past.named, not past.attempts
    starter = find_starter(named.starter, options.mpirun, PYTHON, env)
    environment = Environment.of(env, options.settings)
    # Without a preflight, --min-hosts still counts at a restart.
    need = {
        "--wait-for-hosts": options.wait_s,
        "--spares": options.spares,
        "--grow": options.grow_s,
    }
    if (given := [name for name, value in need.items() if value]) and not options.check:
        sentence = f"{given[0]} needs the preflight, which finds the hosts that answer."
        raise UserError(sentence, fix="leave out --no-check")
    _, least = _wanted_hosts(past, options.spares, options.min_hosts)
    if options.push and is_first and not options.dry_run:
        _push(named, working_folder(env), least)
    waits = Waits(options.wait_s or 0.0, len(named.usable) if is_first else least, on_wait)
    checked = run_preflight(options, named, starter, environment, logins, waits)
    plan = _plan(options, environment, starter, past, checked)
    for host in plan.hosts.usable if is_first else ():
        for note in checked.notes.get(host, ()):
            log.info(note)
    return plan


def plan_without(plan: Plan, failures: Mapping[str, str]) -> Plan:
    """The plan without the hosts that have failed since. mpirun got them by the names in `failures`.

    Raises JobFailed with their sentences if too few are left.
    """
    by_key = {plan.key_of(name): why for name, why in failures.items()}
    complaints = {host: by_key[host.key] for host in plan.past.named.hosts if host.key in by_key}
    checked = plan.checked._replace(complaints={**plan.checked.complaints, **complaints})
    try:
        return _plan(plan.options, plan.request.environment, plan.starter, plan.past, checked)
    except UserError:
        raise JobFailed("\n".join(dict.fromkeys(failures.values()))) from None


def _plan(
    options: LaunchOptions, environment: Environment, starter: Starter, past: Past, checked: Checked
) -> Plan:
    wanted, least = _wanted_hosts(past, options.spares, options.min_hosts)
    chosen = choose(past, checked, wanted, least)
    placed = place(chosen, checked.gpus, starter, options, environment, past, wanted)
    is_agent = options.job[:3] == ("-m", "mpiddp", "run")
    job = options.job[3:] if is_agent else options.job
    job = job_in_image(job) if options.image else job
    request = Request(
        hosts=placed,
        job=(str(PYTHON), *OURS, "run", *job),
        folder=working_folder(environment.shell),
        environment=environment,
        bind=options.bind,
        mpi_args=options.mpi_args,
        is_restart=past.attempts > 0,
    )
    request = find_network(request, checked.infos, options.interface, dry_run=options.dry_run)
    request = request._replace(
        environment=environment._replace(ours=_ours(options, starter, request))
    )
    plan = Plan(options, starter, past, checked, chosen, request)
    for line in _choices(plan):
        log.info(line)
    return plan


def _choices(plan: Plan) -> Iterator[str]:
    """The lines about this plan that --verbose and --dry-run print."""
    options, starter, hosts = plan.options, plan.starter, plan.request.hosts
    if options.verbose:
        yield f"{starter.name}, {starter.program}"
        if len(hosts.hosts) > 1:
            yield f"{hosts.transport.name} reaches the other hosts"
        if interface := plan.request.interface:
            yield f"{interface.name} ({interface.address}) leads to the other hosts"
    if options.verbose or options.dry_run:
        for line in options.of_hostfile:
            yield f"{line} (the command line takes precedence)"
        last = -1
        for host in hosts.hosts:
            first, last = last + 1, last + host.ranks
            ranks = f"rank {first}" if first == last else f"ranks {first}-{last}"
            yield f"{host.name}: {ranks}"


def _wanted_hosts(past: Past, spares: int, min_hosts: int | None) -> tuple[int, int]:
    """The number of hosts that the job takes, and the fewest with which it starts."""
    usable = len(past.named.usable)
    wanted = usable - spares
    if wanted < 1:
        present = f"{past.named.source} has {counted(usable, 'host')}"
        raise UserError(f"--spares {spares} leaves no host for the ranks: {present}.")
    if wanted < (min_hosts or 1):
        reserve = f" beside {counted(spares, 'spare')}" if spares else ""
        only = f"only {counted(wanted, 'host')} given{reserve}"
        raise UserError(f"{only}, but --min-hosts is {min_hosts}.")
    return wanted, min_hosts or min(wanted, past.num_hosts or wanted)


def read_hosts(options: LaunchOptions, env: Mapping[str, str], *, is_first: bool = True) -> Hosts:
    """The hosts that the user names, else those of an allocation, else this machine.

    Once the job has begun (not `is_first`), a host of --exclude may be gone from an edited hostfile.
    """
    hosts = named_hosts(options.hostfile, options.host_list, env, options.login_s)
    hosts = hosts or Hosts("this machine", (Host("localhost"),))
    transport = hosts.transport
    if options.mpirun is not None and hosts.starter != "mpirun":
        # Slurm signals every process of its steps. As steps, daemons of this mpirun would end their ranks.
        transport = SSH._replace(login_s=options.login_s)
    # mpirun passes the same to the agents.
    libraries = {**env, **options.settings}.get("LD_LIBRARY_PATH") or ""
    silence_s = variables.PATIENCE * options.lost_s
    transport = transport._replace(silence_s=silence_s, libraries=libraries)
    hosts = replace(hosts, transport=transport)
    if options.exclude is not None:
        hosts = without(hosts, options.exclude, is_first=is_first)
    if (most := options.max_hosts) is not None:
        if len(hosts.usable) < most and is_first:
            need = f"--nnodes {options.min_hosts}:{most} needs a list of {most} hosts"
            raise UserError(f"{need}; {hosts.source} has {len(hosts.usable)}.")
        hosts = replace(hosts, hosts=hosts.usable[:most])
    for variable in sorted(VISIBLE):
        for host in hosts.hosts:
            if host.gpus is not None and options.settings.get(variable) is not None:
                both = f"gpus= and -x {variable} both choose the GPUs of {host.name}"
                raise UserError(f"{hosts.where(host)}: {both}.", fix="leave one of them out")
    return hosts


def _push(named: Hosts, folder: str, least: int) -> None:
    """Push `folder` and the environment of this Python to the hosts, of which `least` must take them."""
    from mpiddp.hosts import push  # few jobs need it

    began_at, folders = time.monotonic(), push.default_folders(folder)
    pushed = push.push(named.usable, folders, min_hosts=least, transport=named.transport)
    for sentence in pushed.failures.values():
        log.error(f"not pushed: {sentence}")
    if any(pushed.sent.values()):
        log.info(push.summary(pushed.sent, time.monotonic() - began_at).replace("\n", "; "))
    if pushed.note:
        log.info(pushed.note)


def run_preflight(
    options: LaunchOptions,
    named: Hosts,
    starter: Starter,
    environment: Environment,
    logins: Logins | None = None,
    waits: Waits = NOT_AT_ALL,
) -> Checked:
    """The facts and the faults of each host that takes ranks; nothing if no preflight runs."""
    kind, env = options.job[0], {**environment.shell, **environment.chosen}
    is_alone = not (other_hosts(named.usable) or options.image)
    uses_gpus = options.backend != "gloo" and not hides_all_gpus(env)
    is_off = options.dry_run or not options.check
    if is_off or (is_alone and not uses_gpus):
        return Checked()
    if (
        is_alone and not waits.wait_s
    ):  # this machine takes all ranks, and only its GPUs may have a fault
        host, gpus = named.usable[0], read_health(env.get("PATH"))
        if gpus is None:
            return Checked(complaints={host: NO_ANSWER.format(name=host.name)})
        return check_gpus(Checked(gpus={host: gpus}), environment)
    image = Image.of(options.image) if options.image else None
    interface = requested_network(options.interface)[1] if options.interface else ()
    needs = {
        "python": str(PYTHON),
        # A starter without a daemon, srun, runs on this host alone.
        "mpirun": str(starter.program) if starter.daemon else "",
        "daemon": str(starter.program.with_name(starter.daemon or starter.program.name)),
        "folder": working_folder(env),
        "path": env.get("PATH", os.defpath),  # of the ranks
        "packages": python_path(env),  # the folders of their PYTHONPATH
        "interface": ",".join(interface),  # names, addresses or networks
        # By its path or on `path`.
        "program": image.program if image else options.job[1] if kind == "--" else "",
        "image": image.facts if image else (),
        "image_fix": image.fix(is_alone=not other_hosts(named.usable)) if image else "",
        "script": "" if kind in ("--", "-m") else kind,
        "uses_gpus": uses_gpus,
    }
    if waits.wait_s and uses_gpus:
        waits = waits._replace(
            gpus=lambda host, present: chosen_gpus(present, environment.on(host), host.gpus)
        )
    checked = preflight(named.usable, needs, named.transport, waits=waits, logins=logins)
    return check_gpus(checked, environment) if uses_gpus else checked


def working_folder(env: Mapping[str, str]) -> str:
    """This folder by the name that the shell has for it: a link may lead elsewhere on each host."""
    try:
        here = Path.cwd()
        os.stat(f"{here}/.")  # noqa: PTH116 - this user may not enter it, as root over NFS
    except OSError as error:  # at a restart it may be gone, or its file server
        raise cause_of(error)(f"the working folder cannot be used: {error.strerror}.") from None
    logical = Path(env.get("PWD", ""))
    with contextlib.suppress(OSError, ValueError):
        if logical.is_absolute() and logical.is_dir() and logical.samefile(here):
            return str(logical)
    return str(here)


def _ours(options: LaunchOptions, starter: Starter, request: Request) -> dict[str, str]:
    """The variables that this launcher sets for the ranks."""
    hosts, chosen = request.hosts.hosts, request.environment.chosen
    networks = ",".join(request.networks)
    gpus = "" if starter.chooses_gpus else gpu_table(hosts, request.environment)
    # The shell may hold the default of --timeout, and -x precedes that.
    timeout_s = None if variables.TIMEOUT in chosen else options.timeout_s
    ours = {
        "MPI4PY_LIBMPI": chosen.get("MPI4PY_LIBMPI") or str(starter.libmpi or ""),
        variables.PLACEMENT: ",".join(f"{host.alias}:{host.ranks}" for host in hosts),
        variables.NETWORKS: networks,
        variables.GPUS: gpus,
        variables.INTERFACE: networks if options.interface else "",
        variables.TIMEOUT: f"{timeout_s:.12g}" if timeout_s else "",
        variables.LOG_DIR: options.log_dir,
        variables.LOG_TO: shlex.join(options.log_to),
        # For a command of --dry-run, whose output no launcher selects.
        variables.ORDERS: options.orders._replace(exported=tuple(chosen), log_ranks="").packed(),
        "MASTER_ADDR": options.master_addr,
    }
    return {name: value for name, value in ours.items() if value}


# --- hosts that can join a running job ---


def search_once(plan: Plan) -> list[str]:
    """Search once for hosts that `plan` could use, without doubts: ["node1 can join"], or [].

    It contacts hosts that could add ranks, and the first host of the job, whose versions they must have. If
    the list of hosts is in error, for example while it is edited, or a machine fails, it finds none.
    """
    options = plan.options
    if options.n is not None and plan.request.hosts.world_size >= options.n:
        return []
    avoided = {host.key for host in plan.hosts.hosts} | plan.past.doubts.keys()
    try:
        usable = read_hosts(options, os.environ, is_first=False).usable
        new = [host for host in usable if host.key not in avoided]
        if not new or len(usable) - options.spares <= len(plan.hosts.usable):
            return []
        forget_addresses()
        together = replace(plan.past.named, hosts=(*plan.hosts.usable[:1], *new))
        checked = run_preflight(options, together, plan.starter, plan.request.environment)
    except (UserError, JobFailed, OSError):
        return []
    joining = [host.name for host in new if host not in checked.complaints]
    return [f"{all_of(joining)} can join"] if joining else []
