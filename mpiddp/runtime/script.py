"""Inside the script's process: wait for the ranks to meet, and run the script as python would.

    python -c "… from mpiddp.runtime.script import main; main(…)" FD (script | module) NAME [ARGS ...]

A rank's agent starts this before it meets the other ranks (`mpiddp.runtime.agent`). No function of Python is
replaced: the agent sees how this process ends. `mpiddp.runtime.patches` has all that differs from python.
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from importlib import import_module
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from mpiddp.errors import STOPPED
from mpiddp.hosts.sockets import out_of_the_way
from mpiddp.protocol.variables import JOB, OBSERVER
from mpiddp.runtime import patches
from mpiddp.runtime.job.ending import ending_of
from mpiddp.runtime.job.session import current, script_session
from mpiddp.runtime.job.stopping import stop_on
from mpiddp.world import World

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_KEPT = 1 << 30  # bytes of a block; larger ones are data sets, not a step's tensors
_LARGEST_IN_OLD_GLIBC = 32 << 20  # an old glibc rejects a larger value
_MOST_FILES = 5  # of a spare process: its socket and its streams; and where the store listens
_OURS = str(Path(__file__).parent)  # the folder whose frames lead to a script


def main(*, imports_torch: bool) -> None:
    """Run the script of a rank. The process ends as under python."""
    number, kind, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    session = current()
    session.has_agent = True
    session.control = control = out_of_the_way(socket.socket(fileno=number))
    if not getattr(sys.flags, "safe_path", False):  # with it, Python 3.11 adds none
        # What python puts there.
        sys.path.insert(0, str(Path(name).resolve().parent if kind == "script" else Path.cwd()))
    has_used_mpi = World.from_env().launcher.mpis and JOB not in os.environ
    mpi_ended = patches.MPI_FINALIZED if has_used_mpi else ""
    script = patches.Script(session, control, imports_torch, mpi_ended)
    atexit.register(lambda: current().tell_over_at_exit())  # the first handler is called last
    patches.apply(patches.BEFORE_RANKS_MEET, script)
    sys.argv = sys.argv[3:]
    try:
        script = _begin(script)
        session = script.session
        patches.apply(patches.ONCE_THEY_HAVE_MET, script)
        if observer := os.environ.get(OBSERVER):
            import_module(observer).observe()
        _run(kind, name)
    except BaseException as caught:
        session.error = caught
    error = session.error
    with _handlers_wait() if error else nullcontext():
        ending = ending_of(error, has_stopped=session.stop.has_stopped)
        if error and ending.is_failure:
            session.fail(error)
    if error is None or not ending.is_failure:
        session.tell_agent("left")
        if not session.is_member:  # else a handler of atexit leaves
            session.leave()
    elif ending.traceback:  # else it is a sentence
        frames = script_frames(error.__traceback__)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
        _show(error.with_traceback(frames))
    code: int | str | None = ending.code
    if isinstance(error, SystemExit):
        code, error.__traceback__ = error.code, None
    # Python flushes the script's open files only if nothing but sys.last_value keeps its frames.
    error = frames = None
    sys.exit(code)


def _show(error: BaseException) -> None:
    """Print the error that ends the script as python does, also if the script's own hook fails."""
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Exception as of_hook:
        of_hook.__traceback__ = script_frames(of_hook.__traceback__)
        for title, each in (
            ("Error in sys.excepthook", of_hook),
            ("\nOriginal exception was", error),
        ):
            print(f"{title}:", file=sys.stderr)
            sys.__excepthook__(type(each), each, each.__traceback__)


@contextmanager
def _handlers_wait() -> Iterator[None]:
    """Let the script's handlers of signals wait for those of atexit, where their errors are no cause.

    That of DataLoader raises one when a worker ends, often just after the error that ends the script.
    """
    numbers = range(1, signal.NSIG)
    handlers = {each: found for each in numbers if callable(found := signal.getsignal(each))}
    for number in handlers:
        signal.signal(number, lambda number, _: atexit.register(signal.raise_signal, number))
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _begin(script: patches.Script) -> patches.Script:
    """Wait until the ranks have met, and become the script of one. Without them, end with the agent.

    The agent sends a line: the variables that a script finds under torchrun, where the server of the job is,
    and the last arguments, if the process is older than these. With its first byte come the files of a
    spare process, and on rank 0 that where it serves torch's store.
    """
    script.session.tell_agent("ready", has_torch="torch" in sys.modules, pid=os.getpid())
    facts, files = _told_by_agent(script)
    while numbers := facts["spare"]:
        of_spare, files = dict(zip(numbers, files, strict=False)), files[len(numbers) :]
        spare = patches.spare(script, of_spare) if patches.is_on("spare") else None
        for file in (*of_spare.values(), *(files if spare else ())):
            os.close(file)
        if spare is None:
            break
        script = spare
        patches.import_compiler(script)
        facts, files = _told_by_agent(script)
        patches.name_process(Path(sys.executable).name)
    if facts["is_restart"]:
        script = script._replace(mpi_ended=patches.MPI_USED)
    env = facts["variables"]
    os.environ.update(env)
    script_session()  # which connects it
    if torch := sys.modules.get("torch"):
        if threads := env.get("OMP_NUM_THREADS"):  # only now known
            torch.set_num_threads(int(threads))
        for listener in files:
            from mpiddp.runtime.rendezvous.store import serve_store

            os.set_inheritable(listener, False)  # recv_fds ignores its flags
            script.session.torch_store = serve_store(env, listener)
    return script


def _told_by_agent(script: patches.Script) -> tuple[dict[str, Any], list[int]]:
    """What the agent says once the ranks have met, and the files that come with it.

    Its last arguments are taken at once: a copy of this process has them, too.
    """
    first, files, _, _ = socket.recv_fds(script.control, 1, _MOST_FILES)
    line = first + script.control.makefile("rb").readline()
    if not line.endswith(b"\n"):
        os._exit(1)
    facts = json.loads(line)
    sys.argv += facts["args"]
    return facts, files


def _run(kind: str, name: str) -> None:
    """Run a script, or a module, as `__main__`."""
    # A program that restarts itself runs this.
    sys.orig_argv = [sys.executable, *["-m"] * (kind == "module"), *sys.argv]
    # Made after `patches.torch_ahead` has frozen what there was. Python never clears a frozen module, so a
    # file that the script leaves open would lose its last lines.
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
    loader = SourceFileLoader("__main__", file)
    main_module.__dict__.update(__file__=file, __cached__=None, __loader__=loader)
    content = Path(name).read_bytes()
    if b"\0" in content:  # a zip application, or compiled
        import runpy

        runpy.run_path(name, run_name="__main__")
        return
    # Keep the `from __future__` imports of this file out of the script.
    exec(compile(content, file, "exec", dont_inherit=True), vars(main_module))


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
