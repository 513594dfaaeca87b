"""The ranks meet over MPI, as often as a number says, without torch: `meeting.py`.

With MPIDDP_TEST_SLEEPER=R rank R sleeps instead, as a rank would whose disk does not answer.
"""

from __future__ import annotations

import os
import time

from mpiddp.rendezvous import meet_over_mpi
from mpiddp.world import World

world = World.from_env()
if os.environ.get("MPIDDP_TEST_SLEEPER") == str(world.rank):
    time.sleep(100)
meeting = meet_over_mpi(world, timeout_s=2.0)
print(meeting.world.master_addr, meeting.world.master_port, meeting.listener is not None)
