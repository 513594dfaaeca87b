"""mpiddp: one mpirun starts every rank of a hostfile; torch.distributed trains.

The public names load on first use, so that `import mpiddp` imports neither torch nor mpi4py.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiddp.errors import UserError
    from mpiddp.runtime.announcement import announce
    from mpiddp.runtime.process_group import init, process_group
    from mpiddp.runtime.script_steps import should_stop
    from mpiddp.runtime.session import saving
    from mpiddp.world import World

__version__ = "0.1.0"
__all__ = ["UserError", "World", "announce", "init", "process_group", "saving", "should_stop"]

_MODULES = {
    "UserError": "mpiddp.errors",
    "World": "mpiddp.world",
    "announce": "mpiddp.runtime.announcement",
    "init": "mpiddp.runtime.process_group",
    "process_group": "mpiddp.runtime.process_group",
    "saving": "mpiddp.runtime.session",
    "should_stop": "mpiddp.runtime.script_steps",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'mpiddp' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)
