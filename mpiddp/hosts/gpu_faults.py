"""The faults of a host's GPUs, a sentence for each, by the answer of `read_health`.

A fault breaks a job that uses the GPU: the GPU is lost, or has errors of its memory or hardware. A note may
not break it: others hold memory of the GPU, or it is slowed down. The preflight of `mpiddp launch` looks for
them, and an agent before its script begins again (`wrong_here`).
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence

from mpiddp.hosts.gpu_health import read_health
from mpiddp.hosts.gpus import Gpu, Holder, chosen_gpus, hides_all_gpus
from mpiddp.text import counted, duration, escaped, listed, size_text, with_fix

_LEAST = 128 << 20  # bytes; a process that holds less, such as a server of MPS, is not named
_LEAST_SHARE = 0.1  # if unknown processes hold a larger share of a GPU's memory, a note says so
# The driver asks for no recovery: the values of the newer and of the older field of nvidia-smi.
_USABLE = ("None", "No")
# Errors of the hardware, by https://docs.nvidia.com/deploy/xid-errors. Most other Xids are errors of programs.
_XIDS = {
    48: "an uncorrectable memory error",
    64: "a row of its memory could not be replaced",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    95: "an uncontained memory error",
    119: "its GSP does not answer",
    120: "an error of its GSP",
    140: "an unrecovered memory error",
}


def wrong_here(env: Mapping[str, str], *, timeout_s: float = 10.0) -> list[str]:
    """The faults of the GPUs of this host that ranks with these variables see.

    It takes at most `timeout_s` and some seconds more.
    """
    host = socket.gethostname()
    if hides_all_gpus(env):
        return []
    gpus = read_health(env.get("PATH"), timeout_s=timeout_s)
    if gpus is None:
        return [f"{host}: nvidia-smi does not answer in {timeout_s:g} s."]
    return [*faults(host, gpus, chosen_gpus(gpus, env))]


def faults(host: str, gpus: Sequence[Gpu], chosen: Sequence[int | None]) -> Iterator[str]:
    """A sentence for each fault of the chosen GPUs of a host."""
    for number, gpu in _those(gpus, chosen):
        if gpu.is_lost:
            fact = f"{host}: its driver does not reach the GPU at {gpu.address}."
            yield with_fix(fact, "restart the host")
        if gpu.errors:
            errors = counted(gpu.errors, "uncorrected memory error")
            reset = f"nvidia-smi -r -i {number}, on {host}"
            yield with_fix(f"{host}: GPU {number} has {errors} (ECC).", reset)
        for fact in _reported(gpu, is_over=False):
            yield with_fix(f"{host}: GPU {number} {fact}.", "restart the host")


def notes(
    host: str, gpus: Sequence[Gpu], chosen: Sequence[int | None], ssh: str = ""
) -> Iterator[str]:
    """A sentence for each chosen GPU that others use, is slowed, or was reset. `ssh` logs in there."""
    for number, gpu in _those(gpus, chosen):
        for fact in _reported(gpu, is_over=True):
            yield f"{host}: GPU {number} {fact}. Its driver has started since, or calls it usable."
        yield from _memory_held(host, number, gpu, ssh)
        if gpu.slowed:
            heat = "" if gpu.temperature is None else f" at {gpu.temperature} °C"
            yield f"{host}: GPU {number} is slowed down{heat}: {gpu.slowed}."


def in_use(host: str, gpus: Sequence[Gpu], chosen: Sequence[int | None]) -> Iterator[str]:
    """A sentence for each chosen GPU that processes of its host use."""
    for number, gpu in _those(gpus, chosen):
        if holders := [_named(holder) for holder in _large(gpu)]:
            yield f"{host}: GPU {number} is in use: {listed(holders, most=4)}."


def _reported(gpu: Gpu, *, is_over: bool) -> Iterator[str]:
    """The latest error of each kind that the hardware of a GPU has reported.

    An error is over if the driver has been loaded since, or asks for no recovery: the GPU may have been reset.
    """
    latest = {xid.number: xid for xid in sorted(gpu.xids, key=lambda xid: -xid.ago_s)}
    for number in (xid for xid in _XIDS if xid in latest):
        xid = latest[number]
        if is_over is (xid.is_before_driver or gpu.recovery in _USABLE):
            yield f"reported Xid {number} ({_XIDS[number]}) {duration(xid.ago_s)} ago"


def _memory_held(host: str, number: int, gpu: Gpu, ssh: str) -> Iterator[str]:
    """A sentence for the memory of a GPU that processes hold."""
    others = _large(gpu)
    for holder in (holder for holder in others if holder.is_left):
        fact = f"{_named(holder)} of an earlier job still holds {_memory(holder)} of GPU {number}"
        yield with_fix(f"{host}: {fact}.", f"{ssh}{' ' * bool(ssh)}kill -9 {holder.pid}")
    if running := [holder for holder in others if not holder.is_left]:
        named = listed([f"{_named(holder)} holds {_memory(holder)}" for holder in running], most=4)
        yield f"{host}: GPU {number} is in use: {named}."
    sizes = [holder.memory for holder in gpu.holders if holder.user]
    unseen = (gpu.memory or 0) - sum(size or 0 for size in sizes)
    if None not in sizes and unseen > _LEAST_SHARE * (gpu.memory_total or 0):
        by = "processes that are not listed (a desktop's, another container's)"
        yield f"{host}: GPU {number} is in use: {by} hold {size_text(unseen)}."


def _large(gpu: Gpu) -> list[Holder]:
    """The processes of the host that hold much of a GPU."""
    return [
        holder
        for holder in gpu.holders
        if holder.user and (holder.memory is None or holder.memory >= _LEAST)
    ]


def _those(gpus: Sequence[Gpu], chosen: Sequence[int | None]) -> list[tuple[int, Gpu]]:
    return [(at, gpu) for at, gpu in enumerate(gpus) if at in chosen]


def _named(holder: Holder) -> str:
    since = (
        time.strftime(", since %Y-%m-%d %H:%M", time.localtime(holder.began_at))
        if holder.began_at
        else ""
    )
    return escaped(f"pid {holder.pid} of {holder.user} ({holder.command}{since})")


def _memory(holder: Holder) -> str:
    return "some memory" if holder.memory is None else size_text(holder.memory)
