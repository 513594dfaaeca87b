"""Inside the script's process: wait for the ranks to meet, and run the script as python would.

    python -c "from mpiddp.runtime.script import main; main(…)" FD (script | module) NAME [ARGS ...]

A rank's agent starts this before it meets the other ranks (`mpiddp.runtime.agent`), so torch is imported
meanwhile, unless the script clearly does without. No function of Python is replaced: the agent sees how this
process ends.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType, TracebackType
from weakref import WeakKeyDictionary

from mpiddp.errors import STOPPED
from mpiddp.protocol.variables import OBSERVER
from mpiddp.runtime.job.ending import ending_of
from mpiddp.runtime.job.session import BY_OPTIMIZER, Session, current, script_session, stop_on
from mpiddp.world import World

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_KEPT = 1 << 30  # bytes of a block; larger ones are data sets, not a step's tensors
_LARGEST_IN_OLD_GLIBC = 32 << 20  # an old glibc rejects a larger value
_GLOO, _GLOO_S, _GLOO_POLL_S = "pt_gloo_runloop", 1.0, 0.01
_IDLE = 3  # times in a row that no thread of gloo runs or waits for a core
_OURS = str(Path(__file__).parent)  # the folder whose frames lead to a script


def main(*, imports_torch: bool) -> None:
    """Be the script of a rank. It ends as python would end it."""
    number, kind, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.set_inheritable(number, False)
    session = current()
    session.control = control = socket.socket(fileno=number)
    faulthandler.enable(2, all_threads=False)  # the thread that crashes, which is the user's
    # The agent sends this signal to see where the main thread is, also while native code holds the GIL. Only
    # that thread writes its stack: another one's may change while it is read, and the rank would crash.
    faulthandler.register(signal.SIGURG, file=number, all_threads=False)
    keep_freed_memory(os.environ)
    atexit.register(await_gloo)
    if not getattr(sys.flags, "safe_path", False):  # with it, Python 3.11 adds none
        # What python puts there, in the place of this program's own folder.
        sys.path[0] = str(Path(name).resolve().parent if kind == "script" else Path.cwd())
    if imports_torch:
        with contextlib.suppress(ImportError):  # a script need not use it
            import_torch()
    session.tell_agent("ready", has_torch="torch" in sys.modules)
    sys.argv = sys.argv[3:]
    try:
        _begin(session, control)
        _run(kind, name)
    except BaseException as caught:
        session.error = caught
    error = session.error
    ending = ending_of(error, has_stopped=session.stop.has_stopped)
    if error is None or not ending.is_failure:
        session.tell_agent("left")
        if not session.is_member:  # else a handler of atexit leaves
            session.leave()
    else:
        session.fail(error)
        if ending.traceback:  # else it is a sentence
            frames = script_frames(error.__traceback__)
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
            sys.excepthook(type(error), error.with_traceback(frames), frames)
    if isinstance(error, SystemExit):
        error.__traceback__ = None  # its frames would keep the script's objects, as python does not
        sys.exit(error.code)
    sys.exit(ending.code)


def await_gloo() -> None:
    """Let gloo's threads free the tensors of the last collective, for which they need Python's lock.

    Later they would wait for it for ever, because the end of a DistributedDataParallel holds the lock while
    it waits for the threads of its group; or they would abort the process while Python ends ("terminate
    called without an active exception"). Both are torch 2.13's. A thread without work sleeps.
    """
    deadline, idle = time.monotonic() + _GLOO_S, 0
    while idle < _IDLE and time.monotonic() < deadline:
        states = []  # of gloo's threads: "R" runs or waits for a core, "S" sleeps
        for file in Path("/proc/self/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                name, _, rest = file.read_text("latin-1").rpartition(") ")  # "tid (name) state …"
                if name.endswith(f"({_GLOO}"):
                    states.append(rest[0])
        if not states:
            return
        idle = 0 if "R" in states else idle + 1
        time.sleep(_GLOO_POLL_S)


def keep_freed_memory(env: Mapping[str, str]) -> None:
    """Let glibc keep freed memory, because the next step allocates the same amount.

    By default, glibc returns the memory of a step's tensors to the system, and the next step waits until
    the kernel has found and zeroed every page again. With another libc, or a setting of the user's, this does
    nothing.
    """
    is_configured = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & env.keys()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or is_configured or "glibc.malloc." in env.get("GLIBC_TUNABLES", ""):
        return
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    if not mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT):
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_OLD_GLIBC)


def import_torch() -> None:
    """Import torch, unless it is imported, and tell the garbage collector that its modules are no garbage.

    They live as long as the process. Otherwise the collector visits their 250,000 objects while they are
    made, in each full collection of the training, and several times when the process ends: a third of the
    processor time of a short rank.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        import torch  # noqa: F401 - a rank that hangs here has not joined, and the launcher names the line

        gc.freeze()
    finally:
        gc.enable()


def _begin(session: Session, control: socket.socket) -> None:
    """Wait until the ranks have met, and become the script of one. Without them, end with the agent.

    The agent sends a line: the variables that a script finds under torchrun, and where the server of the job
    is. The file on rank 0 where it serves torch's store comes with the first byte.
    """
    first, listeners, _, _ = socket.recv_fds(control, 1, 1)
    line = first + control.makefile("rb").readline()
    if not line.endswith(b"\n"):
        os._exit(1)
    env = json.loads(line)
    os.environ.update(env)
    script_session()  # which connects it
    if World.from_env().launcher.mpis:
        from mpiddp.runtime.rendezvous import FinalizedMPI

        sys.meta_path.insert(0, FinalizedMPI())
    stop_on(session.stop, signal.SIGUSR1)
    if torch := sys.modules.get("torch"):
        from multiprocessing.util import register_after_fork

        register_after_fork(_leave_sigterm_to_rank, _leave_sigterm_to_rank)
        if threads := env.get("OMP_NUM_THREADS"):  # only now known
            torch.set_num_threads(int(threads))
        if session.has_launcher:
            _report_optimizer_steps(lambda step: session.count(step, BY_OPTIMIZER))
        for listener in listeners:
            from mpiddp.runtime.rendezvous.store import serve_store

            os.set_inheritable(listener, False)  # recv_fds ignores its flags
            session.torch_store = serve_store(env, listener)
    if observer := os.environ.get(OBSERVER):
        import_module(observer).observe()


def _report_optimizer_steps(report: Callable[[int], None]) -> None:
    """Let torch call `report` after each step of any optimizer, with the number of steps of that one.

    They are the steps of a script that tells none. It is a public hook of torch, and costs a microsecond a
    step. A compiled optimizer reports none. A later optimizer, of the next fold for example, goes on from the
    steps of the others.
    """
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    counts: WeakKeyDictionary[object, int] = WeakKeyDictionary()
    newest = 0

    def count(optimizer: object, args: object, kwargs: object) -> None:
        nonlocal newest
        if torch.compiler.is_compiling():
            return
        # Two optimizers of one step, as of a GAN, count it once.
        counts[optimizer] = steps = counts.get(optimizer, max(0, newest - 1)) + 1
        newest = max(newest, steps)
        report(steps)

    register_optimizer_step_post_hook(count)


def _run(kind: str, name: str) -> None:
    """Run a script, or a module, as `__main__`."""
    # Made after `import_torch` has frozen what there was. Python never clears a frozen module, so a file that
    # the script leaves open would lose its last lines.
    main_module = ModuleType("__main__")
    main_module.__dict__.update(__annotations__={}, __builtins__=builtins)
    # multiprocessing, which torch has imported, finds objects of the script by the second name.
    for each in {"__main__", "__mp_main__"} & sys.modules.keys():
        sys.modules[each] = main_module
    if kind == "module":
        import runpy

        # What python -m calls.
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        return
    file = os.path.abspath(name)  # noqa: PTH100 - as python does: a link stays a link
    main_module.__dict__.update(__file__=file, __cached__=None)
    # Keep the `from __future__` imports of this file out of the script.
    exec(compile(Path(name).read_bytes(), file, "exec", dont_inherit=True), vars(main_module))


def run_trainer(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run `mpiddp train`, a program that uses public names only: it joins in its process group.

    It supports a stop from its first moment on, and alone the first Ctrl-C requests one.
    """
    from mpiddp.runtime.gpu import prepare

    world = World.from_env()
    prepare(world)
    keep_freed_memory(os.environ)
    stop = script_session().stop
    stop.declare_support()
    if world.launcher.name == "none":
        stop_on(stop, signal.SIGTERM, signal.SIGINT, only_first=True)
    code = main(argv)
    if code == STOPPED:
        stop.stopped()
    return code


def script_frames(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that lead to the script."""
    while traceback and traceback.tb_frame.f_code.co_filename.startswith(("<frozen ", _OURS)):
        traceback = traceback.tb_next
    return traceback


def _leave_sigterm_to_rank(_: object) -> None:
    """In a forked child of multiprocessing, which begins: a loader's worker ends at its rank's SIGTERM alone.

    A batch system may send one to every process of a job, whose rank still saves, and needs its workers.
    """
    from multiprocessing import current_process

    target = getattr(current_process(), "_target", None)
    is_worker = getattr(target, "__module__", "").startswith("torch.utils.data.")
    if (
        is_worker and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):  # else the script handles it

        def end_with_rank() -> None:
            while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
                pass
            os._exit(0)  # as torch's own handler does

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # later threads inherit the mask
        threading.Thread(target=end_with_rank, daemon=True).start()
