"""What a rank runs, and its process.

The child leads a process group of its own: a signal to the rank's group reaches the agent alone, which
passes it on once. The agent adopts the orphans of its child, so it finds every process that the child has
started. If the agent itself is killed, the kernel kills the child.
"""

from __future__ import annotations

import contextlib
import errno
import json
import linecache
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.errors import UserError, cause_of, check_program, named_by
from mpiddp.hosts.files import files_of, import_folders, imported_by, texts_of
from mpiddp.hosts.processes import (
    OomKills,
    command_of,
    descendants,
    end_all,
    group_of,
    kills_in,
    signal_at_parents_end,
)
from mpiddp.protocol.channel import LINE_LIMIT, Lines
from mpiddp.protocol.variables import AGENT_STORE, ERROR_FILE, GPUS, PLACEMENT, RUN_ID
from mpiddp.runtime.job.ending import Ending, ending_of_process
from mpiddp.text import escaped
from mpiddp.world import RANK_SOURCES

SCRIPT, MODULE, COMMAND = "script", "module", "command"
# Python's own packages that run other code, which may use torch.
_RUNS_OTHERS = {"concurrent", "importlib", "multiprocessing", "runpy"}
_WITHOUT_TORCH = {*sys.stdlib_module_names, "mpiddp"} - _RUNS_OTHERS
# Lines that set or unset a variable; environ["X"], environ.get("X") and "X" in environ only read one.
_SETS_VARIABLES = re.compile(
    rb"\bdel +(?:os\.)?environ\b|\b(?:putenv|unsetenv|dotenv|load_dotenv)\b|"
    rb"\benviron *\[[^\n]*\] *\|?=(?!=)|"
    rb"(?<!in os\.)(?<!in )\benviron\b(?! *\[|\.(?:get|keys|values|items|copy)\()"
)
_STARTS_MPI = re.compile(rb"\b(?:mpi4py|petsc4py|horovod)\b|['\"]mpi['\"]")
# The variables that an MPI sets for its ranks. A command that starts MPI would join this job with them.
_OF_MPI = (
    *("OMPI_", "OPAL_", "ORTE_", "PRTE_", "PMIX_", "PMI_", "HYDI_", "HYDRA_"),
    *("MPI_LOCAL", "MPIR_CVAR_", "MV2_COMM_WORLD_", "I_MPI_", "JSM_", "PALS_", "FLUX_TASK_"),
    *(name for source in RANK_SOURCES if source.mpis for name in source.variables),
)
# A user's signal.py in the working folder, which -c puts first, is not Python's own.
_START = (
    "import sys; sys.path[:] = sys.path[sys.path[0] == '':]; "
    "from mpiddp.runtime.script import main; main(imports_torch=%s)"
)
# The signals that a rank passes on to its script or its command. SIGCONT follows SIGTSTP.
PASSED = (
    *(signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1),
    *(signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT),
)
_STACK_S, _WRITTEN_S = 0.8, 0.05  # for a script to write its stack: the first line, and the others
_HELPERS_S = 0.5  # for the processes of multiprocessing to notice that their parent has ended
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_OF_OURS = ("<string>", str(Path(__file__).with_name("script.py")))  # they lead to the script


