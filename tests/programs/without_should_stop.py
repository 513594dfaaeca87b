"""Ranks that know nothing of should_stop(), and handle SIGTERM by a save of SECONDS.

mpiddp launch -H localhost:2 tests/programs/without_should_stop.py SECONDS
"""

import os
import signal
import sys
import time
from types import FrameType


def save(number: int, frame: FrameType | None) -> None:
    # Not print(), which may be under way and must not be entered again.
    os.write(1, f"{signal.Signals(number).name}\n".encode())
    time.sleep(float(sys.argv[1]))
    os.write(1, b"saved\n")
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
print("ready\n", end="", flush=True)
time.sleep(1000)
