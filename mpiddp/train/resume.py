"""The checkpoint that `mpiddp train` resumes from, by its options --out, --resume and --go-on."""

from __future__ import annotations

import os
from pathlib import Path

from mpiddp.checkpoints import search
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.checkpoints.search import Source, Start
from mpiddp.protocol.variables import is_restart
from mpiddp.runtime.job.coordinator import Coordinator
from mpiddp.train import checkpoint
from mpiddp.train.checkpoint import Contents
from mpiddp.train.config import TrainConfig


def find(coordinator: Coordinator, config: TrainConfig, data: str, run: RunDir) -> Start[Contents]:
    """Search all hosts, without writing anything. All ranks must call this.

    Args:
        data: the contents of the data set, see `Data`.

    Raises:
        JobFailed: the folder of a run that is restarted does not appear.
        SystemExit: --resume does not name a valid checkpoint of this configuration and this data, or
            contradicts the contents of the run's folder. Rank 0 has printed the error.
    """
    if config.go_on and is_restart(os.environ):
        search.wait_for_run(run, run.config, coordinator, config.timeout)
    source = Source(
        path=None if config.resume in ("auto", "never") else Path(config.resume),
        must_be_new=config.resume == "never",
        prefers_own=config.go_on,
        option="--resume",
        expected="Expected auto, never, a run's folder or a checkpoint's folder.",
    )
    with coordinator.all_or_none():
        return search.find(
            coordinator,
            run,
            source,
            lambda folder: checkpoint.read(folder, config, data),
            lambda found: f"step {found.progress.step}, epoch {found.progress.epoch}",
        )
