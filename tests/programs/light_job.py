"""A launcher and its ranks without MPI and torch: `light_job.py CODE CODE …`.

Each CODE runs as a rank, which reports to the launcher and whose output the launcher shows, both with the
project's own code. The last line on stderr holds the ranks' exit codes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mpiddp.launch import log
from mpiddp.launch.control import ControlServer, listen
from mpiddp.launch.output import JobOutput
from mpiddp.protocol.channel import INPUT, STREAMS
from mpiddp.protocol.server import TimedSelector
from mpiddp.protocol.variables import OUTPUT
from tests.support.patience import PATIENCE_S

# A rank's agent, whose script does without the other ranks.
RANK = """
import os, sys, tempfile
from pathlib import Path
from mpiddp.hosts.processes import adopt_orphans
from mpiddp.runtime import agent
from mpiddp.runtime.child import SCRIPT, Program
from mpiddp.runtime.rank import Rank
from mpiddp.world import TORCH, World

class Alone(agent.Attempt):
    def _begin(self):
        adopt_orphans()
        self.rank.catch_signals()
        self._has_met = True
        self._connect(self._launcher)
        self.process.start(os.environ)
        self.child.go(self.rank.program, dict(zip(TORCH, sys.argv[1:3] * 2)), None)

agent.Attempt = Alone

FIRST = '''
import os, signal, subprocess, sys, time
from pathlib import Path
from mpiddp.runtime.job.session import current
rank = int(os.environ["RANK"])
current().coordinator.has_launcher = True
'''
rank, world_size = int(sys.argv[1]), int(sys.argv[2])
world = World(rank, world_size, rank, world_size, hostname="node1")
with tempfile.TemporaryDirectory() as folder:
    script = Path(folder, "script.py")
    script.write_text(FIRST + sys.argv[3])
    sys.exit(agent.run(Rank(Program(SCRIPT, str(script)), world)))
"""


def main(codes: list[str]) -> None:
    with TimedSelector() as selector, tempfile.TemporaryDirectory() as folder:
        server = ControlServer(listen(Path(folder, "control")), len(codes), selector)
        env = {**os.environ, **server.settings, OUTPUT: "all"}
        ranks, inputs = [], []
        pipes = {number: os.pipe() for number in STREAMS}
        for rank, code in enumerate(codes):
            command = [sys.executable, "-c", RANK, str(rank), str(len(codes)), code]
            files = {"stdout": pipes[1][1], "stderr": pipes[2][1]}
            ranks.append(subprocess.Popen(command, env=env, **files))
        streams = (os.fdopen(reader, "rb") for reader, _ in pipes.values())
        outputs = JobOutput(len(codes), selector, *streams)
        deadline = time.monotonic() + PATIENCE_S
        # A rank may end before its output process has connected.
        missing = len(codes) * len(STREAMS)
        while missing or any(rank.poll() is None for rank in ranks) or outputs.open_ranks:
            assert time.monotonic() < deadline, (missing, outputs.open_ranks)
            for data in selector.ready(time.monotonic() + 0.02):
                if data is outputs:
                    outputs.copy()
                    continue
                for message in server.receive(data):
                    if message.kind == INPUT:
                        inputs.append(message)  # open to the end
                    if message.kind == "output":
                        outputs.add(rank=message.rank, **message.facts)
                        missing -= 1
        outputs.finish()
        outputs.settle(is_said=False)
        log.error(f"codes {[rank.returncode for rank in ranks]}")
        server.close()


if __name__ == "__main__":
    main(sys.argv[1:])
