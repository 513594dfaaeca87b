"""The control channel: the server drops connections without the job's secret and invalid messages.

Tests mpiddp/runtime/agent.py, mpiddp/launch/control.py, mpiddp/protocol/server.py.
python -m pytest tests/integration/launch/test_control_channel.py
"""

from __future__ import annotations

import errno
import gc
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from mpiddp.errors import JobFailed, UserError
from mpiddp.launch.command import Command
from mpiddp.launch.control import ControlServer, listen
from mpiddp.launch.mpirun import MpirunProcess
from mpiddp.launch.starters import STARTERS
from mpiddp.protocol.server import Message, TimedSelector
from mpiddp.protocol.variables import ADDRESS
from tests.support.channels import place_to_listen
from tests.support.errors import error
from tests.support.machine import files_left
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env

# A rank's agent, whose command does without the other ranks.
RANK = """
import os, sys
from mpiddp.errors import JobFailed, print_error
from mpiddp.runtime import agent
from mpiddp.runtime.child import COMMAND, Program
from mpiddp.runtime.rank import Rank
from mpiddp.world import World

class Alone(agent.Attempt):
    def _begin(self):
        self._has_met = True
        self._connect(self._launcher)
        os.environ["TORCHELASTIC_RUN_ID"] = "1"
        code = "import os, sys, time\\n" + sys.argv[1]
        self.child.program = Program(COMMAND, sys.executable, ("-c", code))
        self.child.start({}, os.environ)

agent.Attempt = Alone
try:
    sys.exit(agent.run(Rank(Program(COMMAND, "python"), World(1, 2, 1, 2))))
except JobFailed as error:
    print_error(error)
"""


class Launcher:
    """A control server for two ranks, and the messages that it received."""

    def __init__(self, address: str | None = "127.0.0.1") -> None:
        self.selector = TimedSelector()
        self.server = ControlServer(listen(place_to_listen(address)), 2, self.selector)
        self.messages: list[Message] = []

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.server.settings[ADDRESS].partition(":")
        return host, int(port)

    @property
    def connections(self) -> int:
        return len(self.selector.get_map()) - 1  # without the listening socket

    def receive(self) -> None:
        for key, _ in self.selector.select(0.02):
            self.messages += self.server.receive(key.data)

    @property
    def kinds(self) -> list[tuple[int, str]]:
        """The rank and the kind of each message so far."""
        return [(message.rank, message.kind) for message in self.messages]

    def receive_for(self, seconds: float, until: str = "") -> list[tuple[int, str]]:
        """Receive until a message of the kind `until` is there, and return `kinds`."""
        deadline = time.monotonic() + seconds
        self.receive()  # at least once
        while time.monotonic() < deadline and until not in {kind for _, kind in self.kinds}:
            self.receive()
        return self.kinds

    @contextmanager
    def rank(self, code: str, before: str = "") -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            [sys.executable, "-c", before + RANK, code],
            env=clean_env(self.server.settings),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as rank:
            try:
                yield rank
            finally:
                rank.kill()


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.server.close()
    launcher.selector.close()


def test_a_rank_exits_when_it_loses_its_launcher(launcher):
    with launcher.rank("time.sleep(6000)") as rank:
        launcher.receive_for(PATIENCE_S, until="started")
        launcher.server.close()
        assert (
            "lost the connection to the launcher; exiting."
            in rank.communicate(timeout=PATIENCE_S)[1]
        )
    launcher.server = ControlServer(listen("127.0.0.1"), 2, launcher.selector)


def test_a_process_that_a_rank_starts_does_not_inherit_the_secret(launcher):
    code = "import subprocess; subprocess.run(['env'])"
    with launcher.rank(code) as rank:
        launcher.receive_for(PATIENCE_S, until="lost")
        assert "MPIDDP_CONTROL" not in rank.communicate(timeout=PATIENCE_S)[0]


