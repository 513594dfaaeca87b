"""A host of a running test cluster: run programs on it, list its processes, cut its network link."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

from tests.support.cluster import needs
from tests.support.cluster.program import Program
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ALL_OUTPUT

USER = "mpiddp-test"  # exists only in the /etc/passwd of the hosts, not on this machine
USER_ID = 60123
ETC = Path(__file__).with_name("etc")  # templates of the daemons' configurations
TMPDIR = "/run/tmp"  # private to each host, while all share /tmp

# The PATH that Debian's sshd without PAM sets, for root and for other users.
ROOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
USER_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/games"

Arg = str | os.PathLike[str]


class Process(NamedTuple):
    pid: int  # in the host's pid namespace
    command: str
    name: str = ""  # the kernel's, at most 15 characters
    parent: int = 0


@dataclass(frozen=True)
class Host:
    """A running host.

    `pid` is its pid 1 and `hub_pid` the process of the cluster's switch, both in the pid namespace of this
    machine.
    """

    name: str
    address: str
    interface: str
    pid: int
    hub_pid: int

    @property
    def port(self) -> str:
        """The switch's end of the host's link."""
        return f"{self.name}-{self.interface}"

    def run(
        self,
        argv: Sequence[Arg],
        *,
        timeout_s: float = PATIENCE_S,
        stdin: str | None = None,
        check: bool = False,
        **login: Any,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program to its end; `login`: env, user and cwd, as `enter` takes them.

        Raises:
            subprocess.TimeoutExpired: it takes longer than `timeout_s`. Its session is killed first.
            subprocess.CalledProcessError: its exit code is not 0, and `check` is set.
        """
        pipe = subprocess.PIPE if stdin is not None else subprocess.DEVNULL
        with self.popen(argv, stdin=pipe, **login) as program:
            try:
                out, err = program.communicate(stdin, timeout=timeout_s)
            except BaseException:  # a timeout or Ctrl-C: leave no process of it
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
        stdin: IO[Any] | int | None = subprocess.DEVNULL,
        stdout: IO[Any] | int | None = subprocess.PIPE,
        stderr: IO[Any] | int | None = subprocess.PIPE,
        **login: Any,
    ) -> Program:
        """Start a program as `run` does. Its `end()` kills all processes of its session."""
        command = self.enter(argv, **login)
        # Without a session of its own, Ctrl-C at the terminal would end only nsenter.
        return Program(
            command, stdin=stdin, stdout=stdout, stderr=stderr, text=True, start_new_session=True
        )

    def enter(
        self,
        argv: Sequence[Arg],
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: Arg | None = None,
    ) -> list[str]:
        """The command that runs `argv` on this host when it is started on this machine.

        It runs as in a login shell of the user: with a clean environment plus `env`, in the user's home or in
        `cwd`, without a virtual environment.
        """
        name = user or "root"
        become = () if name == "root" else (f"--reuid={name}", f"--regid={name}", "--init-groups")
        return [
            *("nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid"),
            *("setsid", "setpriv", *become),
            *("env", "--ignore-environment", f"--chdir={cwd or self.home(name)}"),
            *(f"{key}={value}" for key, value in {**self.login(name), **(env or {})}.items()),
            *(os.fspath(argument) for argument in argv),
        ]

    def path(self, path: Arg) -> Path:
        """The path on this machine at which a file of this host can be read and written."""
        return Path(f"/proc/{self.pid}/root", os.fspath(path).lstrip("/"))

    def home(self, user: str = "root") -> str:
        """A user's home folder, which is private to this host."""
        for line in self.path("/etc/passwd").read_text().splitlines():
            fields = line.split(":")
            if fields[0] == user:
                return fields[5]
        raise LookupError(f"{self.name} has no user {user}")

    def link(self, state: Literal["up", "down"]) -> None:
        """Set this host's link up or down. Its peers get no notice, only silence."""
        configure(self.hub_pid, [f"link set {self.port} {state}"])
        if state == "up":  # an address that it looked up while down would fail up to 3 s later
            configure(self.pid, ["neigh flush all"])

    def processes(self) -> list[Process]:
        """All processes of this host except its pid 1 and the listening sshd."""
        sshd = self.path("/run/sshd.pid")
        hidden = {"1", sshd.read_text().strip() if sshd.exists() else ""}
        processes = []
        for entry in self.path("/proc").iterdir():
            if not entry.name.isdigit() or entry.name in hidden:
                continue
            try:
                command = (entry / "cmdline").read_bytes()
                # "pid (name) state ppid …". The name may contain parentheses.
                head, _, tail = (entry / "stat").read_text(errors="replace").rpartition(")")
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            if command:  # a zombie has none
                text = command.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
                name, parent = head.partition("(")[2], int(tail.split()[1])
                processes.append(Process(int(entry.name), text, name, parent))
        return sorted(processes)

    def kill_processes(self) -> list[Process]:
        """Kill the processes that `processes` lists, wait until they have ended, and return them."""
        killed = left = self.processes()
        while left:
            self.run(["kill", "-KILL", *(str(process.pid) for process in left)])
            left = self.processes()
        return killed

    def login(self, user: str = "root") -> dict[str, str]:
        """The variables of a login."""
        return {
            "HOME": self.home(user),
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/bash",
            "PATH": ROOT_PATH if user == "root" else USER_PATH,
            "LANG": "C.UTF-8",
            "TMPDIR": TMPDIR,
            "XDG_STATE_HOME": "/dev/null",  # no test remembers the hosts of another
            **ALL_OUTPUT,
        }


def configure(pid: int, commands: Sequence[str], program: str = "ip") -> None:
    """Run these commands of `ip`, or of `tc`, in the network namespace of a process."""
    subprocess.run(
        [needs.tool("nsenter"), f"--target={pid}", "--net", needs.tool(program), "-batch", "-"],
        input="\n".join(commands) + "\n",
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
