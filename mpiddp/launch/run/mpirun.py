"""Start and stop mpirun and its processes on this host, and leave none of them behind.

mpirun gets its own session, so that a Ctrl-C reaches it once, from this process. This process adopts
mpirun's orphans, so that none of them outlives the job.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from mpiddp.errors import JobFailed, cause_of
from mpiddp.hosts.facts import with_own_folder
from mpiddp.hosts.processes import adopt_orphans, descendants, end_with_parent, signal_all
from mpiddp.launch.plan.command import Command, Starter
from mpiddp.protocol.channel import AGENT_NAME, REMOVER_NAME


class MpirunProcess:
    """One mpirun, and its processes on this host. `streams` are its stdout and stderr."""

    def __init__(
        self, starter: Starter, command: Command, env: Mapping[str, str] = os.environ
    ) -> None:
        self.starter = starter
        self.was_ended = False  # by this launcher
        # This process may have replaced a shell by exec, whose children are not the job's.
        self._strangers = frozenset(descendants(os.getpid()))
        adopt_orphans()
        for path, text in command.files.items():
            try:
                Path(path).write_text(text, encoding="utf-8")
            except OSError as error:
                raise JobFailed(f"{path} cannot be written: {error.strerror}.") from None
        try:
            self._process = subprocess.Popen(
                command.argv,
                env={**with_own_folder(starter.program, env), **command.settings},
                stdin=subprocess.DEVNULL,  # rank 0 gets it from `JobOutput`
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=partial(end_with_parent, starter.stop_signal),
            )
        except OSError as error:  # one cause: a host list of more than 128 KiB
            raise cause_of(error)(f"cannot start {command.argv[0]}: {error.strerror}.") from None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.streams = self._process.stdout, self._process.stderr

    @property
    def code(self) -> int | None:
        """Its exit code, -N if signal N killed it, None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """Send the stop signal, also for a Ctrl-C: Hydra would forward a SIGINT to each rank.

        The whole process group gets it, because Intel's mpirun is a shell script around another program.
        """
        self.was_ended = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, self.starter.stop_signal)

    def kill_all(self) -> None:
        """Kill all processes of the job on this host. Its daemons on other hosts then end too.

        The ranks' agents end by themselves, once they have sent the ranks' output.
        """
        self.was_ended = True
        signal_all(self.left, signal.SIGKILL)

    def close(self) -> None:
        """Kill what is left of the job on this host, agents as well."""
        self.kill_all()
        signal_all(partial(self.left, agents=True), signal.SIGKILL)

    def left(self, *, agents: bool = False) -> list[int]:
        """The pids of the job here, without the ranks' agents or only these: they may still send output.

        A process in the session of this one is no part of the job: a login that asks a host, for example. One
        that ends a container ends by itself.
        """
        processes, left = descendants(os.getpid(), but=self._strangers, spared=REMOVER_NAME), []
        for pid, name in processes.items():
            with suppress(ProcessLookupError):
                if (name == AGENT_NAME) is agents and os.getsid(pid) != os.getsid(0):
                    left.append(pid)
        return left
