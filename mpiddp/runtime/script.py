"""Inside the script's process: the variables of ranks that have met come in, and the script runs.

    python -c "… from mpiddp.runtime.script import main; main()" FD (script | module) NAME [ARGS ...]

A rank's agent starts this before it meets the other ranks (`mpiddp.runtime.agent`), and sees how this process
ends. The script runs as under python. `mpiddp.runtime.patches` has all that differs.
"""

from __future__ import annotations

import atexit
import builtins
import json
import os
import signal
import socket
import sys
from _frozen_importlib_external import SourceFileLoader  # importlib would load four more modules
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from mpiddp.errors import STOPPED, aid
from mpiddp.protocol.channel import CHUNK, SPARE_NAME, name_process
from mpiddp.protocol.variables import JOB, OBSERVER
from mpiddp.runtime import patches
from mpiddp.runtime.at_import import AtImport
from mpiddp.runtime.job.session import ProcessKind, Session, current, out_of_the_way, script_session
from mpiddp.runtime.job.stopping import interrupts_end, stop_on
from mpiddp.world import World

# glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_KEPT = 1 << 30  # bytes of a block; larger ones are data sets, not a step's tensors
_LARGEST_IN_OLD_GLIBC = 32 << 20  # an old glibc rejects a larger value
_USES_MPI = ("mpi4py.MPI", "petsc4py", "horovod")  # modules that start MPI
_DYNAMO = (
    "torch._dynamo"  # the first optimizer, or DDP, imports it, which takes nearly as long as torch
)
_Before = tuple[Mapping[str, str], Sequence[str]]  # os.environ and sys.path, before an import
_Imported = Callable[[_Before], None]


def main() -> None:
    """Run the script of a rank. The process ends as under python."""
    number, kind, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    session = current()
    session.kind, session.control = ProcessKind.SCRIPT, out_of_the_way(socket.socket(fileno=number))
    is_ours = kind == "module" and name.partition(".")[0] == "mpiddp"
    # python itself puts the script's folder first, unless it is told not to (-P, since Python 3.11). A module
    # of ours, such as the doctor's job, imports nothing from there.
    if not (is_ours or getattr(sys.flags, "safe_path", False)):
        folder = Path(name).resolve().parent if kind == "script" else Path.cwd()
        sys.path.insert(0, str(Path(name).absolute() if _is_folder(kind, name) else folder))
    # Registered before those of the script, so called after them.
    atexit.register(lambda: current().tell_over_at_exit())
    patches.apply(patches.BEFORE_RANKS_MEET, session)
    sys.argv = sys.argv[3:]
    try:
        _begin(session, session.control)
        patches.apply(patches.ONCE_THEY_HAVE_MET, session)
        if observer := os.environ.get(OBSERVER):
            __import__(observer)
            sys.modules[observer].observe()
        _run(kind, name)
    except BaseException as caught:
        session.end.error = caught
    try:
        patches.apply([patches.say_lone_mpi], session)
        code = session.end.of_script()
    except KeyboardInterrupt as caught:  # while it waits for the other ranks, for example
        session.end.error = caught
        code = session.end.of_script()
    sys.exit(code)


def _begin(session: Session, control: socket.socket) -> None:
    """Wait until the ranks have met, and become the script of one. Without them, end with the agent.

    The agent sends "go", with the script's variables, the port of torch's store, and its last arguments if this
    process is older than they are. A process that waits for the next attempt gets an "ahead" before for each import that the script has told its agent.
    """
    # The calls that follow the script's own imports. Until it begins, there are none.
    at_torch, at_dynamo = list[_Imported](), list[_Imported]()
    sys.meta_path.insert(0, AtImport(["torch"], partial(_importing_torch, session, at_torch)))
    sys.meta_path.insert(0, AtImport([_DYNAMO], partial(_importing, at_dynamo)))
    session.tell_agent("ready")
    facts = _message_of_agent(control)
    ahead: list[dict[str, Any]] = []
    while facts["type"] == "ahead":
        name_process(SPARE_NAME)
        _import_ahead(facts)
        ahead.append(facts)
        facts = _message_of_agent(control)
    if ahead:
        name_process(Path(sys.executable).name)
    sys.argv += facts["args"]
    env, session.is_shown = facts["variables"], facts["is_shown"]
    os.environ.update(env)
    session.env = variables = dict(os.environ)
    session.rank, store_port = int(env["RANK"]), facts["store_port"]
    if JOB in os.environ:
        session.starting_mpi = partial(_starting_mpi, session, facts["mpi"])
        sys.meta_path.insert(0, AtImport(_USES_MPI, session.starting_mpi))

    def torch_is_there(before: _Before) -> None:
        from mpiddp.runtime.rendezvous.store import StoreOfJob

        if patches.is_on(patches.store_of_job.__name__):
            torch = sys.modules["torch"]
            _tell_store(session, [str(Path(folder).parent) for folder in torch.__path__])
            place = env["MASTER_ADDR"], int(env["MASTER_PORT"])
            session.store = StoreOfJob(place, store_port, int(env["WORLD_SIZE"]))
        patches.apply(patches.ONCE_TORCH_IS_THERE, session)
        with aid("hot spare"):
            for facts in ahead or [_ahead("torch", variables, before)]:
                session.tell_agent("imported", ahead=facts)

    def dynamo_is_there(before: _Before) -> None:
        with aid("hot spare"):
            session.tell_agent("imported", ahead=_ahead(_DYNAMO, variables, before))

    at_torch.append(torch_is_there)
    at_dynamo.append(dynamo_is_there)
    if "torch" in sys.modules:
        torch_is_there((os.environ, sys.path))


