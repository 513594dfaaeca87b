"""One mpirun starts your PyTorch script on every GPU of several machines.

    with mpiddp.process_group() as world:
        model = DistributedDataParallel(Net().to(world.device))
        for step in range(1, 1001):
            train_one_step(model)

A script runs under `mpiddp launch`, mpirun, srun, torchrun, or alone. `mpiddp.Checkpoints` saves and resumes
it, and `mpiddp.should_stop` ends it on request. `mpiddp.spawn` runs a function in every rank instead.

The public names load on first use, so that `import mpiddp` imports neither torch nor mpi4py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpiddp.checkpoints.checkpoints import Checkpoints as Checkpoints
    from mpiddp.checkpoints.load import load as load
    from mpiddp.checkpoints.records import log_metrics as log_metrics
    from mpiddp.checkpoints.records import run_dir as run_dir
    from mpiddp.checkpoints.resumed import Resumed as Resumed
    from mpiddp.errors import JobFailed as JobFailed
    from mpiddp.errors import RankFailed as RankFailed
    from mpiddp.errors import UserError as UserError
    from mpiddp.runtime.reports import Announced as Announced
    from mpiddp.runtime.reports import announce as announce
    from mpiddp.runtime.reports import announced as announced
    from mpiddp.runtime.reports import progress as progress
    from mpiddp.runtime.reports import saving as saving
    from mpiddp.runtime.reports import should_stop as should_stop
    from mpiddp.runtime.reports import together as together
    from mpiddp.runtime.torch.device_mesh import mesh as mesh
    from mpiddp.runtime.torch.divergence import check_determinism as check_determinism
    from mpiddp.runtime.torch.divergence import check_divergence as check_divergence
    from mpiddp.runtime.torch.process_group import init as init
    from mpiddp.runtime.torch.process_group import process_group as process_group
    from mpiddp.runtime.torch.sampler import Sampler as Sampler
    from mpiddp.runtime.torch.worker import init_worker as init_worker
    from mpiddp.spawning.spawn import spawn as spawn
    from mpiddp.world import World as World

_NAMES = {
    "checkpoints.checkpoints": "Checkpoints",
    "checkpoints.resumed": "Resumed",
    "checkpoints.load": "load",
    "checkpoints.records": "log_metrics run_dir",
    "errors": "JobFailed RankFailed UserError",
    "runtime.reports": "Announced announce announced progress saving should_stop together",
    "runtime.torch.device_mesh": "mesh",
    "runtime.torch.divergence": "check_determinism check_divergence",
    "runtime.torch.process_group": "init process_group",
    "runtime.torch.sampler": "Sampler",
    "runtime.torch.worker": "init_worker",
    "spawning.spawn": "spawn",
    "world": "World",
}
_MODULES = {name: f"mpiddp.{module}" for module in _NAMES for name in _NAMES[module].split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("mpiddp")
        except PackageNotFoundError:  # the sources were copied, and not installed
            return "unknown"
    if name not in _MODULES:
        raise AttributeError(f"module 'mpiddp' has no attribute '{name}'")
    from importlib import import_module

    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from mpiddp.errors import missing_package

        if sentence := missing_package(error, f"mpiddp.{name}"):
            raise ImportError(sentence, name=error.name) from None
        raise
