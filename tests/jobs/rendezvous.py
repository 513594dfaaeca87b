"""The ranks join over MPI, without torch.

With MPIDDP_TEST_SLEEPER=R, rank R sleeps instead, like a rank whose disk does not answer. The others time
out after 2 s.
"""

from __future__ import annotations

import os
import time

from mpiddp.runtime.rendezvous import mpi as rendezvous
from mpiddp.runtime.rendezvous.result import RankInfo
from mpiddp.world import World

world = World.from_env()
if os.environ.get("MPIDDP_TEST_SLEEPER") == str(world.rank):
    time.sleep(1000)
timeout_s = 2.0 if "MPIDDP_TEST_SLEEPER" in os.environ else 60.0
meeting = rendezvous.Meeting(lambda: RankInfo.of_this_process(world), timeout_s=timeout_s)
result = rendezvous.rendezvous_over_mpi(world, meeting)
print(result.world.master_addr, result.world.master_port, result.listener is not None)
