"""Print lines in three parts, each rank at the same time. The last rank then prints many, and is killed.

The argument is a folder that all ranks share. The lines go to stdout and stderr in turn.
"""

import os
import signal
import sys
import time
from pathlib import Path

PARTS, LAST_WORDS = 40, 2000

if __name__ == "__main__":
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    done = Path(sys.argv[1])
    for number in range(PARTS):
        for part in (f"<{rank} ", f"{number} ", f"{rank} {number}>\n"):
            os.write(1 + number % 2, part.encode())
            time.sleep(0.002)
    (done / str(rank)).touch()
    while rank == world_size - 1 and len(list(done.iterdir())) < world_size:
        time.sleep(0.01)
    if rank == world_size - 1:
        for number in range(LAST_WORDS):
            os.write(1 + number % 2, f"last words {number}\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
