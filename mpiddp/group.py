"""From ranks that know nothing of each other to a process group, and back out in good order.

with mpiddp.process_group() as world:      # or: world = mpiddp.init()
    model = DistributedDataParallel(model.to(mpiddp.group.device_of(world)))
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mpiddp import control, stop
from mpiddp.crew import LEAVE_TIMEOUT_S, Crew, Refused
from mpiddp.ending import observe
from mpiddp.errors import UserError
from mpiddp.failure import Watch
from mpiddp.placement import Place, misplaced, table
from mpiddp.rendezvous import Meeting, end_mpi, meet_over_mpi
from mpiddp.store import find_by_address, meet_over_store, serve_or_join
from mpiddp.world import World

JOIN_TIMEOUT_S = 60.0
LAUNCHER_SPEAKS_S = 5.0  # it knows more of ranks that do not join, so it may speak first
COLLECTIVE_TIMEOUT_S = 600.0
BACKENDS = ("nccl", "gloo")

# A process is in one job, and its ranks meet once: MPI cannot be started again when it is finalized.
_crew: Crew | None = None
_is_assembled = False


@contextlib.contextmanager
def assemble(world: World | None = None, *, keep_mpi: bool = False) -> Iterator[Crew]:
    """The ranks meet, share one store, and leave together at the end of the body.

    Afterwards os.environ holds what env:// scripts read: RANK, LOCAL_RANK, WORLD_SIZE,
    LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT, besides GLOO_SOCKET_IFNAME and
    NCCL_SOCKET_IFNAME unless the user has set them. Nothing else in it is touched.

    Raises:
        UserError: no launcher that makes sense, a foreign MPI, ranks that do not join.
        SystemExit: code 2, on every rank, once rank 0 has said what is wrong.
    """
    global _crew, _is_assembled
    if _is_assembled:  # by `mpiddp run`, whose script now asks for a group of its own
        assert _crew is not None
        yield _crew
        return
    if _crew is None:
        _crew = _meet(world or World.from_env(), keep_mpi=keep_mpi)
        _time_the_start(_crew.world)
    _is_assembled = True
    watch = Watch(_crew)
    watch.start()
    try:
        yield _crew
    except Refused:
        watch.stop()
        raise
    except SystemExit as end:
        if _is_failure(end):
            _tell_first(_crew)
            watch.exits(end.code if isinstance(end.code, int) else 1)
        else:
            _leave(_crew, watch, keep_mpi)  # sys.exit(main()) is how many scripts end well
        raise
    except UserError as error:
        _tell_first(_crew)
        watch.refuse(error)
        raise SystemExit(2) from None
    except BaseException as error:
        _tell_first(_crew)
        if isinstance(error, Exception) and _crew.fails_first():
            watch.end_the_job(1)  # also where the script catches it around its `with`
        raise
    else:
        _leave(_crew, watch, keep_mpi)
    finally:
        _is_assembled = False


def _is_failure(error: Exception | SystemExit) -> bool:
    """Whether it is more than a script's good end, or the end that somebody asked for."""
    if not isinstance(error, SystemExit):
        return True
    return bool(error.code) and not (error.code == stop.STOPPED and stop.current().has_stopped)


def _tell_first(crew: Crew) -> None:
    """The launcher will want to know; this says nothing where there is none."""
    if control.channel is not None:
        control.channel.is_first = crew.fails_first()


def _leave(crew: Crew, watch: Watch, keep_mpi: bool) -> None:
    """At the end of a body that succeeded: after an error there is nobody to wait for."""
    with contextlib.suppress(RuntimeError):  # rank 0 may have gone, its store with it
        stop.current().promise(crew.store, crew.world.rank, 0)
    if stop.current().has_stopped:
        # With a code other than 0 the first to leave ends the others, and these may still be saving.
        crew.exchange("", timeout_s=LEAVE_TIMEOUT_S)
    crew.leave()
    watch.stop()
    if keep_mpi:
        end_mpi()


