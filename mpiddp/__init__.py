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
    from mpiddp.checkpoints.checkpoints import Checkpoints as Checkpoints
    from mpiddp.checkpoints.contents import Resumed as Resumed
    from mpiddp.checkpoints.records import log_metrics as log_metrics
    from mpiddp.checkpoints.records import run_dir as run_dir
    from mpiddp.errors import JobFailed as JobFailed
    from mpiddp.errors import RankFailed as RankFailed
    from mpiddp.errors import UserError as UserError
    from mpiddp.runtime.reports import Announced as Announced
    from mpiddp.runtime.reports import announce as announce
    from mpiddp.runtime.reports import announced as announced
    from mpiddp.runtime.reports import saving as saving
    from mpiddp.runtime.torch.device_mesh import mesh as mesh
    from mpiddp.runtime.torch.divergence import check_divergence as check_divergence
    from mpiddp.runtime.torch.process_group import init as init
    from mpiddp.runtime.torch.process_group import process_group as process_group
    from mpiddp.runtime.torch.steps import progress as progress
    from mpiddp.runtime.torch.steps import should_stop as should_stop
    from mpiddp.runtime.torch.steps import together as together
    from mpiddp.spawning.spawn import spawn as spawn
    from mpiddp.world import World as World

__version__ = "0.1.0"

_MODULES = {
    "Announced": "mpiddp.runtime.reports",
    "Checkpoints": "mpiddp.checkpoints.checkpoints",
    "JobFailed": "mpiddp.errors",
    "RankFailed": "mpiddp.errors",
    "Resumed": "mpiddp.checkpoints.contents",
    "UserError": "mpiddp.errors",
    "World": "mpiddp.world",
    "announce": "mpiddp.runtime.reports",
    "announced": "mpiddp.runtime.reports",
    "check_divergence": "mpiddp.runtime.torch.divergence",
    "init": "mpiddp.runtime.torch.process_group",
    "log_metrics": "mpiddp.checkpoints.records",
    "mesh": "mpiddp.runtime.torch.device_mesh",
    "process_group": "mpiddp.runtime.torch.process_group",
    "progress": "mpiddp.runtime.torch.steps",
    "run_dir": "mpiddp.checkpoints.records",
    "saving": "mpiddp.runtime.reports",
    "should_stop": "mpiddp.runtime.torch.steps",
    "spawn": "mpiddp.spawning.spawn",
    "together": "mpiddp.runtime.torch.steps",
}

__all__ = sorted(_MODULES)


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
