"""`mpiddp launch`: one command that starts a script on every host of a hostfile.

Reads the hosts, composes one command for the MPI that is installed, runs it, and turns its end into
an exit code.

    mpiddp launch --hostfile hostfiles/two_nodes --dry-run train.py --epochs 3
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from mpiddp.hostfile import Host, Hosts, exclude, parse_host_list, ranks_per_host, read_hostfile
from mpiddp.launch import placement, slurm
from mpiddp.launch.command import Node, Request
from mpiddp.launch.environment import forwarded, parse_exports
from mpiddp.launch.flavours import compose
from mpiddp.launch.gpus import asked_backend, count_gpus, fit_to_gpus
from mpiddp.launch.mpi import Mpi, find_mpirun, find_srun, identify, with_own_folder
from mpiddp.launch.options import parse_options
from mpiddp.launch.process import End, run_to_the_end

DONE, FAILED, BAD_INPUT, STOPPED_AFTER_CHECKPOINT, INTERRUPTED = 0, 1, 2, 75, 130


def main(argv: list[str]) -> int:
    """Launch what `argv` says. The exit code: 0 done, 1 the job failed, 2 its ranks refused their
    input, 75 stopped on request after a checkpoint, 130 interrupted.

    Raises:
        UserError: bad input, found before anything was started.
    """
    launched_at = time.time()
    options = parse_options(argv)
    exports = parse_exports(options.x, os.environ)
    # Not resolved: a virtual environment is known by the path of its own python.
    python = Path(sys.executable).absolute()
    if options.interface is not None:
        placement.check_interface(options.interface)
    mpi, hosts = _choose(options, python)
    if options.verbose:
        _say(f"{mpi.name}, {mpi.program}")
    hosts = _with_slots(options, hosts)
    placed = ranks_per_host(hosts, options.n, options.npernode)
    if mpi.flavour == "slurm":
        nodes = tuple(Node(host.name, ranks) for host, ranks in placed)
    else:
        nodes = placement.name_nodes(hosts, placed)
    if options.verbose or options.dry_run:  # --report is what the ranks find, see mpiddp.placement
        for line in placement.report(nodes):
            _say(line)
    request = _request(options, mpi, python, nodes, exports, launched_at)
    command = compose(mpi, request)
    if options.dry_run:
        print(command.explained())
        return DONE
    with _private_folder(needed=bool(command.files)) as folder:
        command = compose(mpi, replace(request, scratch=folder))
        command.write_files()
        env = {**with_own_folder(mpi.program, os.environ), **command.settings}
        return _exit_code(mpi, run_to_the_end(command.argv, env))


def _choose(options: argparse.Namespace, python: Path) -> tuple[Mpi, Hosts]:
    """The MPI and the hosts. Inside a Slurm allocation that is srun, unless the user named either."""
    env = os.environ
    allocated = None
    if options.hostfile is not None:
        # Names that differ after their first dot are two hosts: mpirun is told to keep them whole.
        hosts = read_hostfile(options.hostfile, keep_fqdn=True)
    elif options.host_list is not None:
        hosts = parse_host_list(options.host_list, keep_fqdn=True)
    elif allocated := slurm.allocation(env):
        hosts = allocated
    else:
        hosts = placement.this_machine()
    if options.exclude is not None:
        hosts = exclude(hosts, options.exclude)
    if allocated is not None and options.mpirun is None:
        program = find_srun(env)
    else:
        program = find_mpirun(options.mpirun, python, env)
    return identify(program, env), hosts


def _with_slots(options: argparse.Namespace, hosts: Hosts) -> Hosts:
    """The hosts with known slot counts; what the user would not expect is said."""

    def count(host: Host) -> int:
        if options.dry_run and not placement.is_this_host(host.name):
            _say(f"{host.name} has no slot count, and a dry run asks no host: taken as 1")
            return 1
        return count_gpus(host)

    hosts, notes = fit_to_gpus(hosts, asked_backend(options.command[1:]), count)
    if (options.hostfile, options.host_list) == (None, None):
        notes = [f"no hosts named: {hosts.source}, slots={hosts.total_slots}", *notes]
    for note in notes:
        _say(note)
    return hosts


def _request(
    options: argparse.Namespace,
    mpi: Mpi,
    python: Path,
    nodes: tuple[Node, ...],
    exports: Mapping[str, str | None],
    launched_at: float,
) -> Request:
    settings = {name: value for name, value in exports.items() if value is not None}
    settings["MPIDDP_PLACEMENT"] = ",".join(f"{node.name}:{node.ranks}" for node in nodes)
    if options.verbose and not options.dry_run:
        settings["MPIDDP_LAUNCHED_AT"] = f"{launched_at:.3f}"
    for name, value in (
        ("MPIDDP_TIMEOUT", options.timeout),
        ("MPIDDP_INTERFACE", options.interface),
        ("MASTER_ADDR", options.master_addr),
        ("MPIDDP_REPORT", int(options.report)),
        ("MPIDDP_VERBOSE", int(options.verbose)),
    ):
        if value:
            settings[name] = str(value)
    # Beside its own python, mpi4py finds the library by itself.
    if mpi.libmpi is not None and mpi.program.parent != python.parent:
        named = None if options.mpirun else os.environ.get("MPI4PY_LIBMPI")
        settings.setdefault("MPI4PY_LIBMPI", named or str(mpi.libmpi))
    return Request(
        nodes=nodes,
        job=_job(options, python),
        folder=_working_folder(),
        exports=forwarded(os.environ, [*exports, *settings]),
        settings=settings,
        env=os.environ,
        bind=options.bind,
        interface=options.interface,
        as_root=os.geteuid() == 0,
    )


def _job(options: argparse.Namespace, python: Path) -> tuple[str, ...]:
    """What every rank runs: our own training as it is, anything else through `mpiddp run`."""
    if options.is_module and options.command[:2] == ["mpiddp", "train"]:
        return (str(python), "-m", *options.command)
    module = ("-m",) if options.is_module else ()
    return (str(python), "-m", "mpiddp", "run", *module, *options.command)


def _working_folder() -> str:
    """This folder, by the name that the shell has for it: behind it may stand another on each host."""
    logical = Path(os.environ.get("PWD", ""))
    if logical.is_absolute() and logical.is_dir() and logical.samefile(Path.cwd()):
        return str(logical)
    return str(Path.cwd())


@contextmanager
def _private_folder(needed: bool) -> Iterator[str]:
    if not needed:
        yield "."
        return
    import tempfile  # costs 10 ms, and most jobs need no file

    with tempfile.TemporaryDirectory(prefix="mpiddp-") as folder:
        yield folder


def _exit_code(mpi: Mpi, end: End) -> int:
    """The launcher's own code, after the one sentence that the ranks cannot have said."""
    if end.code == STOPPED_AFTER_CHECKPOINT:
        return end.code
    if end.interrupted:
        _say("interrupted: the job was stopped.")
        return INTERRUPTED
    if end.code in (DONE, BAD_INPUT):  # a rank that refuses its input has said why
        return end.code
    _say(f"the job failed: {_cause(mpi, end.code)}.")
    return FAILED


def _cause(mpi: Mpi, code: int) -> str:
    if code < 0:
        return f"{mpi.program.name} was killed by {signal.Signals(-code).name}"
    # Elsewhere 128 + N may be a code that the launcher made up, or that of a rank it has ended.
    if mpi.flavour == "openmpi" and code - 128 in set(signal.Signals):
        return f"a rank was killed by {signal.Signals(code - 128).name}"
    return f"{mpi.program.name} ended with exit code {code}"


def _say(sentence: str) -> None:
    print(f"mpiddp: {sentence}", file=sys.stderr, flush=True)