def _meet(world: World, *, keep_mpi: bool) -> Crew:
    timeout_s = _seconds("MPIDDP_TIMEOUT", JOIN_TIMEOUT_S)
    if control.channel is not None:
        control.channel.say("joining", timeout_s=timeout_s)
        timeout_s += LAUNCHER_SPEAKS_S
    if world.launcher.speaks_mpi and world.world_size > 1:
        meeting = meet_over_mpi(world, timeout_s=timeout_s, keep_mpi=keep_mpi)
        crew = Crew(meeting.world, serve_or_join(meeting.world, meeting.listener, timeout_s))
    else:
        world, listener = find_by_address(world, timeout_s)
        crew = Crew(world, serve_or_join(world, listener, timeout_s))
        meeting = meet_over_store(crew, timeout_s)
        crew.world = meeting.world
    crew.hostnames = tuple(card.hostname for card in meeting.cards)
    _export(meeting)
    _show_placement(crew, meeting)
    return crew


@contextlib.contextmanager
def process_group(
    world: World | None = None,
    *,
    backend: str | None = None,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    keep_mpi: bool = False,
) -> Iterator[World]:
    """The job's default process group, formed from whatever launcher started this process.

    Args:
        backend: "nccl" or "gloo"; by default nccl where there is a GPU, else gloo.
        timeout_s: how long a collective may wait for a peer before the job fails.
        keep_mpi: leave MPI initialized, for a script that uses mpi4py itself.
    """
    with assemble(world, keep_mpi=keep_mpi) as crew:
        with crew.together():
            backend = choose_backend(backend)
            device = device_of(crew.world, backend)
        with crew.together():
            crew.check_same("the backend", backend, mend="Name one: --backend gloo, or nccl.")
        with joined(crew, backend, device, timeout_s=timeout_s):
            yield replace(crew.world, backend=backend, device=str(device))


def init(
    *,
    backend: str | None = None,
    timeout_s: float = COLLECTIVE_TIMEOUT_S,
    keep_mpi: bool = False,
) -> World:
    """`process_group()` for a script without a `with`: the group lasts until the interpreter exits.

    Under a plain mpirun only `sys.exit` and an uncaught error tell the other ranks how this one ended;
    `process_group()`, and `mpiddp launch`, hear of every end.
    """
    group = process_group(backend=backend, timeout_s=timeout_s, keep_mpi=keep_mpi)
    world = group.__enter__()
    what_ended_it = observe()

    def leave() -> None:
        error = what_ended_it()
        group.__exit__(type(error) if error else None, error, None)

    atexit.register(leave)
    return world


@contextlib.contextmanager
def joined(crew: Crew, backend: str, device: torch.device, *, timeout_s: float) -> Iterator[None]:
    """The default process group of torch.distributed over the crew's store, destroyed at the end."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before NCCL looks: else every rank opens a context on GPU 0
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(crew.fresh("group"), crew.store),
        rank=crew.world.rank,
        world_size=crew.world.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield
    except Refused:
        raise
    except (Exception, SystemExit) as error:
        if _is_failure(error):
            crew.fails_first()  # asked before the group's end lets the others fail as well
        raise
    finally:
        dist.destroy_process_group()


def _time_the_start(world: World) -> None:
    """At -v: the first process group, be it a script's own, does one all-reduce before all else, and
    rank 0 prints the seconds from the launcher's start to its end."""
    start = os.environ.get("MPIDDP_LAUNCHED_AT")
    if start is None or not os.environ.get("MPIDDP_VERBOSE"):
        return
    form = dist.init_process_group

    @functools.wraps(form)
    def form_and_time(*args: Any, **kwargs: Any) -> None:
        dist.init_process_group = form
        form(*args, **kwargs)
        device = torch.device("cpu")
        if "cpu:" not in dist.get_backend_config():  # "cuda:nccl"
            all_visible = world.local_rank < torch.cuda.device_count()
            index = world.local_rank if all_visible else torch.cuda.current_device()
            device = torch.device("cuda", index)
        one = torch.ones(1, device=device)
        dist.all_reduce(one)
        assert one.item() == dist.get_world_size()
        if dist.get_rank() == 0:
            seconds = time.time() - float(start)
            print(f"first all-reduce {seconds:.2f} s after the command", flush=True)

    dist.init_process_group = form_and_time


