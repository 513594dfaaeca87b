"""mpiddp: one mpirun starts every rank of a hostfile; torch.distributed trains.

A script forms its process group, saves and resumes, and stops when it is requested to:

    import mpiddp

    with mpiddp.process_group() as world:
        model = DistributedDataParallel(Net().to(world.device))
        checkpoints = mpiddp.Checkpoints("runs/a", every="10m")
        if saved := checkpoints.resume():
            saved.load_into(model=model)
        for step in range(saved.step + 1 if saved else 1, 1001):
            train_one_step(model)
            if checkpoints.due(step):
                checkpoints.save(step, {"model": model.state_dict()})
            if mpiddp.should_stop():
                break

It runs under `mpiddp launch`, mpirun, srun, torchrun, or alone. `mpiddp.spawn` runs a function in every rank
instead of a script.

The public names load on first use, so that `import mpiddp` imports neither torch nor mpi4py.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiddp.checkpoints.records import log_metrics, run_dir
    from mpiddp.checkpoints.resumed import Resumed
    from mpiddp.checkpoints.script import Checkpoints
    from mpiddp.errors import JobFailed, RankFailed, UserError
    from mpiddp.runtime.announcement import Announced, announce, announced
    from mpiddp.runtime.device_mesh import mesh
    from mpiddp.runtime.divergence import check_divergence
    from mpiddp.runtime.process_group import init, process_group
    from mpiddp.runtime.script_steps import should_stop
    from mpiddp.runtime.session import saving
    from mpiddp.spawning.spawn import spawn
    from mpiddp.world import World

__version__ = "0.1.0"
__all__ = [
    "Announced",
    "Checkpoints",
    "JobFailed",
    "RankFailed",
    "Resumed",
    "UserError",
    "World",
    "announce",
    "announced",
    "check_divergence",
    "init",
    "log_metrics",
    "mesh",
    "process_group",
    "run_dir",
    "saving",
    "should_stop",
    "spawn",
]

_MODULES = {
    "Announced": "mpiddp.runtime.announcement",
    "Checkpoints": "mpiddp.checkpoints.script",
    "JobFailed": "mpiddp.errors",
    "RankFailed": "mpiddp.errors",
    "Resumed": "mpiddp.checkpoints.resumed",
    "UserError": "mpiddp.errors",
    "World": "mpiddp.world",
    "announce": "mpiddp.runtime.announcement",
    "announced": "mpiddp.runtime.announcement",
    "check_divergence": "mpiddp.runtime.divergence",
    "init": "mpiddp.runtime.process_group",
    "log_metrics": "mpiddp.checkpoints.records",
    "mesh": "mpiddp.runtime.device_mesh",
    "process_group": "mpiddp.runtime.process_group",
    "run_dir": "mpiddp.checkpoints.records",
    "saving": "mpiddp.runtime.session",
    "should_stop": "mpiddp.runtime.script_steps",
    "spawn": "mpiddp.spawning.spawn",
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
