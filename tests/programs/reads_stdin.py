"""Print each line of stdin, and its end."""

import os
import sys

rank = os.environ["RANK"]
for line in sys.stdin:
    os.write(1, f"rank {rank}: {line.strip()}\n".encode())
os.write(1, f"rank {rank}: end\n".encode())