IMPATIENT = """
from mpiddp.runtime.job import coordinator
coordinator.CONNECT_TIMEOUT_S = coordinator._ATTEMPT_S = 0.2
"""


@pytest.mark.parametrize("address", ["127.0.0.1", None])
def test_a_rank_waits_for_a_launcher_that_is_stopped(address):
    """Its kernel has accepted the connection, which stands for longer than the time to connect."""
    launcher = Launcher(address)
    with launcher.rank("pass", before=IMPATIENT) as rank:
        assert launcher.selector.select(PATIENCE_S)  # the connection
        time.sleep(0.5)
        assert rank.poll() is None
        assert (1, "done") in launcher.receive_for(PATIENCE_S, until="done")
        assert rank.wait(PATIENCE_S) == 0
    launcher.server.close()
    launcher = Launcher(address)
    with launcher.rank("pass", before=IMPATIENT) as rank:
        assert launcher.selector.select(PATIENCE_S)
        launcher.server.close()  # as by the end of a launcher that is stopped
        stderr = rank.communicate(timeout=PATIENCE_S)[1]
    assert re.search(error("reach the launcher", "rank 1 on "), stderr), stderr


@pytest.mark.parametrize("line", [b"{]", b"[]", b"{}", b"[" * 10**6])
def test_a_rank_exits_when_the_other_end_is_no_launcher(launcher, line):
    with launcher.rank("time.sleep(600)") as rank:
        launcher.receive_for(PATIENCE_S, until="started")
        (connection,) = [
            key.data.connection
            for key in launcher.selector.get_map().values()
            if hasattr(key.data, "connection")
        ]
        connection.setblocking(True)
        with suppress(OSError):  # it may have left before the end of a long line
            connection.sendall(line + b"\n")
        assert rank.wait(PATIENCE_S) == 1
        assert rank.stderr is not None
        assert rank.stderr.read().endswith("lost the connection to the launcher; exiting.\n")


@pytest.fixture
def local_launcher() -> Iterator[Launcher]:
    launcher = Launcher(address=None)
    yield launcher
    launcher.server.close()
    launcher.selector.close()


def test_on_one_host_only_its_user_can_open_the_channel(local_launcher):
    address = local_launcher.server.settings[ADDRESS]
    path = Path(address.removeprefix("unix:"))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert len(str(path)) < 108
    with local_launcher.rank("1 / 0"):
        expected = [(1, "started"), (1, "failed")]
        assert local_launcher.receive_for(PATIENCE_S, until="lost")[:2] == expected


@pytest.mark.parametrize("address", ["192.0.2.77", "2001:db8::77"])  # kept free for documentation
def test_an_address_that_this_machine_does_not_have(address):
    reasons = "Cannot assign requested address|Address family not supported by protocol"
    with pytest.raises((UserError, JobFailed)) as raised:
        listen(address)
    fix = error("another interface", ": --interface NAME ")
    assert re.fullmatch(rf".* {address} .*\(({reasons}).*\)\. {fix}", str(raised.value))


NO_FILE = os.strerror(errno.EMFILE)


def test_an_mpirun_that_cannot_be_started():
    """subprocess needs two more files for its own pipe."""
    starter = STARTERS[1]._replace(program=Path("mpirun"))
    no_file = error("cannot start", "mpirun: ", NO_FILE)
    with files_left(1), pytest.raises(JobFailed, match=no_file):
        MpirunProcess(starter, Command("mpirun", (), ()))
    gc.collect()  # what other tests have left open
    # Not counted above: without a file for a pipe, Python before 3.11.5 leaves its /dev/null open.
    before = len(list(Path("/proc/self/fd").iterdir()))
    for program, argument in (("/nowhere/mpirun", "x"), ("true", "x" * (1 << 18))):
        with pytest.raises(UserError, match=error("cannot start", f"{program}: ")):
            MpirunProcess(starter, Command(program, (), (argument,)))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before
