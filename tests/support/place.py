"""Where a test runs programs: on this machine (`Here`), or on the hosts of a test cluster (`Hosts`).

A test takes the fixture `place`, `here` or `hosts` (tests/promises/conftest.py), and writes

    done = place.run("launch", *place.where(2), program("identity.py"), env={"A": "1"}, mpi="mpich")
    assert done.code == 1
    assert done.said == ["rank 1 on node1 was killed by SIGKILL. The other ranks were stopped."]
    eventually(lambda: not place.processes())
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mpiddp.cli import VERBS
from mpiddp.text import FIX
from tests.support import forked
from tests.support.cluster import Cluster, Host, Program
from tests.support.installs import MPIS as OTHER_MPIS
from tests.support.installs import mpirun_of
from tests.support.machine import reserved
from tests.support.patience import eventually, until_readable
from tests.support.ranks import ROOT, clean_env

PROGRAMS = ROOT / "tests" / "programs"
MPIS = ("openmpi5", *OTHER_MPIS)
# Of ranks on hosts of a test cluster, where nothing else takes them. The store of a fork may end after its ranks.
STORE_PORTS = itertools.count(29500)
# Daemons of the hosts themselves, and the sessions that they hold open.
DAEMONS = ("munged", "slurmctld", "slurmd", "slurmstepd", "sge_qmaster", "sge_execd")

every_mpi = pytest.mark.parametrize("mpi", MPIS, indirect=True)
# A rule that does not depend on the MPI holds under all of them if it holds under two of different kinds.
two_mpis = pytest.mark.parametrize("mpi", ["openmpi5", "mpich"], indirect=True)
here_and_on_hosts = pytest.mark.parametrize("place", ["here", "hosts"], indirect=True)
every_mpi_on_hosts = pytest.mark.parametrize(
    ("place", "mpi"), [("here", "openmpi5"), *(("hosts", mpi) for mpi in MPIS)], indirect=True
)

Arg = str | os.PathLike[str]


def program(name: str) -> str:
    """The path of a program in tests/programs."""
    path = PROGRAMS / name
    assert path.exists(), path
    return str(path)


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int  # -N after signal N
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of stdout that are JSON, such as those of tests/programs/identity.py, by rank."""
        texts = [line[line.index("{") :] for line in self.lines if line.endswith("}")]
        return sorted((json.loads(text) for text in texts), key=lambda record: record["RANK"])

    @property
    def said(self) -> list[str]:
        """The lines "mpiddp: …" of stderr, without this prefix."""
        # The last line of an mpirun may lack its newline.
        return re.findall(r"mpiddp: (.*)", self.stderr)

    @property
    def fixes(self) -> list[str]:
        """The commands below such lines."""
        return re.findall(f"^{FIX}(.*)", self.stderr, re.MULTILINE)

    @property
    def refusals(self) -> list[str]:
        """The sentences, with their fixes, of a command that has refused bad input."""
        assert (self.code, self.stdout) == (2, ""), self.stderr
        lines = self.stderr.splitlines()
        assert all(line.startswith(("mpiddp: ", FIX)) for line in lines), self.stderr
        return [text.strip() for text in re.split("^mpiddp: ", self.stderr, flags=re.MULTILINE)[1:]]

    def assert_ok(self) -> Done:
        return self.assert_code(0)

    def assert_code(self, code: int) -> Done:
        assert self.code == code, f"exit code {self.code}\n{self.stdout}\n{self.stderr}"
        return self

    def assert_refused(self, pattern: str) -> Done:
        """The command has refused bad input: exit code 2, no traceback, and this pattern once on stderr."""
        self.assert_code(2)
        assert len(re.findall(pattern, self.stderr)) == 1, self.stderr
        assert "Traceback" not in self.stderr
        return self


@dataclass(frozen=True)
class Process:
    """A process of a place. Its pid is that on its host."""

    host: str
    pid: int
    command: str