class Program(NamedTuple):
    """The program of a rank: its kind, its name, and its arguments."""

    kind: str
    name: str
    args: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise UserError, or JobFailed for a broken disk, if it is not there."""
        name, path = self.name, Path(self.name)
        if self.kind == COMMAND:
            check_program(name, os.environ.get("PATH"))
        elif self.kind == MODULE:
            first = name.partition(".")[0]
            folders = [str(Path.cwd()), *sys.path]  # as python -m looks
            if not first or not (PathFinder.find_spec(first, folders) or find_spec(first)):
                where = f"{Path.cwd()} and in the installed packages"
                raise UserError(f"module {name} not found (looked in {where}).")
        else:
            with named_by(""):
                if not path.exists():
                    raise UserError(f"{name} not found (looked in {Path.cwd()}).")
                if not path.is_file():
                    folder = "a folder, not a script. To run a module: mpiddp run -m MODULE"
                    raise UserError(f"{name} is {folder if path.is_dir() else 'no regular file.'}")
                path.open("rb").close()

    @property
    def imports_torch(self) -> bool:
        """Whether torch may be imported ahead: it may be used, and nothing sets a variable that it reads.

        A script begins at once if it imports only the standard library and mpiddp, or if one of its files
        sets a variable. A module of an installed package, such as `-m coverage`, begins at once as well.
        """
        if self._is_ours:
            return True
        texts = self._texts
        if not texts or any(map(_SETS_VARIABLES.search, texts)):
            return False
        packages = {each.partition(".")[0] for each in imported_by(texts[0])}
        return any(b"torch" in text for text in texts) or bool(packages - _WITHOUT_TORCH)

    @property
    def starts_mpi(self) -> bool:
        """Whether it may start MPI, as one rank of its mpirun. No later process of this rank can do so."""
        return not self._is_ours and any(map(_STARTS_MPI.search, self._texts))

    @property
    def _is_ours(self) -> bool:
        return self.kind == MODULE and self.name.partition(".")[0] == "mpiddp"

    @property
    def _texts(self) -> list[bytes]:
        return texts_of(self.kind, self.name, str(Path.cwd()), import_folders())

    @property
    def files(self) -> list[tuple[str, str]]:
        """Its files that have to be the same on all hosts, each with its SHA-256."""
        return files_of(self.kind, self.name, str(Path.cwd()), import_folders())


def parse(argv: list[str]) -> Program:
    """The program in the arguments of `mpiddp run`."""
    kind = {"--": COMMAND, "-m": MODULE}.get("".join(argv[:1]), SCRIPT)
    job = argv if kind == SCRIPT else argv[1:]
    if not job or (kind == SCRIPT and job[0].startswith("-")):  # such as --help
        from mpiddp.arguments import OneSentenceParser  # 5 ms of each rank

        parser = OneSentenceParser(
            prog="mpiddp run",
            usage="%(prog)s (SCRIPT | -m MODULE | -- COMMAND) [ARGS ...]",
            description="Run an unmodified env:// script, or any command, as one rank of a job, after "
            "all ranks have joined.",
        )
        parser.add_argument("script", metavar="SCRIPT", help="a Python file, or a module with -m")
        parser.parse_args([*job[:1], "script"] if job else [])
    return Program(kind, job[0], tuple(job[1:]))


def command_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of the command of a rank that has joined, from those of the rank."""
    # The command may start a torchrun with other ranks. The agent has applied GPUS.
    left_out = (*_OF_MPI, GPUS, PLACEMENT, AGENT_STORE)
    found = {name: value for name, value in env.items() if not name.startswith(left_out)}
    found.setdefault(RUN_ID, found["TORCHELASTIC_RUN_ID"])  # under torchrun
    return found


