"""A launcher and its ranks without MPI and torch: `light_job.py [--terminal] SELECTION PREFIX CODE CODE …`.

Each CODE runs as a rank, which reports to the launcher and whose output the launcher shows, both with the
project's own code. With --terminal a rank's stdout is a terminal, as under Open MPI. The last line on
stderr holds the ranks' exit codes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpiddp.launch.control import ControlServer
from mpiddp.launch.output import JobOutput
from mpiddp.protocol.channel import INPUT, STREAMS, is_shown
from mpiddp.protocol.server import TimedSelector
from mpiddp.protocol.variables import OUTPUT
from tests.support.patience import PATIENCE_S

# A rank's agent, whose command does without the other ranks.
RANK = """
import os, socket, sys
from mpiddp.hosts.processes import adopt_orphans
from mpiddp.runtime.agent import Agent
from mpiddp.runtime.child import COMMAND, Child, Program
from mpiddp.world import World

class Alone(Agent):
    def _begin(self):
        adopt_orphans()
        self._catch_signals()
        self._connect(self._launcher)
        control = socket.socketpair()
        script = FIRST.format(number=control[1].fileno(), rank=rank) + sys.argv[3]
        os.environ["RANK"] = str(rank)
        command = [sys.executable, "-c", script]
        self.child = Child(command, os.environ, self.files, control)

FIRST = '''
import os, signal, socket, subprocess, sys, time
from pathlib import Path
from mpiddp.runtime.job.session import current
rank = {rank}
current().control, current().has_launcher = socket.socket(fileno={number}), True
os.set_inheritable({number}, False)
'''
rank, world_size = int(sys.argv[1]), int(sys.argv[2])
world = World(rank, world_size, rank, world_size, hostname="node1")
sys.exit(Alone(Program(COMMAND, "python"), world).run())
"""


def main(selection: str, prefix: str, codes: list[str], *, has_terminal: bool) -> None:
    with TimedSelector() as selector, tempfile.TemporaryDirectory() as folder:
        server = ControlServer(Path(folder, "control"), len(codes), selector)
        outputs = JobOutput(len(codes), has_prefix=prefix == "prefix")
        env = {**os.environ, **server.settings, OUTPUT: selection}
        ranks, inputs = [], []
        pipes = {number: os.pipe() for number in STREAMS}
        for rank, code in enumerate(codes):
            stdout = os.openpty()[1] if has_terminal else pipes[1][1]
            command = [sys.executable, "-c", RANK, str(rank), str(len(codes)), code]
            ranks.append(subprocess.Popen(command, env=env, stdout=stdout, stderr=pipes[2][1]))
        outputs.begin(*(os.fdopen(reader, "rb") for reader, _ in pipes.values()))
        deadline = time.monotonic() + PATIENCE_S
        # A rank may end before its output process has connected.
        missing = sum(
            is_shown(selection, rank, each) for rank in range(len(codes)) for each in STREAMS
        )
        while missing or any(rank.poll() is None for rank in ranks) or outputs.open_ranks:
            assert time.monotonic() < deadline, (missing, outputs.open_ranks)
            for key, _ in selector.select(0.02):
                for message in server.receive(key.data):
                    if message.kind == INPUT:
                        inputs.append(message)  # open to the end
                    if message.kind == "output":
                        outputs.add(rank=message.rank, **message.facts)
                        missing -= 1
        outputs.log(f"codes {[rank.returncode for rank in ranks]}", is_error=True)
        assert outputs.finish(PATIENCE_S)
        outputs.settle(is_said=False)
        server.close()


if __name__ == "__main__":
    options = sys.argv[1:]
    is_terminal = options[:1] == ["--terminal"]
    first, second, *rest = options[is_terminal:]
    main(first, second, rest, has_terminal=is_terminal)