@dataclass
class Job:
    """A command that runs. Its output goes to two files, so that nobody has to read it."""

    process: subprocess.Popen[str]
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        """Its pid on this machine. On a host, it is the pid of the program, and not of nsenter."""
        inner = self.process.inner_pid() if isinstance(self.process, Program) else None
        return inner or self.process.pid

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return _text(self.out)

    @property
    def stderr(self) -> str:
        return _text(self.err)

    def until(self, text: str, times: int = 1) -> Job:
        """Wait until the text stands in whole lines of its output. A job that ends without it fails the test."""

        def appears() -> bool:
            ended = self.process.poll() is not None
            lines = (stream[: stream.rfind("\n") + 1] for stream in (self.stdout, self.stderr))
            if "".join(lines).count(text) >= times:
                return True
            assert not ended, f'ended without "{text}"\n{self.stdout}\n{self.stderr}'
            return False

        with self._quoted(f'"{text}"'):
            eventually(appears)
        return self

    def signal(self, number: int) -> Job:
        self.process.send_signal(number)
        return self

    def wait(self) -> Done:
        """Wait for its end."""
        if self.process.poll() is None:
            ended = os.pidfd_open(self.process.pid)
            with closing(os.fdopen(ended)), self._quoted("its end"):
                until_readable(ended)
        return Done(self.process.wait(), self.stdout, self.stderr)

    @contextmanager
    def _quoted(self, event: str) -> Iterator[None]:
        """A wait for an event. If it fails, the output of the command says more."""
        try:
            yield
        except TimeoutError as error:
            raise AssertionError(f"{error} for {event}\n{self.stdout}\n{self.stderr}") from None


@dataclass
class Place(ABC):
    """One or more hosts that share `folder`, in which commands run."""

    folder: Path
    jobs: list[Job] = field(default_factory=list, init=False)

    @property
    @abstractmethod
    def hosts(self) -> list[str]:
        """The hosts' names."""

    @abstractmethod
    def where(self, ranks: int) -> tuple[str, ...]:
        """The options of `mpiddp launch` that put so many ranks on these hosts, as `hosts_of` says."""

    @abstractmethod
    def processes(self, marker: str = "") -> list[Process]:
        """The processes that jobs of this test have started and that still run.

        `marker` is a text in their command lines.
        """

    @abstractmethod
    def kill(self, process: Process, number: int = signal.SIGKILL) -> None:
        """Send a process a signal, unless it has just ended."""

    @abstractmethod
    def popen(self, argv: list[str], env: Mapping[str, str], **how: Any) -> subprocess.Popen[str]:
        """Start a command in the environment of this place, with `env` and as Popen's arguments say."""

    def hosts_of(self, ranks: int) -> list[str]:
        """The host of each rank that `where` places: as many on each host, the first ones one more."""
        share, more = divmod(ranks, len(self.hosts))
        counts = [share + (index < more) for index in range(len(self.hosts))]
        return [host for host, count in zip(self.hosts, counts, strict=True) for _ in range(count)]

    def run(self, *argv: Arg, **how: Any) -> Done:
        """Run a command to its end, with the arguments of `start`."""
        return self.start(*argv, **how).wait()

    def start(
        self,
        *argv: Arg,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        mpi: str | None = None,
        stdin: str = "",
    ) -> Job:
        """Start a command on the first host. The end of the test kills it, with all that it has started.

        A verb of mpiddp becomes `python -m mpiddp VERB …`, and "python" the tests' own. `mpi` adds
        --mpirun to the verb's options.
        """
        files = [self.folder / f".job-{len(self.jobs)}.{name}" for name in ("in", "out", "err")]
        files[0].write_text(stdin)
        with files[0].open("rb") as input_, files[1].open("wb") as out, files[2].open("wb") as err:
            how = {"cwd": cwd or self.folder, "stdin": input_, "stdout": out, "stderr": err}
            process = self.popen(self._command(argv, mpi), env or {}, **how)
        job = Job(process, files[1], files[2])
        self.jobs.append(job)
        return job

    def script(self, text: str, name: str = "script.py") -> str:
        """Write a script that one test alone runs, and return its path."""
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def clear(self) -> None:
        """Kill all processes that jobs of this test have left."""
        while left := self.processes():
            for process in left:
                self.kill(process)
            time.sleep(0.01)
        for job in self.jobs:
            job.process.kill()
            job.process.wait()

    def _fork(self, argv: tuple[Arg, ...], ranks: list[forked.Rank]) -> Done:
        out, err = self.folder / ".fork.out", self.folder / ".fork.err"
        code = forked.run([os.fspath(argument) for argument in argv], ranks, self.folder, out, err)
        return Done(code, _text(out), _text(err))

    def _command(self, argv: tuple[Arg, ...], mpi: str | None) -> list[str]:
        first, *rest = [os.fspath(word) for word in argv]
        if first in (*VERBS, "help", "--version", "--help"):
            mpirun = [] if mpi is None else ["--mpirun", mpirun_of(mpi)]
            return [sys.executable, "-m", "mpiddp", first, *mpirun, *rest]
        assert mpi is None, "only a verb of mpiddp takes --mpirun"
        return [sys.executable if first == "python" else first, *rest]


