"""Rank 1 ends in its own way after the end of its main part: `ends_late.py HOW`.

mpiddp launch -H localhost:2 tests/programs/ends_late.py kill
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time


def act() -> None:
    time.sleep(0.5)
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "os._exit":
        os._exit(3)
    raise RuntimeError("in a thread")


how = sys.argv[1]
if os.environ["RANK"] == "1":
    if how == "os._exit in atexit":
        atexit.register(os._exit, 3)
    else:
        threading.Thread(target=act).start()
