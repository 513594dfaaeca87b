"""Imported by nobody but the forkserver of DataLoader workers, once for all of them.

It ends with its rank, by the pipe between them; of a stop see `workers`.
"""

import signal

import mpiddp.train.data.decode  # noqa: F401 - and torch with it

signal.signal(signal.SIGTERM, signal.SIG_IGN)
