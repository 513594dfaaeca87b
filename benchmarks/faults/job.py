"""One job on the test cluster: started, watched line by line, and looked through when it is over."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import mpirun_of
from mpiddp.checkpoints import directory
from tests.cluster import Cluster, Program
from tests.cluster.host import Process
from tests.ranks import ROOT

HOSTS = "node0:1,node1:1,node2:1"
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
SETTLE_S = 5.0  # what a job has left may be about to end


class Line(NamedTuple):
    at: float  # time.time()
    text: str


class Step(NamedTuple):
    at: float
    first: int  # the step that this try resumed from
    number: int


@dataclass
class Job:
    """A job of one rank on each host; `folder` is seen by all of them and holds what it writes."""

    hosts: Cluster
    starter: str
    folder: Path
    launcher: Program
    arguments: Sequence[str]  # of `mpiddp`
    bystanders: list[Program] = field(default_factory=list)  # programs that are not the job's
    lines: list[Line] = field(default_factory=list)  # of the launcher's stderr

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.launcher.stderr is not None
        for text in self.launcher.stderr:
            self.lines.append(Line(time.time(), text.rstrip("\n")))

    def said(self) -> str:
        return "\n".join(line.text for line in self.lines)

    def steps(self) -> list[Step]:
        """What rank 0 has noted, see tests/jobs/faulty.py."""
        file = self.folder / "steps"
        text = file.read_text() if file.exists() else ""
        fields = (line.split() for line in text.rpartition("\n")[0].splitlines())
        return [Step(float(at), int(first), int(number)) for at, first, number in fields]

    def await_that(self, holds: Callable[[], bool], what: str) -> None:
        """Raises TimeoutError when the job does not come so far."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not holds():
            if time.monotonic() > deadline or self.launcher.poll() is not None:
                self._reader.join(1.0)
                if holds():
                    return
                raise TimeoutError(f"the job did not come to {what}:\n{self.said()}")
            time.sleep(0.005)

    def await_step(self, number: int) -> None:
        self.await_that(lambda: any(s.number >= number for s in self.steps()), f"step {number}")

    def pid_of(self, host: str, command: str) -> int:
        """The oldest process of a host whose command begins with what this pattern matches.

        Raises LookupError when there is none.
        """
        for process in self.hosts[host].processes():
            if re.match(command, process.command):
                return process.pid
        raise LookupError(f"nothing like {command} runs on {host}")

    def end(self) -> int | None:
        """The launcher's exit code; None when it had to be killed."""
        try:
            self.launcher.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.launcher.end()
            return None
        finally:
            self._reader.join(1.0)  # a rank that was left may hold the pipe
            for bystander in self.bystanders:
                bystander.end()
                bystander.communicate()
        return self.launcher.returncode

    def left(self) -> list[Process]:
        """What of the job still runs on any host that stands; logins of ssh are not the job's."""
        found = []
        for host in self.hosts.hosts:
            with contextlib.suppress(FileNotFoundError):  # the host was killed
                found += [p for p in host.processes() if not p.command.startswith("sshd")]
        return found

    def kill_orphans(self) -> list[Process]:
        """What the job has left once it had time to end, and then nothing of it."""
        deadline = time.monotonic() + SETTLE_S
        while (orphans := self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for host in self.hosts.hosts:
            with contextlib.suppress(FileNotFoundError):
                host.kill_processes()
        return orphans

    def newest_checkpoint(self) -> int:
        newest, broken = directory.survey(self.folder / "checkpoints")
        assert not broken, broken
        return directory.step_of(newest) if newest else 0


def launch(
    hosts: Cluster,
    folder: Path,
    starter: str,
    where: str,
    options: Sequence[str],
    job: Sequence[str],
    cwd: str | None = None,
) -> Job:
    """`mpiddp launch -H WHERE OPTIONS JOB` on node0; `cwd` where node0 has another name for `folder`."""
    folder.mkdir(exist_ok=True)
    arguments = ["launch", "--mpirun", mpirun_of(starter), "-H", where, *options, *job]
    with (folder / "stdout").open("a") as stdout:
        launcher = hosts["node0"].popen(
            [sys.executable, "-m", "mpiddp", *arguments],
            cwd=cwd or folder,
            env=ENV,
            stdout=stdout.fileno(),
        )
    return Job(hosts, starter, folder, launcher, arguments)
