"""The GPUs of a host: as their vendor's tool lists them, and the variables that choose among them.

The tools are nvidia-smi, amd-smi and xpu-smi. torch would know the GPUs too, but importing it
takes seconds, and a host is asked before anything starts.

A number in a variable is a GPU of one host. So the value of the launcher's host is not passed to the others;
only a value that hides all GPUs is, because it asks for a job without them.
Standard library only: the launcher sends this file to other hosts.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

# For a host whose GPUs do not answer. NCCL would not work there either.
NO_ANSWER = (
    "{name}: nvidia-smi (amd-smi, xpu-smi) does not answer. Repair the driver, or set "
    "CUDA_VISIBLE_DEVICES= to run without GPUs."
)
_MOST_BYTES = 1 << 20  # of a tool's output
# What NVIDIA's driver lists, also in a container without nvidia-smi, and the GPUs that a container may use.
_LISTED, _DEVICES = Path("/proc/driver/nvidia/gpus"), Path("/dev")
TIMEOUT_S = 20.0  # without persistence mode nvidia-smi takes about 10 s to wake eight GPUs

# CUDA (and HIP, which reads it too), HIP, ROCr, and Level Zero.
VISIBLE = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
# For GPU numbers of a hostfile. ROCr's would renumber the GPUs before HIP chooses among them.
_BY_NUMBER = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_ORDER = "CUDA_DEVICE_ORDER"
_HIDES_ALL = ("", "-1")

_ADDRESS = r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]"


class Tool(NamedTuple):
    """A vendor's program, which lists the GPUs in the order of their numbers."""

    program: str
    arguments: tuple[str, ...]
    name: str  # the pattern of a GPU's
    address: str  # the pattern of its PCI address
    address_arguments: tuple[str, ...] = ()  # if another call prints it


# Sources: nvidia-smi -h, amd-smi's command line in ROCm's documentation, XPU Manager's "discovery -j".
TOOLS = (
    Tool(
        "nvidia-smi",
        ("-L",),
        r"^GPU \d+: (.*?)(?: \(UUID: .*\))?$",  # GPU 0: NVIDIA H200 (UUID: GPU-…)
        rf"^({_ADDRESS})$",
        ("--query-gpu=pci.bus_id", "--format=csv,noheader"),
    ),
    Tool("amd-smi", ("list", "--json"), rf'"bdf": *"({_ADDRESS})"', rf'"bdf": *"({_ADDRESS})"'),
    Tool(
        "xpu-smi",
        ("discovery", "-j"),
        r'"device_name": *"([^"]*)"',
        rf'"pci_bdf_address": *"({_ADDRESS})"',
    ),
)


def gpu_names(path: str | None = None, *, timeout_s: float = TIMEOUT_S) -> list[str] | None:
    """The name of each GPU, of AMD's the PCI address; [] without GPUs, None if a tool does not answer."""
    for tool in TOOLS:
        text = tool_output(tool.program, tool.arguments, path, timeout_s)
        if text is None:
            return None
        if names := re.findall(tool.name, text, re.MULTILINE):
            return names
    return ["NVIDIA GPU"] * len(_listed_by_driver())


def _listed_by_driver() -> list[str]:
    """The PCI addresses of NVIDIA's GPUs, in the order of nvidia-smi's numbers."""
    return sorted(each.name for each in _LISTED.glob("*"))[: len([*_DEVICES.glob("nvidia[0-9]*")])]


def gpu_addresses(path: str | None = None) -> list[str]:
    """The PCI address of each GPU in sysfs's form: "0000:18:00.0". [] if they are not known."""
    for tool in TOOLS:
        arguments = tool.address_arguments or tool.arguments
        text = tool_output(tool.program, arguments, path, TIMEOUT_S) or ""
        if found := re.findall(tool.address, text, re.MULTILINE):
            # nvidia-smi gives the domain eight digits; sysfs four, as long as they are enough.
            parts = [address.lower().partition(":") for address in found]
            return [f"{int(domain, 16):04x}:{rest}" for domain, _, rest in parts]
    return _listed_by_driver()


def tool_output(
    program: str,
    arguments: tuple[str, ...],
    path: str | None,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
) -> str | None:
    """The program's output, or its beginning; "" without the program, None without an answer.

    Whatever the program is, it ends: it may hang in a driver, or print for ever.
    """
    found = shutil.which(program, path=path)
    if found is None:
        return ""
    null = subprocess.DEVNULL
    try:
        tool = subprocess.Popen(
            [found, *arguments], env=env, stdin=null, stdout=subprocess.PIPE, stderr=null
        )
    except OSError:
        return None
    assert tool.stdout is not None
    text, chunk = b"", b"?"
    deadline = time.monotonic() + timeout_s
    with tool.stdout as stdout:
        while chunk and len(text) < _MOST_BYTES:
            if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                tool.kill()  # without waiting for its end: a driver holds even a killed process
                return None
            chunk = os.read(stdout.fileno(), _MOST_BYTES)
            text += chunk
    if chunk:
        tool.kill()
    tool.wait()
    return text.decode(errors="replace")


def hides_all_gpus(env: Mapping[str, str]) -> bool:
    """Whether a variable of `env` hides every GPU."""
    return any(env.get(name) in _HIDES_ALL for name in VISIBLE)


def is_of_one_host(name: str, value: str) -> bool:
    """Whether the variable names GPUs of one host, so that it means nothing on another."""
    return name in VISIBLE and value not in _HIDES_ALL


def for_numbers(gpus: Sequence[int], env: Mapping[str, str]) -> dict[str, str]:
    """The variables that choose these GPUs, numbered as nvidia-smi does unless `env` says otherwise."""
    numbers = ",".join(map(str, gpus))
    order = {} if _ORDER in env else {_ORDER: "PCI_BUS_ID"}
    return {**dict.fromkeys(_BY_NUMBER, numbers), **order}
