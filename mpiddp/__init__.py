"""mpiddp: one mpirun starts every rank of a hostfile; torch.distributed trains.

The public names load on first use, so that `import mpiddp` imports neither torch nor mpi4py.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiddp.checkpoints.script import Checkpoints
    from mpiddp.checkpoints.script_run import log_metrics, run_dir
    from mpiddp.errors import JobFailed, UserError
    from mpiddp.runtime.announcement import announce
    from mpiddp.runtime.device_mesh import mesh
    from mpiddp.runtime.divergence import check_divergence
    from mpiddp.runtime.process_group import init, process_group
    from mpiddp.runtime.script_steps import should_stop
    from mpiddp.runtime.session import saving
    from mpiddp.world import World

__version__ = "0.1.0"
__all__ = [
    "Checkpoints",
    "JobFailed",
    "UserError",
    "World",
    "announce",
    "check_divergence",
    "init",
    "log_metrics",
    "mesh",
    "process_group",
    "run_dir",
    "saving",
    "should_stop",
]

_MODULES = {
    "Checkpoints": "mpiddp.checkpoints.script",
    "JobFailed": "mpiddp.errors",
    "UserError": "mpiddp.errors",
    "World": "mpiddp.world",
    "announce": "mpiddp.runtime.announcement",
    "check_divergence": "mpiddp.runtime.divergence",
    "init": "mpiddp.runtime.process_group",
    "log_metrics": "mpiddp.checkpoints.script_run",
    "mesh": "mpiddp.runtime.device_mesh",
    "process_group": "mpiddp.runtime.process_group",
    "run_dir": "mpiddp.checkpoints.script_run",
    "saving": "mpiddp.runtime.session",
    "should_stop": "mpiddp.runtime.script_steps",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mpiddp' has no attribute '{name}'")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from mpiddp.errors import EXTRA_OF, missing_package

        if error.name not in EXTRA_OF:
            raise
        raise ImportError(missing_package(f"mpiddp.{name}", error.name), name=error.name) from None
