"""The verbs of the command line as a table. Each verb's module is loaded only when somebody calls it."""

from __future__ import annotations

from typing import NamedTuple


class Verb(NamedTuple):
    """`module` has main(argv) -> int. `is_rank`: every rank of a job calls the verb, and joins by itself.

    `options` is the module that checks a rank verb's options before a job starts, by
    check_options(argv) -> "nccl", "gloo" or "auto": the backend, where auto is nccl on GPUs.
    """

    module: str
    purpose: str
    is_rank: bool = False
    options: str | None = None


VERBS = {
    "launch": Verb(
        "mpiddp.launch.main", "start a script on every slot of a hostfile with one mpirun"
    ),
    "run": Verb(
        "mpiddp.runtime.run_script",
        "run an env:// script as this rank, under mpirun, srun or torchrun",
        is_rank=True,
    ),
    "train": Verb(
        "mpiddp.train.main",
        "train a ResNet as this rank, or alone",
        is_rank=True,
        options="mpiddp.train.config",
    ),
    "hosts": Verb("mpiddp.hosts.main", "check, convert and compare hostfiles"),
    "checkpoints": Verb("mpiddp.checkpoints.main", "list, verify and prune checkpoints"),
    "bench": Verb("mpiddp.bench.main", "measure scaling, all-reduce, start-up, the step, the data"),
    "bench-rank": Verb(
        "mpiddp.bench.ranks.main", "one rank of a benchmark, which bench starts", is_rank=True
    ),
}
