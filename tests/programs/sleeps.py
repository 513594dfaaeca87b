"""Print "ready", then sleep until somebody ends this rank. With "ignores_sigterm", print each SIGTERM."""

import os
import signal
import sys
import time

if "ignores_sigterm" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"received\n"))  # a print may be under way
os.write(1, b"ready\n")
time.sleep(1000)
