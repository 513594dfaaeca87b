"""The stages in their groups, the most valuable first: a group ends with the time of its command.

The stages of a group of correctness may run at once, because none of them measures a speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu import correct, exact, speed
from benchmarks.gpu.stage import Stage


@dataclass(frozen=True)
class Group:
    stages: tuple[Stage, ...]
    at_once: int = 1


GROUPS = {
    "correct": Group(
        (
            Stage("machine", correct.machine, 60, ("GPU names and NVML readings",)),
            Stage(
                "group",
                correct.group,
                90,
                (
                    "NCCL init with device_id",
                    "set_device before init",
                    "destroy of the group, and a second one",
                ),
            ),
            Stage("failing-alone", correct.failing_alone, 90, ("a failing rank alone under NCCL",)),
            Stage("two-ranks", correct.two_ranks, 90, ("two NCCL ranks on one GPU",)),
            Stage(
                "failing-rank",
                correct.failing_rank,
                150,
                ("a failing rank under NCCL, and the abort of the others",),
                needs="two-ranks",
            ),
            Stage(
                "timeout",
                correct.timeout,
                200,
                ("a collective's timeout", "the flight recorder"),
                needs="two-ranks",
            ),
            Stage(
                "resume",
                exact.resume,
                240,
                ("pinned staging of a save", "deterministic mode", "exact resume"),
            ),
            Stage("prefetch", correct.prefetch, 90, ("side-stream prefetch", "pinned batches")),
            Stage("fp16", exact.fp16, 120, ("resume of the fp16 scaler",)),
            Stage("sync-bn", exact.sync_bn, 150, ("SyncBatchNorm",), needs="two-ranks"),
            Stage(
                "two-ranks-resume",
                exact.two_ranks,
                180,
                ("two ranks save and resume over NCCL",),
                needs="two-ranks",
            ),
            Stage("graphs", exact.graphs, 300, ("CUDA graphs, --compile reduce-overhead",)),
            Stage("tf32", correct.tf32, 60, ("TF32",)),
            Stage("layout", exact.layout, 120, ("the optimizer's state in channels_last",)),
            Stage("counting", correct.counting, 150, ("GPU counting and CUDA_VISIBLE_DEVICES",)),
            Stage("stop", correct.stop, 150, ("graceful stop",)),
        ),
        at_once=4,
    ),
    "speed": Group(
        (
            Stage("resnet50", speed.resnet50, 150),
            Stage("profile", speed.profile, 90, ("peak memory",)),
            Stage("compiled", speed.compiled, 240),
        )
    ),
    "training": Group(
        (
            Stage("cifar10", speed.cifar10, 240),
            Stage("resnet152", speed.resnet152, 240),
        )
    ),
    "rest": Group(
        (
            Stage("start", speed.start, 180),
            Stage("step", speed.step, 150),
            Stage("settings", speed.settings, 300),
            Stage("loader", speed.loader, 180),
            Stage("autotuned", speed.autotuned, 300),
        )
    ),
}

STAGES = {stage.name: stage for group in GROUPS.values() for stage in group.stages}
