"""What mpiddp changes in the process of a script, beside its variables. All else is as python has it.

MPIDDP_NO_PATCHES names the patches that are to be left out, or "all" of them:

    MPIDDP_NO_PATCHES=lines,gloo_end mpiddp launch train.py

docs/reference.md lists them, and a test of tests/integration/runtime/test_still_needed.py fails once one of
them is no longer needed. By hand, a process has only `stop_signal` and `no_dns`.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mpiddp.errors import aid, print_error
from mpiddp.protocol.channel import encode
from mpiddp.protocol.variables import JOB, NO_PATCHES
from mpiddp.runtime.at_import import AtImport, frozen_torch
from mpiddp.runtime.job.progress import BY_OPTIMIZER
from mpiddp.runtime.job.session import Session, script_session
from mpiddp.runtime.job.stopping import stop_on
from mpiddp.text import with_fix
from mpiddp.world import World

if TYPE_CHECKING:
    from mpiddp.runtime.job.writes import Writes

_GLOO, _GLOO_S, _GLOO_POLL_S = "pt_gloo_runloop", 1.0, 0.01
_ERROR = 2  # the level of torch's log that leaves warnings out
_IDLE = 3  # times in a row that no thread of gloo runs or waits for a core


def apply(patches: Iterable[Callable[[Session], None]], session: Session) -> None:
    """Make these changes, except those that the user leaves out."""
    for patch in patches:
        if is_on(patch.__name__):
            with aid(f"patch {patch.__name__}"):
                patch(session)


def is_on(name: str) -> bool:
    left_out = re.split(r"[,\s]+", os.environ.get(NO_PATCHES, ""))
    return not {name, "all"} & {*left_out}


def crash_stack(session: Session) -> None:
    """A crash in native code prints the Python stack of its thread, or what PYTHONFAULTHANDLER asks for."""
    if not faulthandler.is_enabled():
        faulthandler.enable(2, all_threads=False)


def stack(session: Session) -> None:
    """SIGURG writes the main thread's stack to the agent, for `mpiddp stacks` and hangs."""
    assert session.control is not None
    # The stack of another thread may change while it is read, and the rank would crash.
    faulthandler.register(signal.SIGURG, file=session.control.fileno(), all_threads=False)


def lines(session: Session) -> None:
    """stdout passes on each line when it ends. Python would delay it if stdout is a pipe."""
    if not os.isatty(1):
        with suppress(AttributeError, ValueError):  # it is closed
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def flight_recorder(session: Session) -> None:
    """torch records the latest 256 collectives instead of 2,000, unless TORCH_FR_BUFFER_SIZE is set.

    To record costs the same. The launcher asks for it every 10 s, which holds Python's lock for 3 ms, not 30 ms.
    """
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
        os.environ["TORCH_FR_BUFFER_SIZE"] = "256"


def await_gloo() -> None:
    """Wait until gloo's threads have freed the tensors of the last collective.

    If they freed them later, they could wait for Python's lock for ever, because the end of a
    DistributedDataParallel holds it while it waits for the threads of its group. Or they could abort the
    process while Python ends ("terminate called without an active exception"). torch 2.13 has both faults.
    A thread without work sleeps.
    """
    deadline, idle = time.monotonic() + _GLOO_S, 0
    while idle < _IDLE and time.monotonic() < deadline:
        states = []  # a letter for each of gloo's threads: "R" runs or waits for a core, "S" sleeps
        with suppress(OSError):  # the process has no free file
            for thread in Path("/proc/self/task").iterdir():
                with suppress(OSError):  # it has ended
                    # "tid (name) state …"
                    name, _, rest = (thread / "stat").read_text("latin-1").rpartition(") ")
                    if name.endswith(f"({_GLOO}"):
                        states.append(rest[0])
        if not states:
            return
        idle = 0 if "R" in states else idle + 1
        time.sleep(_GLOO_POLL_S)


def finalized_mpi(session: Session) -> None:
    """Under a plain mpirun, `mpi4py.MPI` is refused: the agent has used MPI, which cannot start twice."""
    if World.from_env().launcher.mpis and JOB not in os.environ:
        session.starting_mpi = refuse_mpi()