@contextmanager
def _importing_torch(session: Session, afterwards: Iterable[_Imported]) -> Iterator[None]:
    if afterwards:  # the script has begun
        _tell_store(session)
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with (
        _importing(afterwards),
        patches.frozen_torch() if patches.is_on("frozen_torch") else nullcontext(),
        # torch goes on without numpy if numpy's import fails, and so also at a KeyboardInterrupt.
        interrupts_end(signal.default_int_handler) if raises else nullcontext(),
    ):
        yield


def _tell_store(session: Session, of_torch: Sequence[str] = ()) -> None:
    """Let rank 0's agent start the process of torch's stores, while this process imports torch.

    `of_torch` are the folders that have it, once that is known.
    """
    if session.rank == 0 and patches.is_on(patches.store_of_job.__name__):
        folders = [folder for folder in sys.path if folder and isinstance(folder, str)]
        session.tell_agent("store", folders=[*of_torch, *folders], is_known=bool(of_torch))


@contextmanager
def _importing(afterwards: Iterable[_Imported]) -> Iterator[None]:
    before = dict(os.environ), [*sys.path]  # an import may set variables itself
    yield
    for imported in afterwards:
        imported(before)


def _ahead(module: str, variables: Mapping[str, str], before: _Before) -> dict[str, Any]:
    """What a spare imports, with all that the script had changed `before`, and the import may depend on."""
    environ, path = before
    now = {**dict.fromkeys(variables), **environ}
    return {
        "module": module,
        "variables": {name: now[name] for name in now if now[name] != variables.get(name)},
        "path": [folder for folder in path if isinstance(folder, str)],
    }


def _import_ahead(facts: Mapping[str, Any]) -> None:
    """Import torch, or a part of it, for the next attempt, with the variables that the script had at its import.

    The script's other packages might do more when they are imported, as the rank of an attempt that is over.
    """
    path, variables = [*sys.path], {name: os.environ.get(name) for name in facts["variables"]}
    sys.path[:] = facts["path"]
    _set(facts["variables"])
    with suppress(Exception):  # the script of the next attempt meets the same error itself
        __import__(facts["module"])
    _set(variables)
    sys.path[:] = [*path, *(folder for folder in sys.path if folder not in facts["path"])]
    if "tempfile" in sys.modules:  # it keeps the folder that TMPDIR named
        vars(sys.modules["tempfile"])["tempdir"] = None


def _set(variables: Mapping[str, str | None]) -> None:
    """Set these variables, and remove those without a value."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _starting_mpi(session: Session, variables: Mapping[str, str]) -> Iterator[None]:
    """Let the script start MPI as the rank of its mpirun. No later process of this rank can do so."""
    session.starting_mpi = nullcontext
    session.tell_agent("mpi")
    before = {name: os.environ.get(name) for name in variables}  # a few, with --mpi-variables
    os.environ.update(variables)
    yield
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        _set(before)


def _message_of_agent(control: socket.socket) -> dict[str, Any]:
    line = b""
    while not line.endswith(b"\n"):
        chunk = control.recv(CHUNK, socket.MSG_PEEK)  # it may have the next message, too
        if not chunk:
            os._exit(1)
        line += control.recv(chunk.find(b"\n") + 1 or len(chunk))
    facts: dict[str, Any] = json.loads(line)
    return facts


def _run(kind: str, name: str) -> None:
    # A program that restarts itself runs sys.orig_argv.
    flags = sys.orig_argv[1 : sys.orig_argv.index("-c")]
    sys.orig_argv = [sys.executable, *flags, *["-m"] * (kind == "module"), *sys.argv]
    main_module = ModuleType("__main__")
    main_module.__dict__.update(__annotations__={}, __builtins__=builtins)
    # If multiprocessing has been imported, it finds objects of the script by the second name.
    for alias in {"__main__", "__mp_main__"} & sys.modules.keys():
        sys.modules[alias] = main_module
    if kind == "module" or _is_folder(kind, name):
        import runpy

        # Python itself calls this function.
        module, alters_argv = (name, True) if kind == "module" else ("__main__", False)
        if module == "mpiddp" and not getattr(sys.flags, "safe_path", False):
            sys.path.insert(0, "")  # the working folder, which its __main__ removes
        runpy._run_module_as_main(module, alters_argv)  # type: ignore[attr-defined]
        return
    file = os.path.abspath(name)  # noqa: PTH100 - as python does: a link stays a link
    loader = SourceFileLoader("__main__", file)
    main_module.__dict__.update(__file__=file, __cached__=None, __loader__=loader)
    content = Path(name).read_bytes()
    if b"\0" in content:  # a zip application, or a compiled file
        import pkgutil
        import runpy

        if pkgutil.get_importer(name) is not None and not getattr(sys.flags, "safe_path", False):
            del sys.path[0]  # of an archive, Python does not search the folder
        runpy.run_path(name, run_name="__main__")
        return
    # Keep the `from __future__` imports of this file out of the script.
    exec(compile(content, file, "exec", dont_inherit=True), vars(main_module))


def _is_folder(kind: str, name: str) -> bool:
    """Whether the script is a folder, with a `__main__.py`."""
    return kind == "script" and Path(name).is_dir()


def keep_freed_memory(env: Mapping[str, str]) -> None:
    """Let glibc keep freed memory, because the next step allocates the same amount.

    Otherwise the next step waits until the kernel has zeroed every page again. A setting of the user's wins.
    """
    import ctypes

    is_configured = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & env.keys()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or is_configured or "glibc.malloc." in env.get("GLIBC_TUNABLES", ""):
        return
    mallopt(_M_TRIM_THRESHOLD, _NEVER)
    if not mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT):
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_IN_OLD_GLIBC)


def run_trainer(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run `mpiddp train`, a program that joins in its process group.

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
