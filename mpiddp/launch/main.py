"""`mpiddp launch`: one command that starts a script on every host of a hostfile.

Reads the hosts, composes one command for the MPI that is installed, runs it, and turns its end into
an exit code.

    mpiddp launch --hostfile hostfiles/two_nodes --dry-run train.py --epochs 3
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.hostfile import Hosts, exclude, parse_host_list, ranks_per_host, read_hostfile
from mpiddp.launch import placement, slurm
from mpiddp.launch.command import Command, Node, Request
from mpiddp.launch.environment import forwarded, parse_exports
from mpiddp.launch.flavours import compose
from mpiddp.launch.mpi import Mpi, find_mpirun, find_srun, identify, with_own_folder
from mpiddp.launch.options import parse_options
from mpiddp.launch.process import End, run_to_the_end

DONE, FAILED, BAD_INPUT, STOPPED_AFTER_CHECKPOINT, INTERRUPTED = 0, 1, 2, 75, 130


def main(argv: list[str]) -> int:
    """Launch what `argv` says. The exit code: 0 done, 1 the job failed, 2 its ranks refused their
    input, 75 stopped on request after a checkpoint, 130 interrupted.

    Raises:
        UserError: bad input, found before anything was started.
    """
    settings = {"MPIDDP_LAUNCHED_AT": f"{time.time():.3f}"}
    options = parse_options(argv)
    # Not resolved: a virtual environment is known by the path of its own python.
    python = Path(sys.executable).absolute()

    hosts = _hosts(options)
    if hosts.from_slurm and options.mpirun is None:
        mpi = identify(find_srun(os.environ), os.environ)
    else:
        mpi = identify(find_mpirun(options.mpirun, python, os.environ), os.environ)
    hosts, notes = placement.fit_to_gpus(hosts, placement.asked_backend(options.command[1:]))
    nodes = placement.nodes(ranks_per_host(hosts, options.n, options.npernode))
