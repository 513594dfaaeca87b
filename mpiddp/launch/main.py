"""`mpiddp launch`: start a script on every host of a hostfile.

Reads the hosts, composes one command for the installed MPI, supervises it, and returns the exit code.

    mpiddp launch --hostfile hostfiles/two_nodes --dry-run train.py --epochs 3
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterable, Mapping

from mpiddp.errors import UserError
from mpiddp.hosts.allocations import in_slurm_terminal
from mpiddp.hosts.hostfile import Hosts
from mpiddp.launch import log
from mpiddp.launch.options import parse_options
from mpiddp.launch.output import open_closed_streams
from mpiddp.launch.starters.command import LEFT_OUT
from mpiddp.launch.variables import is_secret, without_values
from mpiddp.protocol.variables import PROGRAM
from mpiddp.world import World, leave_enclosing_job


def main(argv: list[str]) -> int:
    """Launch the job of `argv`. The exit code: 0 done, 1 the job failed, 2 its ranks refused their
    input, 75 stopped on request, 130 interrupted.

    Raises:
        UserError: bad input, found before anything started.
    """
    started_at = time.time()
    open_closed_streams()
    is_nested = leave_enclosing_job(os.environ)
    options = parse_options(argv)
    log.is_quiet = options.quiet
    home = os.path.expanduser("~")  # noqa: PTH111 - no error without a home folder
    if home != "~":
        os.environ.setdefault("HOME", home)  # a service may lack it, and Open MPI needs it
    if not (is_nested or options.names_hosts or in_slurm_terminal(os.environ)):
        _refuse_inside_a_rank(os.environ)
    # Imported here, so that --help and a wrong option answer at once.
    from mpiddp.launch.plan import make_plan, read_hosts, working_folder

    if options.dry_run:
        plan = make_plan(options, os.environ)
        command = plan.starter.compose(plan.request)
        hidden = {each for each in command.settings if each in options.variables or is_secret(each)}
        print(command.explained(hidden))
        _say_left_out(hidden)
        return 0
    if options.push:
        hosts = read_hosts(options, os.environ)
        least = options.min_hosts or len(hosts.usable) - options.spares
        _push(hosts, working_folder(os.environ), max(1, least))
    from mpiddp.launch.job import run  # a dry run needs no sockets and secrets

    outcome = run(options, started_at)
    outcome.log()
    if outcome.resumes:
        own, job = argv[: -len(options.command)], options.command
        again = [os.environ.get(PROGRAM, "mpiddp"), "launch", *without_values(own, options.exports)]
        log.info(f"to resume: {shlex.join([*again, *job, *outcome.announcement.resume_args])}")
        _say_left_out(each.partition("=")[0] for each in options.exports if "=" in each)
    return outcome.code


def _say_left_out(names: Iterable[str]) -> None:
    """Name the variables whose values a printed command lacks."""
    if missing := ", ".join(sorted(names)):
        log.info(f"{LEFT_OUT} replaces values that are never printed here. Fill in: {missing}")


def _push(hosts: Hosts, folder: str, least: int) -> None:
    """Push `folder` and the environment of this Python to the other hosts, to `least` in all."""
    from mpiddp.hosts import push

    if not hosts.transport.is_ssh:
        raise UserError(
            f"--push needs ssh, and {hosts.transport.name} reaches the hosts of this job."
        )
    pushed = push.push(hosts.usable, push.default_folders(folder), min_hosts=least)
    for host, failure in pushed.failures.items():
        log.error(f"not pushed to {host.name}: {failure}")
    for note in pushed.notes:
        log.info(note)
    if any(pushed.sent.values()):
        log.info("; ".join(push.summary(pushed, dry_run=False)))


def _refuse_inside_a_rank(env: Mapping[str, str]) -> None:
    """Refuse to start a job from each rank of another launcher."""
    world = World.from_env(env)
    if world.world_size > 1:
        name = world.launcher.rank
        raise UserError(
            f"mpiddp launch starts all ranks itself, but {name}={env[name]} says that this is already one "
            f"of {world.world_size} ranks ({world.launcher.name}). Write mpiddp run in place of mpiddp "
            f"launch, or start it once; -H localhost starts a job on this machine alone."
        )
