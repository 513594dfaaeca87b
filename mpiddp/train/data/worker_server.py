"""The forkserver of DataLoader workers imports this module once for all of them.

The forkserver exits with its rank, when the pipe between them closes. For signals see
`mpiddp.runtime.job.stop`.
"""

import signal

import mpiddp.train.data.decode  # noqa: F401 - and torch with it

signal.signal(signal.SIGTERM, signal.SIG_IGN)