@dataclass
class Here(Place):
    """This machine. The environment of each job has a mark, by which its processes are found."""

    mark: str = field(default_factory=lambda: os.urandom(8).hex(), init=False)

    @property
    def hosts(self) -> list[str]:
        return [socket.gethostname()]

    def where(self, ranks: int) -> tuple[str, ...]:
        return ("-H", f"localhost:{ranks}")

    def processes(self, marker: str = "") -> list[Process]:
        processes = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if f"TEST_PLACE={self.mark}".encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ")
                    text = command.decode(errors="replace")
                    if marker in text:
                        processes.append(Process(self.hosts[0], int(entry.name), text))
        return processes

    def kill(self, process: Process, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)

    def fork(self, *argv: Arg, ranks: int = 0, env: Mapping[str, str] | None = None) -> Done:
        """Run a verb of mpiddp, or a script, on so many ranks, which are forks (support/forked.py).

        With 0, it has no variables of a rank, as without a launcher.
        """
        variables = clean_env(env)
        if not ranks:
            return self._fork(argv, [forked.Rank(variables)])
        with reserved("127.0.0.1") as reservation:
            of_ranks = forked.variables(["localhost"] * ranks, *reservation.getsockname())
            return self._fork(argv, [forked.Rank({**variables, **of_rank}) for of_rank in of_ranks])

    def train(self, *options: Arg, ranks: int = 0, env: Mapping[str, str] | None = None) -> Done:
        """Run `mpiddp train OPTIONS…` so."""
        return self.fork("train", *options, ranks=ranks, env=env)

    def popen(self, argv: list[str], env: Mapping[str, str], **how: Any) -> subprocess.Popen[str]:
        variables = clean_env({"TEST_PLACE": self.mark, **env})
        # In a session of its own: a Ctrl-C at the terminal of the tests is not one of the job.
        return subprocess.Popen(
            argv, env=variables, **{"text": True, "start_new_session": True, **how}
        )


@dataclass
class Hosts(Place):
    """The hosts of a test cluster. Commands run on the first one."""

    cluster: Cluster

    @classmethod
    @contextmanager
    def on(cls, cluster: Cluster, name: str) -> Iterator[Hosts]:
        """The hosts of a running cluster for one test, with a new folder that they share."""
        folder = cluster.shared / re.sub(r"\W+", "-", name)
        folder.mkdir()
        place = cls(folder, cluster)
        try:
            yield place
        finally:
            place.clear()
            shutil.rmtree(folder)

    def __getitem__(self, name: str) -> Host:
        return self.cluster[name]

    @property
    def hosts(self) -> list[str]:
        return [host.name for host in self.cluster.hosts]

    def where(self, ranks: int) -> tuple[str, ...]:
        names = self.hosts_of(ranks)
        file = self.folder / f"hosts-{ranks}.txt"
        slots = {name: names.count(name) for name in names}
        file.write_text("".join(f"{name} slots={count}\n" for name, count in slots.items()))
        return ("--hostfile", str(file))

    def fork(self, where: str, *argv: Arg, env: Mapping[str, str] | None = None) -> Done:
        """Run a verb of mpiddp, or a script, on ranks that are forks; `where`: "node0:2,node1:2"."""
        counts = (part.split(":") for part in where.split(","))
        names = [name for name, count in counts for _ in range(int(count))]
        variables = {"OMP_NUM_THREADS": "1", **(env or {})}
        of_ranks = forked.variables(names, self[names[0]].address, next(STORE_PORTS))
        ranks = [
            forked.Rank({**self[name].login(), **variables, **of_rank}, self[name].pid)
            for name, of_rank in zip(names, of_ranks, strict=True)
        ]
        return self._fork(argv, ranks)

    def processes(self, marker: str = "") -> list[Process]:
        return [
            Process(host.name, process.pid, process.command)
            for host in self.cluster.hosts
            for process in host.processes()
            if marker in process.command and process.name not in DAEMONS
        ]

    def kill(self, process: Process, number: int = signal.SIGKILL) -> None:
        self[process.host].run(["kill", f"-{int(number)}", str(process.pid)])

    def popen(self, argv: list[str], env: Mapping[str, str], **how: Any) -> subprocess.Popen[str]:
        return self.cluster.hosts[0].popen(argv, env={"OMP_NUM_THREADS": "1", **env}, **how)


def _text(file: Path) -> str:
    """The file's text. Bytes that are no UTF-8 can be had back with the same error handler."""
    return file.read_bytes().decode(errors="surrogateescape")
