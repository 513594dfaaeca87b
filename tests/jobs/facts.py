"""Every rank prints its world and its environment as a line of JSON: `facts.py [keep-mpi]`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from importlib.util import find_spec

from mpiddp.runtime.join import join
from tests.jobs.listening import listening_addresses


def is_forbidden() -> bool:
    try:
        find_spec("mpi4py.MPI")
    except ImportError:
        return True
    return False


before, keeps_mpi = dict(os.environ), "keep-mpi" in sys.argv
with join(keep_mpi=keeps_mpi) as coordinator:
    MPI = sys.modules.get("mpi4py.MPI")
    world = asdict(coordinator.world)
    facts = {
        "world": {name: value for name, value in world.items() if name != "launcher"},
        "launcher": coordinator.world.launcher.name,
        "touched": {
            name: os.environ.get(name)
            for name in before.keys() | os.environ.keys()
            if before.get(name) != os.environ.get(name)
        },
        "mpi_is_forbidden": is_forbidden(),
        "mpi_size": MPI.COMM_WORLD.size if MPI and not MPI.Is_finalized() else None,
        "listening": listening_addresses(os.getpid()),
    }
    print(json.dumps(facts), flush=True)
if keeps_mpi:  # until the interpreter ends, also after another block
    with join(keep_mpi=True):
        pass
    assert MPI is not None
    MPI.COMM_WORLD.Barrier()
