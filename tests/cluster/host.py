"""One host of a standing test cluster: run programs on it, look at it, pull its network cable."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tests.cluster import needs
from tests.cluster.program import Program
from tests.patience import PATIENCE_S

USER = "mpiddp-test"  # exists in the hosts' own /etc/passwd alone, never on this machine
USER_ID = 60123
TMPDIR = "/run/tmp"  # each host's own, although /tmp is shared by all of them

# What Debian's sshd gives a login without PAM: root's PATH and everybody else's.
ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/games"

Arg = str | os.PathLike[str]


class Process(NamedTuple):
    pid: int  # in the host's own numbering
    command: str


@dataclass(frozen=True)
class Host:
    """A standing host. `pid` is that of its pid 1 and `hub_pid` that of the cluster's switch,
    both in the numbering of this machine; `port` is the switch's end of its cable."""

    name: str
    address: str
    interface: str
    pid: int
    hub_pid: int
    port: str

    def run(
        self,
        argv: Sequence[Arg],
        *,
        timeout_s: float = PATIENCE_S,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: Arg | None = None,
        stdin: str | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program as somebody logged in here would: a clean environment plus `env`, in the
        user's home unless `cwd`; no virtual environment is active.

        Raises subprocess.TimeoutExpired (its session is killed first), and with `check`
        subprocess.CalledProcessError.
        """
        pipe = subprocess.PIPE if stdin is not None else subprocess.DEVNULL
        with self.popen(argv, env=env, user=user, cwd=cwd, stdin=pipe) as program:
            try:
                out, err = program.communicate(stdin, timeout=timeout_s)
            except BaseException:  # a timeout or Ctrl-C: nothing of it may run on
                program.end()
                raise
        done = subprocess.CompletedProcess(list(argv), program.returncode, out, err)
        if check:
            done.check_returncode()
        return done

    def popen(
        self,
        argv: Sequence[Arg],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: Arg | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
    ) -> Program:
        """Starts a program as `run` does. Its `end()` kills it with all of its session."""
        command = self.enter(argv, env=env, user=user, cwd=cwd)
        return Program(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,  # a Ctrl-C at the terminal must not end nsenter alone
        )

    def enter(
        self,
        argv: Sequence[Arg],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: Arg | None = None,
    ) -> list[str]:
        """The command that runs `argv` in here when it is started out there."""
        name = user or "root"
        become = () if name == "root" else (f"--reuid={name}", f"--regid={name}", "--init-groups")
        return [
            *("nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid"),
            *("setsid", "setpriv", *become),
            *("env", "--ignore-environment", f"--chdir={cwd or self.home(name)}"),
            *(f"{key}={value}" for key, value in {**self._login(name), **(env or {})}.items()),
            *(os.fspath(argument) for argument in argv),
        ]

    def shell(self, user: str | None = None, cwd: Arg | None = None) -> list[str]:
        """The command of an interactive shell in here, on a terminal of its own."""
        terminal = {"TERM": os.environ.get("TERM", "dumb")}
        bash = ["script", "--quiet", "--return", "--command", "bash", "/dev/null"]
        return self.enter(bash, env=terminal, user=user, cwd=cwd)

    def path(self, path: Arg) -> Path:
        """A file of this host as seen from outside: read it, write it, as if logged in there."""
        return Path(f"/proc/{self.pid}/root", os.fspath(path).lstrip("/"))

    def home(self, user: str = "root") -> str:
        """A user's home folder, each host's own."""
        for line in self.path("/etc/passwd").read_text().splitlines():
            fields = line.split(":")
            if fields[0] == user:
                return fields[5]
        raise LookupError(f"{self.name} has no user {user}")

    def link(self, state: Literal["up", "down"]) -> None:
        """Pulls this host's cable, or plugs it in again: peers notice nothing but silence."""
        configure(self.hub_pid, [f"link set {self.port} {state}"])

    def processes(self) -> list[Process]:
        """All that runs here except what makes this a host: its pid 1 and the listening sshd."""
        sshd = self.path("/run/sshd.pid")
        own = {"1", sshd.read_text().strip() if sshd.exists() else ""}
        found = []
        for entry in self.path("/proc").iterdir():
            if not entry.name.isdigit() or entry.name in own:
                continue
            try:
                command = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it ended meanwhile
            if command:  # a zombie has none
                text = command.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
                found.append(Process(int(entry.name), text))
        return sorted(found)

    def kill_processes(self) -> list[Process]:
        """Kill the processes that `processes` lists, wait until they have ended, and return them."""
        found = left = self.processes()
        while left:
            self.run(["kill", "-KILL", *(str(process.pid) for process in left)])
            left = self.processes()
        return found

    def _login(self, user: str) -> dict[str, str]:
        return {
            "HOME": self.home(user),
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/bash",
            "PATH": ROOT_PATH if user == "root" else USER_PATH,
            "LANG": "C.UTF-8",
            "TMPDIR": TMPDIR,
        }


def configure(pid: int, commands: Sequence[str]) -> None:
    """Gives `ip` these commands in the network namespace of a process."""
    subprocess.run(
        [needs.tool("nsenter"), f"--target={pid}", "--net", needs.tool("ip"), "-batch", "-"],
        input="\n".join(commands) + "\n",
        text=True,
        check=True,
    )
