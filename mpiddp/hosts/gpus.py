"""The GPUs of a host: as their vendor's tool lists them, and the variables that choose among them.

The tools are nvidia-smi, amd-smi and xpu-smi. torch would know the GPUs too, but importing it
takes seconds, and a host is asked before anything starts.

A number in a variable is a GPU of one host. So the value of the launcher's host is not passed to the others;
only a value that hides all GPUs is, because it asks for a job without them.
Standard library only: the launcher sends this file to other hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# For a host whose GPUs do not answer. NCCL would not work there either.
NO_ANSWER = (
    "{name}: nvidia-smi (amd-smi, xpu-smi) does not answer. Repair the driver, or set "
    "CUDA_VISIBLE_DEVICES= to run without GPUs."
)
_MOST_BYTES = 1 << 20  # of a tool's output
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
    """A vendor's program: its arguments, and the pattern of a GPU's name and of its PCI address.

    The GPUs are in the order of their numbers. Sources of AMD's and Intel's: amd-smi's command line in
    ROCm's documentation, and XPU Manager's "discovery -j".
    """

    program: str
    arguments: tuple[str, ...]
    name: str
    address: str
    address_arguments: tuple[str, ...] = ()  # if another call prints it


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
    """The name of each GPU, of AMD's the PCI address; [] without GPUs, None if a tool does not answer.

    `path` has the folders to search for the tools, in PATH's format (default: this process's PATH).
    """
    for tool in TOOLS:
        text = tool_output(tool.program, tool.arguments, path, timeout_s)
        if text is None:
            return None
        if names := re.findall(tool.name, text, re.MULTILINE):
            return names
    return []


def gpu_addresses(path: str | None = None) -> list[str]:
    """The PCI address of each GPU in sysfs's form: "0000:18:00.0". [] if they are not known."""
    for tool in TOOLS:
        arguments = tool.address_arguments or tool.arguments
        text = tool_output(tool.program, arguments, path, TIMEOUT_S) or ""
        if found := re.findall(tool.address, text, re.MULTILINE):
            return [_in_sysfs(address) for address in found]
    return []


def _in_sysfs(address: str) -> str:
    """nvidia-smi gives the domain eight digits; sysfs four, as long as they are enough."""
    domain, _, rest = address.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


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
    command, null = [found, *arguments], subprocess.DEVNULL
    try:
        tool = subprocess.Popen(command, env=env, stdin=null, stdout=subprocess.PIPE, stderr=null)
    except OSError:
        return None
    assert tool.stdout is not None
    text, has_ended = b"", False
    deadline = time.monotonic() + timeout_s
    with tool.stdout as stdout:
        while not has_ended and len(text) < _MOST_BYTES:
            if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                tool.kill()  # without waiting for its end: a driver holds even a killed process
                return None
            chunk = os.read(stdout.fileno(), _MOST_BYTES)
            text += chunk
            has_ended = not chunk
    if not has_ended:
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


def written(choices: Sequence[Mapping[str, str]]) -> str:
    """MPIDDP_GPUS: the variables of each host, in the order of MPIDDP_PLACEMENT; "" if no host has any."""
    return json.dumps(choices, separators=(",", ":")) if any(choices) else ""


def read(text: str, host: int) -> dict[str, str]:
    """The variables of the host with this number in MPIDDP_GPUS. Raises ValueError for any other text."""
    with contextlib.suppress(LookupError, TypeError, AttributeError, RecursionError):
        choice = dict(json.loads(text)[host].items())
        if {*choice} <= {*VISIBLE, _ORDER} and all(
            isinstance(each, str) for each in choice.values()
        ):
            return choice
    raise ValueError("not a list of each host's variables of GPUs")
