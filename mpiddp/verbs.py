"""The verbs of the command line as tables. Each verb's module is loaded only when somebody calls it."""

from __future__ import annotations

# verb: (module with main(argv) -> int, what it is for)
VERBS = {
    "launch": ("mpiddp.launch.main", "start a script on every slot of a hostfile with one mpirun"),
    "run": (
        "mpiddp.runtime.run_script",
        "run an env:// script as this rank, under mpirun, srun or torchrun",
    ),
    "train": ("mpiddp.train.main", "train a ResNet as this rank, or alone"),
    "hosts": ("mpiddp.hosts.main", "check, convert and compare hostfiles"),
    "checkpoints": ("mpiddp.checkpoints.main", "list, verify and prune checkpoints"),
    "bench": ("mpiddp.bench.main", "measure scaling, all-reduce, start-up, the step, the data"),
    "bench-rank": ("mpiddp.bench.ranks.main", "one rank of a benchmark, which bench starts"),
}

# The verbs that every rank of a job calls. They join the job by themselves.
RANK_VERBS = ("run", "train", "bench-rank")

# rank verb: the module that checks its options before a job starts, by check_options(argv). That returns
# the backend which the options ask for: "nccl", "gloo", or "auto" for nccl on GPUs.
OPTION_CHECKS = {"train": "mpiddp.train.config"}
