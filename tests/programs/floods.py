"""Ranks that print without end in a thread.

They leave the files ready RANK in their folder when they begin, and saved RANK when they stop.

mpiddp launch -H localhost:2 tests/programs/floods.py
"""

import os
import sys
import threading
import time
from pathlib import Path

import mpiddp


def flood() -> None:
    while not is_over.is_set():
        print("x" * 200)


is_over = threading.Event()
mpiddp.should_stop()
Path(f"ready{os.environ['RANK']}").touch()
printing = threading.Thread(target=flood)
printing.start()
while not mpiddp.should_stop():
    time.sleep(0.05)
Path(f"saved{os.environ['RANK']}").touch()
is_over.set()
printing.join()
sys.exit(75)