def refuse_mpi() -> Callable[[], NoReturn]:
    """Raise an ImportError for `mpi4py.MPI`, which says what to do instead. Returns what raises it.

    Every function of a finalized MPI aborts the process, and an MPI of a script's own would be rank 0 of 1.
    Libraries that only ask whether MPI is there (PyTorch Lightning 2.6 calls MPI.COMM_WORLD.Get_size()) catch
    the error, and continue without MPI.
    """

    def refused() -> NoReturn:
        raise ImportError(
            "mpiddp has finalized the MPI of this rank. To use mpi4py in a script, start it with mpiddp "
            "launch; under mpirun itself, import it before mpiddp.init()",
            name="mpi4py.MPI",
        )

    sys.meta_path.insert(0, AtImport(["mpi4py.MPI"], refused))
    return refused


def say_lone_mpi(session: Session) -> None:
    """Say so if the script has started MPI without mpi4py, so that each rank is rank 0 of 1 in it."""
    if (
        session.rank > 0
        or session.starting_mpi is nullcontext
        or session.env.get("WORLD_SIZE") == "1"
    ):
        return
    maps = Path("/proc/self/maps").read_text("latin-1")
    if library := "/libmpi" in maps and re.search(r"/\S*/libmpi(?!r)\w*\.so\S*", maps):
        import ctypes

        ctypes.CDLL(library[0], os.RTLD_NOLOAD).MPI_Initialized(
            ctypes.byref(has_begun := ctypes.c_int())
        )
        if has_begun.value:
            session.starting_mpi = nullcontext  # say so once
            why = f"the script has started MPI ({library[0]}) without mpi4py, so each rank is rank 0 of 1 in it"
            print_error(
                with_fix(
                    f"{why}.", "mpiddp launch, and in the script before it: from mpi4py import MPI"
                )
            )


def stop_signal(session: Session) -> None:
    """SIGUSR1 and SIGUSR2 request a stop, unless the script handles them. Forked children ignore them."""
    stop_on(session.stop, signal.SIGUSR1, signal.SIGUSR2)


def gloo_end(session: Session) -> None:
    """At exit, and before a group is destroyed, gloo has 1 s to end. Otherwise torch may hang or abort."""
    atexit.register(await_gloo)
    await_gloo_at_destroy()


def await_gloo_at_destroy() -> None:
    """Let `destroy_process_group` wait: a DistributedDataParallel may end right after it, with its group."""
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.destroy_process_group, "__wrapped__"):
        return
    destroy = dist.destroy_process_group

    @wraps(destroy)
    def await_and_destroy(*args: Any, **kwargs: Any) -> None:
        await_gloo()
        destroy(*args, **kwargs)

    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = await_and_destroy


def store_of_job(session: Session) -> None:
    """A script's groups meet at the store that a process beside rank 0 serves, at a port of its own.

    torch would serve the store at MASTER_PORT in rank 0's process, and it would end with that. A later group gets keys of
    its own: under those of an earlier group, a rank may read an address at which nobody listens any more.
    The groups of each size have numbers of their own, because only some ranks may form a smaller group.
    """
    from datetime import timedelta

    import torch.distributed as dist

    if (of_job := session.store) is None or not dist.is_available():
        return
    rendezvous: Any = sys.modules["torch.distributed.rendezvous"]
    TCPStore, numbers = rendezvous.TCPStore, Counter[int | None]()
    make, default = TCPStore.__init__, timedelta(seconds=300)

    @wraps(make)
    def connect(
        store: object,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = default,
        *args: Any,
        **options: Any,
    ) -> None:
        script_session()  # connects, so that the launcher can ask for the group's collectives
        if (host_name, port) == of_job.place:
            port, is_master = of_job.port, False
        make(store, host_name, port, world_size, is_master, timeout, *args, **options)

    def of_group(*args: Any, **options: Any) -> Any:
        store, size = TCPStore(*args, **options), options.get("world_size")
        is_of_job = (options.get("host_name"), options.get("port")) == of_job.place
        numbers[size] += is_of_job
        is_later = is_of_job and (size, numbers[size]) != (of_job.world_size, 1)
        return dist.PrefixStore(f"mpiddp/{size}/{numbers[size]}", store) if is_later else store

    TCPStore.__init__, rendezvous.TCPStore = connect, of_group


