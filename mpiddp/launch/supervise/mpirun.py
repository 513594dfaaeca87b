"""Start and stop mpirun and every process that it starts on this host, and know what its exit code means.

mpirun gets its own session, so that a Ctrl-C reaches it once, from this process. This process adopts
mpirun's orphans, so that none of them outlives the job.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mpiddp.errors import JobFailed, UserError
from mpiddp.hosts.facts import with_own_folder
from mpiddp.hosts.processes import (
    adopt_orphans,
    descendants,
    end_all,
    signal_all,
    signal_at_parents_end,
)
from mpiddp.launch.options import LaunchOptions
from mpiddp.launch.starters.command import RankStarter, Request
from mpiddp.launch.starters.openmpi import needs_own_session
from mpiddp.launch.streams.output import JobOutput
from mpiddp.launch.supervise.verdict import MpirunEnd, signal_name
from mpiddp.paths import cause_of, new_private_folder, remove_private_folder
from mpiddp.protocol.messages import OUTPUT_PROCESS


class MpirunProcess:
    """One mpirun, and all that it starts on this host. `output` copies its stdout and stderr.

    If the starter's stop signal is not SIGTERM, mpirun is shielded from SIGTERM: a service manager or a batch
    system may send one to every process of a job, whose ranks still save.

    Raises:
        UserError: mpirun cannot be started with these arguments.
        JobFailed: a machine failed.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        output: JobOutput,
        starter: RankStarter,
    ) -> None:
        self.output = output
        self.starter = starter
        self._stop_signal = stop_signal = starter.kind.stop_signal
        self._was_ended = False
        # Children of the shell that this process may have replaced by exec.
        self._strangers = frozenset(descendants(os.getpid()))
        adopt_orphans()

        def prepare_child() -> None:
            # If this process is killed, the job must end with it.
            signal_at_parents_end(stop_signal)
            if stop_signal != signal.SIGTERM:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        try:
            self._process = subprocess.Popen(
                argv,
                env=dict(env),
                stdin=subprocess.DEVNULL,  # rank 0 gets it from `mpiddp.launch.streams.input`
                stdout=output.copies[0].pipe,
                stderr=output.copies[1].pipe,
                start_new_session=True,
                preexec_fn=prepare_child,
            )
        except OSError as error:  # one cause: a host list of more than 128 KiB
            raise cause_of(error)(f"cannot start {argv[0]}: {error.strerror}.") from None
        for copy in output.copies:
            copy.started()

    @property
    def code(self) -> int | None:
        """Its exit code, -N if signal N killed it, None while it runs."""
        return self._process.poll()

    @property
    def end(self) -> MpirunEnd:
        """How it ended, once it has."""
        code = self._process.returncode
        name = self.starter.program.name
        return MpirunEnd(name, code, _rank_signal(self.starter, code), self._was_ended)

    def reap_adopted(self) -> None:
        """Collect the adopted orphans that have ended.

        These are in mpirun's session or in one of their own. In this process's session are the programs that
        it has started itself, as `--grow` does, and waits for elsewhere.
        """
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError, ProcessLookupError):
            while (ended := os.waitid(os.P_ALL, 0, options)) and ended.si_pid != self._process.pid:
                is_own = os.getsid(ended.si_pid) == os.getsid(0)
                if is_own and ended.si_pid not in self._strangers:
                    return
                os.waitpid(ended.si_pid, 0)

    def stop(self) -> None:
        """Send the stop signal, also for a Ctrl-C: Hydra would forward a SIGINT to each rank.

        The whole process group gets it, because Intel's mpirun is a shell script around another program.
        """
        self._was_ended = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, self._stop_signal)

    def kill_all(self) -> None:
        """Kill all processes of the job on this host. Its daemons on other hosts then end too.

        The ranks' output processes end by themselves, once they have sent what the ranks wrote.
        """
        self._was_ended = True
        signal_all(self._left, signal.SIGKILL)

    def end_orphans(self, grace_s: float) -> list[int]:
        """End the job's remaining processes on this host: SIGTERM, and SIGKILL after `grace_s`.

        Returns the processes that cannot be killed.
        """
        end_all(self._left, grace_s=grace_s)
        return self._left()

    @property
    def has_output_processes(self) -> bool:
        """Whether an output process of a rank still runs on this host."""
        return bool(self._output_processes())

    def kill_output_processes(self) -> None:
        signal_all(self._output_processes, signal.SIGKILL)

    def _left(self) -> list[int]:
        """The job's processes on this host, without the ranks' output processes."""
        return [pid for pid, name in self._found().items() if name != OUTPUT_PROCESS]

    def _output_processes(self) -> list[int]:
        return [pid for pid, name in self._found().items() if name == OUTPUT_PROCESS]

    def _found(self) -> dict[int, str]:
        return descendants(os.getpid(), but=self._strangers)


@contextmanager
def started(
    starter: RankStarter, request: Request, options: LaunchOptions
) -> Iterator[MpirunProcess]:
    """A running mpirun. Its private folder, if it needs one, lasts as long as the body.

    Raises:
        UserError: mpirun cannot be started with these arguments.
        JobFailed: a machine failed.
    """
    has_session = needs_own_session(starter, request)
    has_files = bool(starter.compose(request).files)
    with _private_folder(needed=has_session or has_files) as folder:
        command = starter.compose(request._replace(scratch=folder))
        with _files_of_mpirun():
            command.write_files()
        env = {**with_own_folder(starter.program, os.environ), **command.settings}
        if has_session:
            env[starter.kind.session_folder] = folder
        shown = options
        output = JobOutput(
            shown.log_ranks,
            request.world_size,
            has_prefix=shown.has_prefix(request.world_size),
            shows_end=options.verbose,
        )
        try:
            mpirun = MpirunProcess(command.argv, env, output, starter)
        except (UserError, JobFailed):
            output.discard()
            raise
        yield mpirun


@contextmanager
def _private_folder(needed: bool) -> Iterator[str]:
    if not needed:
        yield "."
        return
    # Every mpirun splits ssh's arguments at blanks. (Importing tempfile would take 10 ms.)
    parent = os.environ.get("TMPDIR", "")
    if " " in parent or not os.access(parent, os.W_OK | os.X_OK):
        parent = "/tmp"
    with _files_of_mpirun():
        folder = new_private_folder(Path(parent).absolute())
    try:
        yield str(folder)
    finally:
        remove_private_folder(folder)


@contextmanager
def _files_of_mpirun() -> Iterator[None]:
    """Raise UserError or JobFailed if the body cannot write them."""
    try:
        yield
    except OSError as error:
        raise cause_of(error)(f"cannot write a file for mpirun: {error.strerror}.") from None


def _rank_signal(starter: RankStarter, code: int) -> str | None:
    """The signal that killed a rank by mpirun's exit code, "" if none did; None if the code is ambiguous."""
    if not starter.kind.proves_signals:
        return None
    return signal_name(code - 128) if code - 128 in signal.valid_signals() else ""
