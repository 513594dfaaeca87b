"""Stages of the process group, of failures, and of GPU counting."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from benchmarks.gpu.jobs import (
    MODULE,
    PIDS,
    RANKS,
    Ended,
    launch,
    make_images,
    mpiddp,
    mpirun,
    records,
    require_equal_checkpoints,
    run,
    train,
    wait_for_step,
)
from benchmarks.gpu.stage import Context, Failed
from mpiddp.bench.machine import available_bytes
from mpiddp.hosts.gpus import gpu_names

TINY_MODEL = ["--arch=resnet20", "--use-syn", "--batch-size=8", "--save-every=100000"]
_QUERY = "name,memory.total,memory.used,utilization.gpu,temperature.gpu,power.draw,clocks.sm"


def machine(context: Context) -> None:
    """The GPUs as nvidia-smi and torch name them, NVML's readings, and the precision of fp32."""
    names = gpu_names() or []
    found = run(context, [sys.executable, "-m", f"{MODULE}.facts"]).results[0]
    shared_memory = shutil.disk_usage("/dev/shm")
    context.figure(
        **found,
        nvidia_smi=names,
        cores=os.cpu_count(),
        memory_gib=round(available_bytes() / 2**30, 1),
        shared_memory_gib=round(shared_memory.total / 2**30, 1),
    )
    context.require(
        found["gpus"] == names, f"torch sees {found['gpus']}, and nvidia-smi lists {names}"
    )
    if not names:
        return
    readings = run(context, ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader"])
    context.figure(nvml=readings.output.strip().splitlines())


def tf32(context: Context) -> None:
    """Convolutions in fp32 use TF32 and matrix products do not, as docs/evidence/performance.md says."""
    found = run(context, [sys.executable, "-m", f"{MODULE}.facts"]).results[0]
    context.figure(conv_error=found["conv_error"], matmul_error=found["matmul_error"])
    context.require(found["matmul_error"] < 5e-6, "matrix products in fp32 use TF32")
    if not context.is_tiny:
        context.require(found["conv_error"] > 5e-5, "convolutions in fp32 do not use TF32")


def group(context: Context) -> None:
    """The process group forms on the rank's GPU with device_id, ends, and forms again."""
    ended = run(context, launch(1, str(RANKS / "group.py")))
    found = ended.results[0]
    context.figure(**found)
    first, second = (ranks[0] for ranks in found["groups"])
    expected = ("gloo", "cpu", None) if context.is_tiny else ("nccl", "cuda:0", 0)
    for each in (first, second):
        seen = (each["backend"], each["device"], each["current_device"])
        context.require(seen == expected, f"the group is {seen} instead of {expected}")
        if not context.is_tiny:
            context.require(each["bound_device"] == "cuda:0", f"bound to {each['bound_device']}")
        context.require(each["sum"] == 1, f"the sum is {each['sum']}")
    context.require(found["destroyed"], "the group still exists at the end")
    # With one GPU, that device would be current without the call as well.
    chosen = [] if context.is_tiny else ["set_device_index"]
    expected_calls = [*chosen, "init_process_group"] * 2
    context.require(found["calls"] == expected_calls, f"the calls are {found['calls']}")


def two_ranks(context: Context) -> None:
    """Two ranks of a plain mpirun on one GPU, each with an NCCL_HOSTID of its own."""
    env = {"NCCL_DEBUG": "WARN"}
    ended = run(context, mpirun(2, "-m", f"{MODULE}.two_ranks"), codes=None, env=env)
    context.figure(**(ended.results[0] if ended.results else {"refusal": _tail(ended)}))
    figures = context.record.figures
    refusal = figures.get("refusal")
    context.require(refusal is None, f"NCCL refuses two ranks on one GPU: {refusal}")
    context.require(ended.code == 0, f"exit code {ended.code}: {_tail(ended)}")
    context.require(figures["sum"] == 3, f"the sum is {figures['sum']} instead of 3")
    context.require(
        figures["gradient"] == 0.5, f"the mean gradient is {figures['gradient']} instead of 0.5"
    )


def _tail(ended: Ended) -> list[str]:
    return [line for line in ended.output.splitlines() if line.strip()][-3:]


def failing_rank(context: Context) -> None:
    """A rank that raises or dies beside one that is in a collective: the job ends at once, with its name."""
    _fail(context, 2)


def failing_alone(context: Context) -> None:
    """The same with one rank: it leaves without destroying NCCL's group, and does not hang."""
    _fail(context, 1)


def _fail(context: Context, ranks: int) -> None:
    last = f"rank {ranks - 1}"
    for how in ("raises", "dies"):
        command = launch(ranks, str(RANKS / "failing.py"), how)
        ended = run(context, command, codes=(1,))
        at = re.search(r"planned failure at ([\d.]+)", ended.output)
        if at is None:
            raise Failed(f"the job ended before {last} failed: {_tail(ended)}")
        seconds = round(time.time() - float(at[1]), 2)
        context.figure(**{f"{how}_to_end_s": seconds})
        context.require(last in ended.output, f"no line names {last}")
        context.require(seconds < 30, f"the job ended {seconds:.0f} s after the failure")


def timeout(context: Context) -> None:
    """A rank stops within a training: the others' collective times out, and leaves NCCL's last actions."""
    out, pids = context.folder / "run", context.folder / "pids"
    pids.mkdir()
    limit_s = 600  # of a collective
    many = ["--epochs=1", "--steps-per-epoch=100000", "--log-every=1"]
    stopped_at: list[float] = []

    def stop_rank_1(process: subprocess.Popen[bytes]) -> None:
        wait_for_step(process, out, 5)
        if process.poll() is not None:
            raise Failed("the job ended before a rank was stopped")
        os.kill(int((pids / "1").read_text()), signal.SIGSTOP)
        stopped_at.append(time.time())

    command = train(2, out, *TINY_MODEL, *many)
    env = {PIDS: str(pids)}
    ended = run(context, command, codes=(1,), env=env, while_running=stop_rank_1)
    context.figure(limit_s=limit_s, stop_to_end_s=round(time.time() - stopped_at[0], 1))
    context.figure(last_lines=_tail(ended))
    if context.is_tiny:
        return
    dumps = sorted((out / "logs").glob("nccl_rank_*"))
    context.figure(dumps={path.name: path.stat().st_size for path in dumps})
    context.require(bool(dumps), "the flight recorder has written no file")
    reader = ["-m", "torch.distributed.flight_recorder.fr_trace", "--prefix", "nccl_rank_"]
    trace = run(context, [sys.executable, *reader, str(out / "logs")], codes=None)
    context.figure(fr_trace_code=trace.code, fr_trace=trace.output[-2000:])


def counting(context: Context) -> None:
    """The number of ranks follows the GPUs that are visible."""
    script = str(RANKS / "group.py")
    expected = context.size(1, 2)
    figures: dict[str, Any] = {}
    figures["two slots"] = _world_size(context, launch_slots(2, script))
    figures["two slots, no GPU visible"] = _world_size(
        context, launch_slots(2, script), CUDA_VISIBLE_DEVICES=""
    )
    context.figure(**figures)
    context.require(
        figures["two slots"]["world_size"] == expected,
        f"{figures['two slots']['world_size']} ranks instead of {expected} in two slots",
    )
    hidden = figures["two slots, no GPU visible"]
    context.require(
        (hidden["world_size"], hidden["backend"]) == (2, "gloo"),
        f"without a visible GPU: {hidden['world_size']} ranks over {hidden['backend']}",
    )
    refused = run(
        context, launch_slots(2, "-m", "mpiddp", "train", "--backend=nccl", *TINY_MODEL), codes=(2,)
    )
    context.figure(refusal=_tail(refused)[-1:])
    if context.is_tiny:
        return
    listed = run(context, ["nvidia-smi", "-L"]).output
    uuid = re.search(r"UUID: (GPU-[0-9a-f-]+)", listed)
    if uuid is None:
        raise Failed(f"nvidia-smi -L lists no UUID: {listed[:200]}")
    by_uuid = _world_size(context, launch_slots(2, script), CUDA_VISIBLE_DEVICES=uuid[1])
    default = _world_size(context, mpiddp("launch", script))
    context.figure(**{"one UUID visible": by_uuid, "no hosts given": default})
    for name, found in (("one UUID visible", by_uuid), ("no hosts given", default)):
        seen = (found["world_size"], found["backend"], found["device"])
        context.require(seen == (1, "nccl", "cuda:0"), f"{name}: {seen}")


def launch_slots(slots: int, *job: str) -> list[str]:
    """A job on slots that may be more than the GPUs."""
    return mpiddp("launch", "-H", f"localhost:{slots}", *job)


def _world_size(context: Context, command: list[str], **env: str) -> dict[str, Any]:
    found: dict[str, Any] = run(context, command, env=env).results[0]["groups"][0][0]
    return found


def stop(context: Context) -> None:
    """Ctrl-C saves after the same step on all ranks, and the resumed run equals one without a stop."""
    options = [*TINY_MODEL, "--epochs=1", "--steps-per-epoch=100000", "--log-every=1"]
    options.append("--deterministic")
    stopped, straight = context.folder / "stopped", context.folder / "straight"

    def interrupt(process: subprocess.Popen[bytes]) -> None:
        wait_for_step(process, stopped, 5)
        process.send_signal(signal.SIGINT)

    run(context, train(1, stopped, *options), codes=(75,), while_running=interrupt)
    [saved] = [int(path.name[-8:]) for path in (stopped / "checkpoints").glob("step_*")]
    last = saved + 5
    context.figure(stopped_at=saved)
    for out in (stopped, straight):
        run(context, train(1, out, *options, f"--stop-at-step={last}"), codes=(75,))
    require_equal_checkpoints(context, stopped, straight, last)
    losses = [
        [record["train_loss"] for record in records(out) if record["step"] == last]
        for out in (stopped, straight)
    ]
    context.figure(loss=losses[0])
    context.require(losses[0] == losses[1], f"the last losses differ: {losses}")


def prefetch(context: Context) -> None:
    """The batches of the side stream are those of the main stream."""
    folder = make_images(context, 256)
    ended = run(context, [sys.executable, "-m", f"{MODULE}.prefetch", str(folder / "train")])
    found = ended.results[0]
    context.figure(**found)
    for name, counts in found.items():
        context.require(counts["different"] == 0, f"{name}: {counts['different']} batches differ")
