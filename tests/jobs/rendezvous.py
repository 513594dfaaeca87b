"""The ranks meet over MPI, as often as a number says, without torch: `rendezvous.py`.

With MPIDDP_TEST_SLEEPER=R rank R sleeps instead, as a rank would whose disk does not answer, and the
others wait for 2 s, and speak further apart than a slow machine may stall; with MPIDDP_TEST_DEAF besides
they handle SIGTERM, as a script that saves would.
"""

from __future__ import annotations

import os
import signal
import time

from mpiddp.runtime import rendezvous
from mpiddp.world import World

world = World.from_env()
if os.environ.get("MPIDDP_TEST_SLEEPER") == str(world.rank):
    time.sleep(1000)
if "MPIDDP_TEST_DEAF" in os.environ:
    signal.signal(signal.SIGTERM, lambda *_: print("saved"))
rendezvous.SPEAK_APART_S = 5.0
timeout_s = 2.0 if "MPIDDP_TEST_SLEEPER" in os.environ else 60.0
meeting = rendezvous.rendezvous_over_mpi(world, timeout_s=timeout_s)
print(meeting.world.master_addr, meeting.world.master_port, meeting.listener is not None)
