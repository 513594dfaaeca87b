"""Print numbered lines: `printing.py parts|fast LINES`, each in three parts with pauses, or at once."""

from __future__ import annotations

import os
import sys
import time

from mpiddp.world import likely_ranks

PAUSE_S = 0.002
how, lines = sys.argv[1], int(sys.argv[2])
rank, _ = likely_ranks(os.environ)

for number in range(lines):
    if how == "fast":
        print(f"<{rank} {number} {'x' * 60}>")
        continue
    for part in (f"<{rank} ", f"{number} ", "x>\n"):
        os.write(1, part.encode())
        time.sleep(PAUSE_S)
