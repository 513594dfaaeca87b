"""A rank's own log, logs/rank_00003.log: the rank's identity, and the traceback if it fails."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
from collections.abc import Iterator

import torch

from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.runtime.job.session import Session
from mpiddp.runtime.log import log_to_file
from mpiddp.world import World

_log = logging.getLogger("mpiddp.rank")
_log.propagate = False  # keep it off the console
_log.setLevel(logging.INFO)


@contextlib.contextmanager
def rank_log(run: RunDir, world: World, session: Session) -> Iterator[None]:
    """Log the start and the end of the body, and send the log's path to the launcher."""
    path = run.rank_log(world.rank)
    session.send("log", path=str(path))
    with log_to_file(_log, path):
        _log.info(
            "started: rank %d of %d, local rank %d, node %s, host %s, pid %d, python %s, torch %s, by %s",
            world.rank,
            world.world_size,
            world.local_rank,
            world.node_rank,
            world.hostname,
            os.getpid(),
            platform.python_version(),
            torch.__version__,
            world.launcher.name,
        )
        try:
            yield
        except BaseException:
            _log.exception("failed")
            raise
        _log.info("done")
