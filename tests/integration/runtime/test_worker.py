"""`mpiddp.init_worker`: a DataLoader's worker ends with its rank. tests/integration/train has its stop."""

import sys

from tests.support.ranks import run_command, script

ENDS = """
import os, sys
from torch.utils.data import DataLoader
import mpiddp
if __name__ == "__main__":
    loader = DataLoader(range(9), num_workers=2, multiprocessing_context="forkserver",
        persistent_workers=True, worker_init_fn=mpiddp.init_worker)
    next(iter(loader))
    os._exit(2)
"""


def test_no_worker_of_a_forkserver_outlives_its_rank(tmp_path):
    """They hold the rank's stdout, so its end is the end of them all."""
    done = run_command([sys.executable, script(tmp_path, ENDS)])
    assert (done.returncode, done.stdout) == (2, "")
