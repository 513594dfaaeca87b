"""Ranks without a collective, of which rank 0 is three times as slow, stop at the same step on request.

    mpiddp launch -H localhost:3 tests/programs/stops.py [SECONDS]

Only the agreement on a step keeps the ranks together. Each prints "ready" once a request reaches it, "saving"
when it stops, and "saved STEP" after so many seconds.
"""

import os
import sys
import time

import mpiddp

rank = int(os.environ["RANK"])
mpiddp.should_stop()  # until a rank has called it, a request reaches the rank as SIGTERM
# A line and its newline in one piece: Intel's mpirun mixes the pieces of several ranks.
print("ready\n", end="", flush=True)
for step in range(1, 1_000_000):
    time.sleep(0.003 if rank else 0.01)
    if mpiddp.should_stop():
        print("saving\n", end="", flush=True)
        time.sleep(float((sys.argv[1:] or ["0"])[0]))
        print(f"saved {step}\n", end="", flush=True)
        sys.exit(75)
