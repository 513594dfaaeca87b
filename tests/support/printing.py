"""Ranks that print: a script whose lines and last words the tests look for."""

from __future__ import annotations

PARTS, LAST_WORDS = 40, 2000
# Each rank writes lines in three parts. The last rank then writes many lines, and is killed.
PRINTS = f"""
import os, signal, sys, time
from pathlib import Path
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
done = Path(sys.argv[1])  # a folder that all ranks share
for number in range({PARTS}):
    for part in (f"<{{rank}} ", f"{{number}} ", f"{{rank}} {{number}}>\\n"):
        os.write(1 + number % 2, part.encode())
        time.sleep(0.002)
(done / str(rank)).touch()
while rank == world_size - 1 and len(list(done.iterdir())) < world_size:
    time.sleep(0.01)
if rank == world_size - 1:
    for number in range({LAST_WORDS}):
        os.write(1 + number % 2, f"last words {{number}}\\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1000)
"""


def check(stdout: str, stderr: str, hosts: list[str]) -> None:
    """Check the output of PRINTS on these hosts, one for each rank."""
    for parity, text in enumerate((stdout, stderr)):
        for rank, host in enumerate(hosts):
            prefix = f"[rank {rank} {host}] "
            lines = [each for each in text.splitlines() if each.startswith(prefix)]
            own = [line.removeprefix(prefix) for line in lines]
            expected = [f"<{rank} {n} {rank} {n}>" for n in range(parity, PARTS, 2)]
            if rank == len(hosts) - 1:
                expected += [f"last words {n}" for n in range(parity, LAST_WORDS, 2)]
            assert own == expected, text
        assert text.count("<") == len(hosts) * PARTS // 2


TALKS = """
import os, sys
print("out", os.environ["RANK"], sys.stdout.isatty())
print("err", os.environ["RANK"], file=sys.stderr)
"""
