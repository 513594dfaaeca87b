"""One job on the test cluster: start it, read its stderr, resume it, find its orphans."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import ENV, mpirun_of
from mpiddp.checkpoints import folder as directory
from mpiddp.drill import injectors
from tests.support.cluster import Cluster, Program
from tests.support.cluster.host import Process

HOSTS = "node0:1,node1:1,node2:1"
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
EXIT_S = 5.0  # time for the processes of a job to end by themselves


class Line(NamedTuple):
    at: float  # time.time()
    text: str


class Step(NamedTuple):
    at: float
    first: int  # the step that this attempt resumed from
    number: int


@dataclass
class Job:
    """A job that was started on node0. All hosts share `folder`, where the job writes its files."""

    hosts: Cluster
    starter: str
    folder: Path
    launcher: Program
    command: Sequence[str]
    env: Mapping[str, str]
    foreign_clients: list[Program] = field(default_factory=list)  # `end` kills them
    lines: list[Line] = field(default_factory=list)  # the launcher's stderr

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.launcher.stderr is not None
        for text in self.launcher.stderr:
            self.lines.append(Line(time.time(), text.rstrip("\n")))

    def output(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def steps(self) -> list[Step]:
        """The steps that rank 0 recorded (see tests/jobs/faulty.py)."""
        file = self.folder / "steps"
        text = file.read_text() if file.exists() else ""
        fields = (line.split() for line in text.rpartition("\n")[0].splitlines())
        return [Step(float(at), int(first), int(number)) for at, first, number in fields]

    def wait_until(self, holds: Callable[[], bool], event: str) -> None:
        """Raises TimeoutError if the job ends or takes too long before `event`, when `holds` is true."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not holds():
            if time.monotonic() > deadline or self.launcher.poll() is not None:
                self._reader.join(1.0)
                if holds():
                    return
                raise TimeoutError(f"the job did not reach {event}:\n{self.output()}")
            time.sleep(0.005)

    def wait_for_step(self, number: int) -> None:
        self.wait_until(lambda: any(s.number >= number for s in self.steps()), f"step {number}")

    def stop_for(self, seconds: float, process: int, *, is_group: bool = False) -> None:
        """Stop a process of the job for some time, or its process group, as Ctrl-Z does."""
        send = injectors.send_to_group if is_group else injectors.send
        send(signal.SIGSTOP, process)
        time.sleep(seconds)
        send(signal.SIGCONT, process)
        self.launcher.send_signal(signal.SIGCONT)  # nsenter stops with its program

    def pid_of(self, host: str, command: str) -> int:
        """The pid of the oldest process of a host whose command line matches the pattern `command`.

        Raises LookupError if there is none.
        """
        for process in self.hosts[host].processes():
            if re.match(command, process.command):
                return process.pid
        raise LookupError(f"no process on {host} matches {command}")

    def command_pid(self) -> int:
        """The pid on this machine of the command that was started, which leads its process group."""
        pid = self.launcher.inner_pid()
        assert pid is not None, "the job has ended"
        return pid

    def end(self, timeout_s: float = END_TIMEOUT_S) -> int | None:
        """Wait for the launcher. Return its exit code, or None if it had to be killed after this time."""
        try:
            self.launcher.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.launcher.end()
            return None
        finally:
            self._reader.join(1.0)  # an orphaned rank may keep the pipe open
            for client in self.foreign_clients:
                client.end()
                client.communicate()
        return self.launcher.returncode

    def processes(self) -> list[Process]:
        """The processes that still run on the hosts, except ssh logins."""
        found = []
        for host in self.hosts.hosts:
            with contextlib.suppress(FileNotFoundError):  # the host was killed
                found += [p for p in host.processes() if not p.command.startswith("sshd")]
        return found

    def resume(
        self, output: str, timeout_s: float = END_TIMEOUT_S
    ) -> subprocess.CompletedProcess[str]:
        """Run the command that `output` names; without one, repeat the original command."""
        command = self.command
        if printed := re.search("mpiddp: to resume: mpiddp (.*)", output):
            command = [sys.executable, "-m", "mpiddp", *shlex.split(printed[1])]
        return self.hosts["node0"].run(command, env=self.env, cwd=self.folder, timeout_s=timeout_s)

    def kill_orphans(self, within_s: float = EXIT_S) -> list[Process]:
        """Give the job's processes this time to end. Kill and return those that remain."""
        deadline = time.monotonic() + within_s
        while (orphans := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for host in self.hosts.hosts:
            with contextlib.suppress(FileNotFoundError):
                host.kill_processes()
        return orphans

    def newest_checkpoint(self) -> int:
        newest = directory.newest_verified(self.folder / "checkpoints")
        assert newest in (None, *directory.list_steps(self.folder / "checkpoints")[-1:])
        return directory.step_of(newest) if newest else 0


def launch(
    hosts: Cluster,
    folder: Path,
    starter: str,
    where: str,
    options: Sequence[str],
    job: Sequence[str],
    cwd: str | None = None,
    around: Sequence[str] = (),
) -> Job:
    """Start `AROUND mpiddp launch -H WHERE OPTIONS JOB` on node0, see `start`."""
    arguments = ["launch", "--mpirun", mpirun_of(starter), "-H", where, *options, *job]
    command = [sys.executable, "-m", "mpiddp", *arguments]
    return start(hosts, folder, starter, command, cwd=cwd, around=around)


def start(
    hosts: Cluster,
    folder: Path,
    starter: str,
    command: Sequence[str],
    env: Mapping[str, str] = ENV,
    cwd: str | None = None,
    around: Sequence[str] = (),
) -> Job:
    """Start `AROUND COMMAND` on node0. `cwd` is the path of `folder` there, if it differs."""
    folder.mkdir(exist_ok=True)
    with (folder / "stdout").open("a") as stdout:
        launcher = hosts["node0"].popen(
            [*around, *command], cwd=cwd or folder, env=env, stdout=stdout.fileno()
        )
    return Job(hosts, starter, folder, launcher, command, env)
