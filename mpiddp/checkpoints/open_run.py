"""Create the folder of a run on every host, and become its owner."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from mpiddp.checkpoints.agreement import raised_by_all
from mpiddp.checkpoints.file_systems import FileSystems, find_file_systems
from mpiddp.checkpoints.owner import RunOwner, own
from mpiddp.checkpoints.run_dir import RunDir, writing
from mpiddp.protocol.variables import RUN_ID
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.runtime.log import log


def open_run(
    run: RunDir, coordinator: Coordinator, *, folders: Sequence[Path], timeout_s: float
) -> tuple[FileSystems, RunOwner | None]:
    """Create the run's folder on every host, and become its owner. All ranks must call this.

    Args:
        folders: those to create in it.

    Returns:
        The file systems on which it lies, and on the ranks that write there its ownership.

    Raises:
        UserError: the folder cannot be written, or another run owns it.
        JobFailed: a disk has failed.
    """
    with raised_by_all(coordinator), writing(run):
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
    file_systems = find_file_systems(coordinator, run, timeout_s=timeout_s)
    owner: RunOwner | None = None
    try:
        with raised_by_all(coordinator), writing(run):
            if coordinator.world.rank in file_systems.writers:
                run_id = os.environ.get(RUN_ID) or secrets.token_hex(8)
                owner = own(run, run_id, on_wait=lambda sentence: log.info(sentence))
                run.metrics.touch()
    except BaseException:
        if owner is not None:
            owner.release()
        raise
    return file_systems, owner