def waits(session: Session) -> None:
    """The launcher learns of waits that torch does not record: in `init_process_group`, `recv`, `send` and `join()`.

    A torch that is built with MPI starts it in `init_process_group`, as the rank that it is.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    _tell_forming(session, dist)
    _tell_shadows(dist)
    for name in ("recv", "send"):
        _note_peer(session, dist, name)


def _tell_forming(session: Session, dist: Any) -> None:
    init = dist.init_process_group

    @wraps(init)
    def tell_and_init(*args: Any, **kwargs: Any) -> None:
        apply([say_lone_mpi], session)
        tell = script_session().coordinator.tell_launcher  # connects
        tell("forming", active=True)
        try:
            with (
                session.starting_mpi()
                if "mpi" in (*args[:1], kwargs.get("backend"))
                else nullcontext()
            ):
                init(*args, **kwargs)
        finally:
            tell("forming", active=False)

    dist.init_process_group = dist.distributed_c10d.init_process_group = tell_and_init


def _tell_shadows(dist: Any) -> None:
    """Of a rank that has left the loop of `join()`: it repeats the collectives of the others, and waits for them."""
    Join: Any = dist.algorithms.join.Join
    leave = Join.__exit__

    @wraps(leave)
    def tell_and_leave(context: Any, *error: Any) -> None:
        tell = script_session().coordinator.tell_launcher
        tell("shadows", active=True)
        try:
            leave(context, *error)
        finally:
            tell("shadows", active=False)

    Join.__exit__ = tell_and_leave


def _note_peer(session: Session, dist: Any, name: str) -> None:
    """Note who waits for which rank, until the launcher asks: a pipeline makes many such calls."""
    call, other = getattr(dist, name), {"recv": "src", "send": "dst"}[name]

    @wraps(call)
    def note_and_call(*args: Any, **kwargs: Any) -> Any:
        thread, peer = threading.get_ident(), (*args, None, None)[1]
        session.peers[thread] = name, kwargs.get(other, peer), time.time_ns() // 1000
        try:
            return call(*args, **kwargs)
        finally:
            session.peers.pop(thread, None)

    setattr(dist, name, note_and_call)
    setattr(dist.distributed_c10d, name, note_and_call)


def optimizer_steps(session: Session) -> None:
    """A hook of torch counts the steps of optimizers, for `mpiddp top`.

    It costs a microsecond a step. The steps of a compiled optimizer are not counted. If a script makes
    another optimizer, for the next fold for example, its steps follow those of the others.
    """
    from weakref import WeakKeyDictionary

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    counts: WeakKeyDictionary[object, int] = WeakKeyDictionary()
    newest = 0

    def count_step(optimizer: object, args: object, kwargs: object) -> None:
        nonlocal newest
        if torch.compiler.is_compiling():
            return
        with aid("count of steps"):
            # Two optimizers of one step, as of a GAN, count it once.
            counts[optimizer] = steps = counts.get(optimizer, max(0, newest - 1)) + 1
            newest = max(newest, steps)
            if steps == 1:  # if it fails, it is not tried again
                script_session()  # connects
            session.progress.count(steps, BY_OPTIMIZER)

    register_optimizer_step_post_hook(count_step)


def whole_files(session: Session) -> None:
    """A file that the script writes is not torn: signals, and the end of a failed job, wait up to 10 minutes for it.

    It counts for files of torch.save, of safetensors, and of torch.distributed.checkpoint, whose waits for other ranks do
    not count. The agent holds the signals back, so the script's handlers stay as they are. torch.save itself stays the
    same function, because modules may have it already under a name of their own.
    """
    if session.control is None:
        return
    import torch

    from mpiddp.runtime.job.writes import Writes, Writing

    writes = Writes(session.progress)
    writes.share(session.control, encode("writes"))
    session.writes = writes
    serialization: Any = torch.serialization
    open_zip, open_file = serialization._open_zipfile_writer, serialization._open_file_like

    @wraps(open_zip)
    def open_zip_writer(target: Any) -> Any:
        if type(target) is not str and isinstance(target, io.BytesIO):
            return open_zip(target)
        return Writing(writes, target, open_zip)

    @wraps(open_file)
    def open_file_like(target: Any, mode: str) -> Any:
        if "w" not in mode or isinstance(target, io.BytesIO):
            return open_file(target, mode)
        return Writing(writes, target, open_file, mode)

    serialization._open_zipfile_writer = open_zip_writer
    serialization._open_file_like = open_file_like
    for name, patch in (
        ("safetensors", _write_safetensors_whole),
        ("torch.distributed.checkpoint.filesystem", _write_dcp_whole),
    ):
        if name in sys.modules:
            patch(writes)
        else:
            sys.meta_path.insert(0, AtImport([name], partial(_then, patch, writes)))


@contextmanager
def _then(patch: Callable[[Writes], None], writes: Writes) -> Iterator[None]:
    yield
    with aid(f"patch {whole_files.__name__}"):
        patch(writes)


def _write_safetensors_whole(writes: Writes) -> None:
    from mpiddp.runtime.job.writes import Writing

    plain = sys.modules["safetensors"].serialize_file

    @wraps(plain)
    def serialize_file(*args: Any, **kwargs: Any) -> Any:
        with Writing(writes, args[1] if len(args) > 1 else kwargs.get("filename")):
            return plain(*args, **kwargs)

    for name, module in [*sys.modules.items()]:  # safetensors.torch may have come first
        if name.partition(".")[0] == "safetensors" and vars(module).get("serialize_file") is plain:
            vars(module)["serialize_file"] = serialize_file


def _write_dcp_whole(writes: Writes) -> None:
    filesystem: Any = sys.modules["torch.distributed.checkpoint.filesystem"]
    for writer in (filesystem.FileSystemWriter, *filesystem.FileSystemWriter.__bases__):
        for name in {"write_data", "_write_data", "finish"} & vars(writer).keys():
            setattr(writer, name, _written_whole(vars(writer)[name], writes))


def _written_whole(plain: Callable[..., Any], writes: Writes) -> Callable[..., Any]:
    from mpiddp.runtime.job.writes import Writing

    @wraps(plain)
    def write(writer: Any, *args: Any, **kwargs: Any) -> Any:
        with Writing(writes, getattr(writer, "path", "")):
            return plain(writer, *args, **kwargs)

    return write


def no_dns(session: Session) -> None:
    """torch logs the addresses of its connections without names, because DNS may not answer.

    torch 2.13 looks up the name of each address that it connects to, only to log it, until one look-up fails.
    So the first one fails here: at once, because glibc has no service for names meanwhile, and without a
    warning. Then /etc/nsswitch.conf holds again. Without glibc, nothing changes.
    """
    import ctypes
    from datetime import timedelta

    import torch

    try:
        make, configure = torch.distributed.TCPStore, ctypes.CDLL(None).__nss_configure_lookup
        library = ctypes.CDLL(f"{torch.__path__[0]}/lib/libc10.so")
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (AttributeError, OSError, ValueError):
        return
    file = Path("/etc/nsswitch.conf")
    services = re.search(rb"(?m)^\s*hosts:([^#\n]+)", file.read_bytes() if file.exists() else b"")
    before, level.value = level.value, _ERROR
    configure(b"hosts", b"none")
    try:
        make(
            "127.0.0.1", 0, 1, True, timedelta(seconds=1), use_libuv=False
        )  # libuv would leave a pipe open
    finally:
        configure(b"hosts", services[1].strip() if services else b"files dns")  # glibc's default
        level.value = before


BEFORE_RANKS_MEET = (crash_stack, stack, lines, flight_recorder)
ONCE_THEY_HAVE_MET = (finalized_mpi, stop_signal)
ONCE_TORCH_IS_THERE = (gloo_end, no_dns, store_of_job, waits, optimizer_steps, whole_files)
IN_A_CALL = (frozen_torch,)