def choose_backend(wished: str | None) -> str:
    """The backend to use: `wished`, or nccl where there is a GPU, else gloo."""
    has_gpu = torch.cuda.is_available()
    if wished == "nccl" and not has_gpu:
        raise UserError(
            f"--backend nccl needs a GPU, and torch {torch.__version__} sees none on "
            f"{socket.gethostname()}. Use --backend gloo, or look at nvidia-smi there."
        )
    return wished or ("nccl" if has_gpu else "gloo")


def device_of(world: World, backend: str | None = None) -> torch.device:
    """The device of this rank: nothing else in this package decides on one.

    With nccl it is the GPU of the local rank, or the only visible one where the launcher shows each
    rank its own; with gloo the CPU.

    Raises:
        UserError: more local ranks than GPUs.
    """
    if (backend or choose_backend(None)) != "nccl":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if world.local_rank < gpus:
        return torch.device("cuda", world.local_rank)
    one_each = gpus == 1 and world.launcher.name == "slurm"  # --gpus-per-task hides the others
    if one_each:
        return torch.device("cuda", 0)
    raise UserError(
        f"{world.hostname} has {gpus} GPUs but {world.local_world_size} slots: "
        "ranks would share GPUs. Give it fewer slots in the hostfile, or use --backend gloo."
    )


def _show_placement(crew: Crew, meeting: Meeting) -> None:
    """Hold the ranks' places against the launcher's wishes, and print what was asked to be seen."""
    env = os.environ
    wanted = env.get("MPIDDP_PLACEMENT")
    if wanted or env.get("MPIDDP_REPORT"):
        card = meeting.cards[crew.world.rank]
        own = Place.of_this_process(card, torch.cuda.device_count(), crew.world.launcher.name)
        devices = crew.exchange(f"{own.device} {own.gpu}", timeout_s=JOIN_TIMEOUT_S)
        places = [
            Place(card, *device.split(" "))
            for card, device in zip(meeting.cards, devices, strict=True)
        ]
        problem = crew.agreed(misplaced(places, wanted) if wanted and crew.world.rank == 0 else "")
        with crew.together():
            if problem:
                raise UserError(problem)
        if env.get("MPIDDP_REPORT") and crew.world.rank == 0:
            print(table(places), flush=True)
    if env.get("MPIDDP_VERBOSE"):
        world = crew.world
        if world.rank == 0:
            address = f"{world.master_addr} port {world.master_port}"
            print(f"master address {address}: {meeting.reason}", flush=True)
        print(f"rank {world.rank} on {world.hostname} uses {meeting.interface}", flush=True)


def _export(meeting: Meeting) -> None:
    world = meeting.world
    os.environ.update(
        RANK=str(world.rank),
        LOCAL_RANK=str(world.local_rank),
        WORLD_SIZE=str(world.world_size),
        LOCAL_WORLD_SIZE=str(world.local_world_size),
        GROUP_RANK=str(world.node_rank),
        MASTER_ADDR=str(world.master_addr),
        MASTER_PORT=str(world.master_port),
    )
    if meeting.interface:
        # gloo takes the address of the host's own name, which Debian maps to 127.0.1.1; NCCL takes
        # the first interface it likes. "=" asks NCCL for this name and none that begins like it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={meeting.interface}")


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not 0 < value < 1e8:
        raise UserError(f'{name}="{text}" is not a number of seconds greater than 0.')
    return value
