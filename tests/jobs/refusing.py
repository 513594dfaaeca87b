"""Some ranks refuse their input: `refusing.py WHO [SLOW]`.

WHO is a rank, or "all". Rank 0 waits for SLOW seconds before it prints the sentence. The other ranks could
exit in this time.
"""

from __future__ import annotations

import sys
import time

from mpiddp.errors import UserError
from mpiddp.runtime.join import join

who, slow_s = sys.argv[1], float(sys.argv[2]) if sys.argv[2:] else 0.0
write = sys.stderr.write


def slowly(text: str) -> int:
    time.sleep(slow_s)
    return write(text)


sys.stderr.write = slowly  # type: ignore[method-assign]
with join() as coordinator, coordinator.all_or_none():
    if who in ("all", str(coordinator.world.rank)):
        raise UserError("hosts.txt:3: one sentence.")
