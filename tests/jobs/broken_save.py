"""Two ranks save as on two hosts without a shared file system, and something happens to one of them.

    mpiddp launch -H localhost:2 -m tests.jobs.broken_save FOLDER FORM silent RANK
    mpiddp launch -H localhost:2 -m tests.jobs.broken_save FOLDER FORM unopenable RANK
    mpiddp launch -H localhost:2 -m tests.jobs.broken_save FOLDER FORM gone RANK
    mpiddp launch -H localhost:2 -m tests.jobs.broken_save FOLDER FORM destroyed RANK

FORM is "whole" or "sharded". "silent": in the first attempt, the rank's thread never finishes its part.
"unopenable": in the first save, a folder is in the place of a file that the rank has to write.
"gone": during the first save, the rank's folder can neither be written nor read.
"destroyed": the rank destroys the process group before its thread begins to write the last save.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mpiddp.checkpoints import save
from mpiddp.checkpoints.ranks import FileSystems, form_ranks
from mpiddp.checkpoints.run import Run
from mpiddp.checkpoints.run_dir import RunDir
from mpiddp.runtime.join import join
from mpiddp.runtime.log import log_to_console
from mpiddp.runtime.torch.process_group import default_group
from tests.support.patience import PATIENCE_S

CPU = torch.device("cpu")
SILENCE_S = 10.0  # the time limit of the attempt in which a rank is silent


def weight(form: str) -> Tensor:
    whole = torch.arange(8.0)
    if form == "whole":
        return whole
    return distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])


def main(folder: str, form: str, what: str, broken_rank: str) -> None:
    is_silent = what == "silent" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    with join() as coordinator, default_group(coordinator, "gloo", CPU, timeout_s=PATIENCE_S):
        rank = coordinator.world.rank
        log_to_console(rank)
        is_broken = rank == int(broken_rank)
        is_destroyed = threading.Event()

        def write_files(new: Path, saved: save.Contents) -> Mapping[str, str]:
            if is_broken and is_silent:
                time.sleep(1000)
            if is_broken and what == "destroyed" and saved.step == 2:
                assert is_destroyed.wait(PATIENCE_S)
            if is_broken and what == "unopenable" and saved.step == 1:
                (new / f"shard_{1 - rank:05d}.pt").mkdir()
            (new / "state.json").write_text("{}")
            return {}

        save.write_files = write_files  # type: ignore[assignment]
        run = RunDir(Path(folder) / f"host{rank}")
        root = run.checkpoints
        run.path.mkdir(exist_ok=True)
        ranks = form_ranks(coordinator, SILENCE_S if is_silent else 2 * PATIENCE_S)
        saver = save.Saver(Run(run, ranks, FileSystems((0, 1)), None), keep=2, must_succeed=False)
        # A collective: beside a silent rank it would wait longer than the save.
        state = {"weight": weight(form)}
        for step in (1, 2):
            saver.wait_for_own_save()
            if is_broken and what == "gone":
                if step == 1:
                    root.symlink_to("x" * 300)  # longer than a name may be
                else:
                    root.unlink()
            saver.save(step, state, {}, {})
        if is_broken and what == "destroyed":
            dist.destroy_process_group()
            is_destroyed.set()
        saver.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
