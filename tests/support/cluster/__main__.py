"""The test cluster by hand: a shell on node0 of so many hosts, which end with it.

python -m tests.support.cluster 3                     # with --slurm, also srun and sbatch
python -m tests.support.cluster 2 -- ssh node1 hostname
apt-get install $(python -m tests.support.cluster packages)
"""

import argparse
import os
import subprocess
import sys

from tests.support import cluster
from tests.support.cluster import needs, slurm

SHELL = ("script", "--quiet", "--return", "--command", "bash", "/dev/null")  # on its own terminal


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--slurm", action="store_true", help="with srun, sbatch and salloc")
    parser.add_argument("--user", help="not root")
    parser.add_argument("--cwd", help="not the user's home")
    parser.add_argument("count", help="the number of hosts")
    parser.add_argument("command", nargs="*", help="instead of a shell")
    options = parser.parse_args()
    if options.count == "packages":
        print(*needs.PACKAGES, *needs.SLURM_PACKAGES, *needs.GRID_ENGINE_PACKAGES)
        return 0
    if reason := needs.why_no_slurm() if options.slurm else cluster.why_not():
        print(f"tests.support.cluster: {reason}", file=sys.stderr)
        return 2
    with cluster.up(int(options.count)) as hosts:
        if options.slurm:
            slurm.start(hosts)
        env = {"TERM": os.environ.get("TERM", "dumb")}
        where = {"user": options.user, "cwd": options.cwd, "env": env}
        return subprocess.call(hosts["node0"].enter(options.command or SHELL, **where))


if __name__ == "__main__":
    sys.exit(main())
