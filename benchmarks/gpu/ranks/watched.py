"""`mpiddp train` alone, watched from torch's optimizer hook: memory, momentum's layout, a profile.

    python -m benchmarks.gpu.ranks.watched --profile 20:30 train --use-syn …

Sends the peak memory of the GPU, the number of parameters whose momentum has another layout, how often a CUDA
graph ran, and with --profile the time of each kind of kernel in the steps after 20 and up to 30, whose peak
memory then counts.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from mpiddp import cli
from mpiddp.bench.result_lines import emit

# The first kind whose word is in a kernel's name, in lower case.
KINDS = {
    "NCCL": ("nccl",),
    "copies and fills": ("memcpy", "memset"),
    "optimizer": ("multi_tensor", "fusedsgd", "fused_sgd"),
    "batch norm": ("batch_norm", "batchnorm", "bn_fw", "bn_bw"),
    "fused by torch.compile": ("triton",),
    "pooling": ("pool",),
    "layout changes": ("nchwtonhwc", "nhwctonchw", "transpose"),
    "convolutions and matrix products": (
        *(
            "conv",
            "cudnn",
            "cutlass",
            "gemm",
            "xmma",
            "wgrad",
            "dgrad",
            "implicit",
            "nvjet",
            "sm90",
        ),
        "cublas",
    ),
    "reductions": ("reduce",),
    "elementwise": ("elementwise", "vectorized", "unrolled"),
}
TOP_KERNELS = 15


class Watch:
    """Counts the optimizer's steps, and profiles those in (start, end]."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.steps = 0
        self.wrong_layouts = 0
        self.graph_replays = 0
        self.peak_of_search_bytes: int | None = None
        self.kernels: dict[str, Any] = {}
        activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
        self._profile = profile(activities=[activity])

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        self.wrong_layouts = sum(
            held["momentum_buffer"].stride() != parameter.stride()
            for parameter, held in optimizer.state.items()
            if held.get("momentum_buffer") is not None
        )
        if self.steps in (self.start, self.end) and self.end:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if self.steps == self.start:
                if torch.cuda.is_available():
                    # The search of the first steps for the fastest kernels takes far more.
                    self.peak_of_search_bytes = torch.cuda.max_memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                self._profile.start()
            else:
                self._profile.stop()
                self.kernels = _summed(self._profile, self.end - self.start)

    def count_replays(self) -> None:
        """Count the replays of CUDA graphs from now on."""
        replay = torch.cuda.CUDAGraph.replay

        def counted(graph: torch.cuda.CUDAGraph) -> None:
            self.graph_replays += 1
            replay(graph)

        torch.cuda.CUDAGraph.replay = counted  # type: ignore[assignment, method-assign]


def _summed(found: Any, steps: int) -> dict[str, Any]:
    """The time of a step by kind of kernel and by kernel, in ms; and the part of the time the GPU works."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        found.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    works = ("kernel", "gpu_memcpy", "gpu_memset") if torch.cuda.is_available() else ("cpu_op",)
    work = [event for event in events if event.get("ph") == "X" and event.get("cat") in works]
    if not work:
        return {"kinds_ms": {}, "top": []}
    kinds: Counter[str] = Counter()
    names: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in work:
        kinds[_kind(event["name"])] += event["dur"]
        names[event["name"]] += event["dur"]
        calls[event["name"]] += 1
    first, last = min(e["ts"] for e in work), max(e["ts"] + e["dur"] for e in work)
    per_step_ms = 1 / (1000 * steps)
    top = [
        {"kernel": name[:120], "ms": us * per_step_ms, "calls": calls[name] / steps}
        for name, us in names.most_common(TOP_KERNELS)
    ]
    return {
        "step_ms": (last - first) * per_step_ms,
        "busy": _covered_us(work) / (last - first),
        "kinds_ms": {kind: us * per_step_ms for kind, us in kinds.most_common()},
        "top": top,
    }


def _kind(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(w in name for w in words)), "other")


def _covered_us(events: list[dict[str, Any]]) -> float:
    """The microseconds in which at least one of the events runs."""
    covered, end = 0.0, 0.0
    for start, duration in sorted((event["ts"], event["dur"]) for event in events):
        covered += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    return covered


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="0:0", metavar="FROM:TO")
    parser.add_argument("verb", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    start, end = map(int, options.profile.split(":"))
    watch = Watch(start, end)
    register_optimizer_step_post_hook(watch)
    watch.count_replays()
    code = cli.main(options.verb)
    found: dict[str, Any] = {
        "steps": watch.steps,
        "wrong_layouts": watch.wrong_layouts,
        "graph_replays": watch.graph_replays,
    }
    if torch.cuda.is_available():
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
        found["peak_of_search_bytes"] = watch.peak_of_search_bytes
    emit({**found, **({"profile": watch.kernels} if watch.kernels else {})})
    return code


if __name__ == "__main__":
    sys.exit(main())