class Child:
    """The process of a rank's script, which waits for `go` once it has imported torch, or of its command.

    `others` are processes below the agent that are not the child's.
    """

    def __init__(self, program: Program, others: Iterable[int]) -> None:
        self.program, self.is_command = program, program.kind == COMMAND
        self.others = {*others}
        self.pid = 0  # until it has started
        self.status: int | None = None  # its exit code, -N for signal N, once it has ended
        self.said: dict[str, dict[str, Any]] = {}  # by the script, by type
        self.passed: set[int] = set()  # the signals
        self.control: socket.socket | None = None  # to the script, until that has closed it
        self._process: subprocess.Popen[bytes] | None = None
        self._lines = Lines(LINE_LIMIT)
        self._frames: list[str] = []
        self._kills_before: OomKills | None = None  # before it, in this control group

    @property
    def runs(self) -> bool:
        return self.pid > 0 and self.status is None

    def start(self, files: Mapping[int, int], variables: Mapping[str, str]) -> None:
        """Start it with these open files, by its own file descriptors. They are closed here."""
        program = self.program
        self._kills_before = kills_in(group_of())
        ours, theirs = socket.socketpair()
        argv, env, passed = [program.name, *program.args], dict(variables), [theirs.fileno()]
        if self.is_command:
            env, passed = command_environment(env), []
        else:
            code = _START % program.imports_torch
            argv = [sys.executable, "-c", code, str(theirs.fileno()), program.kind, *argv]
            passed += (
                [int(env["PMI_FD"])] if "PMI_FD" in env else []
            )  # Hydra's, for an MPI of its own
        try:
            self._process = subprocess.Popen(
                argv,
                env=env,
                stdin=files.get(0),
                stdout=files.get(1),
                stderr=files.get(2),
                pass_fds=passed,
                preexec_fn=partial(_begin, os.getpid()),
            )
        except OSError as error:
            hint = " A script begins with a line such as #!/bin/sh."
            hint *= error.errno == errno.ENOEXEC
            sentence = f"{escaped(program.name)} cannot be started: {error.strerror}.{hint}"
            raise cause_of(error)(sentence) from None
        finally:
            for file in (*files.values(), theirs.detach()):
                os.close(file)
        self.pid, self.control = self._process.pid, ours
        _running[self.pid] = self
        for number in tuple(self.passed):  # before there was a command
            self.pass_on(number)

    def offer(self) -> int:
        """Let another child make this one, a copy of itself, with this end of its socket, see `go`."""
        self.control, theirs = socket.socketpair()
        return theirs.detach()

    def go(
        self,
        program: Program,
        variables: Mapping[str, str],
        store: socket.socket | None,
        spare: Sequence[tuple[int, int]] = (),
        *,
        is_restart: bool = False,
    ) -> None:
        """Let the script begin, with these variables. `store`: where rank 0 serves torch's store.

        `spare` are the files of a copy that waits for a restart: its socket, and then its streams, each after
        its number. A copy was made before the last arguments of its program were known. `is_restart`: in the
        agent of an earlier attempt.
        """
        self._kills_before = kills_in(group_of())
        args = program.args[len(self.program.args) :]
        numbers = [number for number, _ in spare]
        facts = {"variables": variables, "args": args, "spare": numbers, "is_restart": is_restart}
        line = json.dumps(facts).encode() + b"\n"
        files = [*(file for _, file in spare), *([store.fileno()] if store else [])]
        with contextlib.suppress(ConnectionError):  # the script has ended
            if self.control is not None:
                socket.send_fds(self.control, [line], files)
        for _, file in spare:
            os.close(file)
        if store is not None:
            store.close()

    def hear(self) -> None:
        """Take what the script has said."""
        while self.control is not None and select.select([self.control], [], [], 0)[0]:
            chunk = b""
            with contextlib.suppress(OSError):
                chunk = self.control.recv(1 << 16)
            if not chunk:  # it has ended, or has closed all files
                self.control.close()
                self.control = None
            for line in self._lines.split(chunk):
                if line.startswith(b"{"):
                    facts = json.loads(line)
                    self.said[facts["type"]] = facts
                    if facts["type"] == "ready" and not self.pid:  # a copy
                        self.pid = facts["pid"]
                        _running[self.pid] = self
                else:
                    self._frames.append(line.decode(errors="replace"))

    def stack(self) -> str | None:
        """The main thread's stack as the traceback module prints it: "" of a command, None if none comes.

        The kernel interrupts a script, also while native code holds its interpreter. One that is stopped does
        not answer. Nothing tells where a stack ends.
        """
        if self.is_command or not self.pid:
            return ""
        if self.control is None:  # nobody would read it
            return None
        self._frames = []
        self.pass_on(signal.SIGURG)
        deadline = time.monotonic() + _STACK_S
        while self.control and not self._frames and time.monotonic() < deadline:
            if select.select([self.control], [], [], _WRITTEN_S)[0]:
                time.sleep(_WRITTEN_S)
                self.hear()
        lines = [
            f'  File "{file}", line {number}, in {name}\n    {linecache.getline(file, int(number)).strip()}\n'
            for file, number, name in reversed(_FRAME.findall("\n".join(self._frames)))
            if file not in _OF_OURS
        ]
        return f"thread MainThread:\n{''.join(lines)}" if lines else None

    def pass_on(self, number: int) -> None:
        """Send it a signal: to a script alone, whose workers it ends itself, but to all of a command."""
        self.passed.add(number)
        with contextlib.suppress(ProcessLookupError):
            if self.runs:
                (os.killpg if self.is_command else os.kill)(self.pid, number)

    def collected(self, status: int) -> None:
        """It has ended, as waitpid() says."""
        self.status = os.waitstatus_to_exitcode(status)
        if self._process is not None:
            self._process.returncode = self.status

    def ending(self) -> Ending:
        """What wait() says, with the script's own reason."""
        assert self.status is not None
        return ending_of_process(self.status, os.environ.get(ERROR_FILE, ""))

    @property
    def lack_of_memory(self) -> dict[str, int | None]:
        """The kernel's kills in the rank's control group since the child began, if there were any."""
        now, before = kills_in(group_of()), self._kills_before
        if now is None or before is None or now.count <= before.count:
            return {}
        return {"oom_kills": now.count - before.count, "memory_limit": now.limit_bytes}

    def left_behind(self) -> dict[int, str]:
        """The processes that outlive the program, once helpers have had time to end: pids and commands."""
        deadline = time.monotonic() + _HELPERS_S
        while (left := descendants(os.getpid(), but=self.others)) and time.monotonic() < deadline:
            time.sleep(_WRITTEN_S)
        return {pid: command_of(pid) or name for pid, name in left.items()}

    def end(self, grace_s: float) -> Collection[int]:
        """End all that is left, see `end_all`. Returns the processes that cannot be killed."""
        left = end_all(lambda: descendants(os.getpid(), but=self.others), grace_s=grace_s)
        reap()
        return left


_running: dict[int, Child] = {}  # by pid


def reap() -> None:
    """Collect the children and the adopted orphans of this process that have ended."""
    with contextlib.suppress(ChildProcessError):
        for pid, status in iter(partial(os.waitpid, -1, os.WNOHANG), (0, 0)):
            if (child := _running.pop(pid, None)) is not None:
                child.collected(status)


def _begin(agent: int) -> None:
    """In the forked process, which has the program's files, before it becomes the program."""
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)
    before = os.getpgrp()
    os.setpgid(0, 0)
    with contextlib.suppress(OSError):  # stdin is no terminal
        if os.tcgetpgrp(0) == before:  # whose Ctrl-C the agent would get
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)
            os.tcsetpgrp(0, os.getpid())
            signal.signal(signal.SIGTTOU, signal.SIG_DFL)
