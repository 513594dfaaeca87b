"""After MPI is finalized, `from mpi4py import MPI` raises an ImportError in this process.

Every function of a finalized MPI aborts the process. Libraries that only ask whether MPI is there (PyTorch
Lightning 2.6 calls MPI.COMM_WORLD.Get_size()) catch the ImportError, and continue without MPI.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

_MODULE = "mpi4py.MPI"


class _Forbid(MetaPathFinder):
    """Finds no module, and raises an ImportError for mpi4py.MPI."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if fullname == _MODULE:
            raise ImportError(
                "mpiddp has finalized MPI in this process. To use mpi4py in the script, keep it: "
                "mpiddp run --keep-mpi, or mpiddp.init(keep_mpi=True)",
                name=_MODULE,
            )


def forbid_mpi4py() -> None:
    """Remove mpi4py.MPI from this process, and refuse to import it again."""
    sys.modules.pop(_MODULE, None)
    package = sys.modules.get("mpi4py")
    if package is not None:
        vars(package).pop("MPI", None)
    sys.meta_path.insert(0, _Forbid())
