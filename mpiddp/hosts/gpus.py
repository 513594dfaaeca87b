"""The GPUs of a host: as nvidia-smi or rocm-smi describes them, and the variables that choose among them.

torch would know the GPUs too, but a host is asked before anything starts, and to import torch takes seconds.
A number in a variable is a GPU of one host. So the launcher passes its own value to other hosts only if it
hides all GPUs. This module travels to the hosts as source. It needs Python 3.8 and the standard library.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any, NamedTuple

# A host that gets this sentence is refused, because NCCL would not work there either.
NO_ANSWER = (
    "{name}: nvidia-smi (or rocm-smi) does not answer.\n  fix: repair the driver, or run without GPUs: "
    "-x CUDA_VISIBLE_DEVICES="
)
_MOST_BYTES = 16 << 20  # of a tool's output; a kernel's log may have so many
# NVIDIA's driver lists its GPUs, also in a container without nvidia-smi, and the container may use these devices.
_LISTED, _DEVICES = Path("/proc/driver/nvidia/gpus"), Path("/dev")
_END_S = 0.5  # a tool that has closed its output gets this time to end
TIMEOUT_S = 20.0  # without persistence mode nvidia-smi takes about 10 s to wake eight GPUs

# The GPU numbers of a hostfile become these variables: of CUDA (HIP reads it, too), HIP and Level Zero.
# ROCr's would renumber the GPUs before HIP chooses among them.
_BY_NUMBER = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
VISIBLE = (*_BY_NUMBER, "ROCR_VISIBLE_DEVICES")
_ORDER = "CUDA_DEVICE_ORDER"
_HIDES_ALL = ("", "-1")
_WHOLE_NUMBER = re.compile("-?[0-9]+")

_ADDRESS = r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]"
# A driver says "GPU 0000:44:00.0", a newer driver says "GPU2: 0000:44:00.0".
_NAMED_GPU = rf"GPU ?(?:\d+: )?({_ADDRESS})"
# The reasons that slow down a GPU that has work. A limit of power is usual, so it is left out.
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
_SLOWED = {
    0x08: "HW slowdown",
    0x20: "SW thermal slowdown",
    0x40: "HW thermal slowdown",
    0x80: "HW power brake slowdown",
}


class Holder(NamedTuple):
    """A process that holds memory of a GPU."""

    pid: int
    memory: int | None  # bytes
    user: str  # "" if this host does not show the process, for example in another container
    command: str
    began_at: float  # in seconds since the epoch, 0 if it is not known
    is_left: bool  # whether a job of mpiddp has left it, which has no agent on this host any more


class Xid(NamedTuple):
    """An error of a GPU in the kernel's log."""

    number: int
    ago_s: float
    is_before_driver: bool  # the driver has been loaded since


class Gpu(NamedTuple):
    """A GPU as its tool describes it. "" and None stand for a fact that the tool does not tell."""

    name: str = ""
    address: str = ""  # its PCI address in sysfs's form: "0000:18:00.0"
    uuid: str = ""
    use: int | None = None  # percent of the time in which it has computed
    memory: int | None = None  # bytes in use
    memory_total: int | None = None
    temperature: int | None = None  # °C
    slowed: str = ""  # the reasons that slow it down
    errors: int | None = None  # memory errors since the driver's start that ECC did not correct
    driver: str = ""
    recovery: str = ""  # the driver asks for it, for example "Reset"; "None" or "No" for nothing
    is_lost: bool = False  # whether the driver does not reach it
    # Only `read_health` sets these.
    holders: Sequence[Holder] = ()
    xids: Sequence[Xid] = ()

    @classmethod
    def of_json(cls, *row: Any) -> Gpu:
        """A GPU that a host has sent as JSON."""
        gpu = cls(*row)
        holders = [Holder(*holder) for holder in gpu.holders]
        return gpu._replace(holders=holders, xids=[Xid(*xid) for xid in gpu.xids])


# The fields of a GPU that change while it works.
CHANGING = ("use", "memory", "memory_total", "temperature", "slowed")

# `nvidia-smi --help-query-gpu` explains these fields.
_FIELDS = (
    *("name", "pci.bus_id", "uuid", "utilization.gpu", "memory.used", "memory.total"),
    *("temperature.gpu", "clocks_event_reasons.active", "ecc.errors.uncorrected.volatile.total"),
    *("driver_version", "gpu_recovery_action"),
)
# The names of fields in older drivers: before 535, and before 565.
_OLDER = {
    "clocks_event_reasons.active": "clocks_throttle_reasons.active",
    "gpu_recovery_action": "reset_status.reset_required",
}
_UNKNOWN = re.compile(r'Field "([\w.]+)" is not a valid field to query')
# By PATH, the fields that the nvidia-smi there knows, with their names.
_names: dict[str | None, dict[str, str]] = {}


def _of_nvidia(path: str | None, timeout_s: float) -> list[Gpu] | None:
    """The GPUs that nvidia-smi prints, a line for each, and the lost ones, which its errors name.

    A query fails as a whole if one field is unknown. So it is tried again with the field's older name, and
    then without the field.
    """
    names = _names.setdefault(path, {field: field for field in _FIELDS})
    while True:
        query = (f"--query-gpu={','.join(names.values())}", "--format=csv,noheader,nounits")
        text = tool_output("nvidia-smi", query, path, timeout_s, stderr=STDOUT)
        if text is None:
            return None
        unknown = _UNKNOWN.search(text)
        field = next((field for field in names if unknown and names[field] == unknown[1]), None)
        if field is None:
            break
        if names[field] == _OLDER.get(field, field):
            del names[field]
        else:
            names[field] = _OLDER[field]
    rows = [line.split(", ") for line in text.splitlines()]
    gpus = [_of_row(dict(zip(names, row))) for row in rows if len(row) == len(names)]
    lost = re.findall(rf"Unable to determine the device handle for {_NAMED_GPU}", text)
    return gpus + [Gpu("NVIDIA GPU", _of_sysfs(address), is_lost=True) for address in lost]


def _of_row(row: Mapping[str, str]) -> Gpu:
    """A GPU by the fields of nvidia-smi that it knows."""
    name, address, uuid, *measured, reasons, errors, driver, recovery = (
        row.get(field, "") for field in _FIELDS
    )
    use, memory, total, temperature = measured
    bits = int(reasons, 16) if re.fullmatch("0x[0-9A-Fa-f]{1,16}", reasons) else 0
    slowed = ", ".join(why for bit, why in _SLOWED.items() if bits & bit)
    used, size = (_whole(text, 1 << 20) for text in (memory, total))  # MiB
    numbers = (_whole(use), used, size, _whole(temperature))
    return Gpu(name, _of_sysfs(address), uuid, *numbers, slowed, _whole(errors), driver, recovery)


def _of_rocm(path: str | None, timeout_s: float) -> list[Gpu] | None:
    """The GPUs in rocm-smi's JSON: {"card0": {"GPU use (%)": "0", …}, "system": {…}}."""
    # ROCm's documentation has the options of rocm-smi.
    asked = ("--showproductname", "--showbus", "--showuse", "--showmeminfo", "vram", "--showtemp")
    text = tool_output("rocm-smi", (*asked, "--json"), path, timeout_s, stderr=STDOUT)
    if text is None:
        return None
    try:  # warnings may stand around the JSON
        cards, _ = json.JSONDecoder().raw_decode(text, max(0, text.find("{")))
    except ValueError:
        return []
    gpus = []
    for card, facts in cards.items():
        if card.startswith("card"):
            facts = {name.lower(): value for name, value in facts.items()}
            heat = (facts.get(f"temperature (sensor {at}) (c)", "") for at in ("edge", "junction"))
            temperature = next((value for value in map(_whole, heat) if value is not None), None)
            total, used = (facts.get(f"vram total {kind}memory (b)") for kind in ("", "used "))
            address = _of_sysfs(facts.get("pci bus", ""))
            numbers = (_whole(facts.get("gpu use (%)")), _whole(used), _whole(total), temperature)
            gpus.append(Gpu(facts.get("card series", "AMD GPU"), address, "", *numbers))
    return gpus


def read_gpus(path: str | None = None, *, timeout_s: float = TIMEOUT_S) -> list[Gpu] | None:
    """The GPUs of this host in the order of their numbers; None if a tool does not answer."""
    for read in (_of_nvidia, _of_rocm):
        gpus = read(path, timeout_s)
        if gpus is None or gpus:
            return gpus
    count = len([*_DEVICES.glob("nvidia[0-9]*")])
    return [Gpu("NVIDIA GPU", path.name) for path in sorted(_LISTED.glob("*"))[:count]]


def chosen_gpus(
    gpus: Sequence[Gpu], env: Mapping[str, str], numbers: Sequence[int | str] | None = None
) -> list[int | None]:
    """The numbers of the GPUs that a host's ranks see, in their order.

    If no variable hides all, the ranks see the GPUs of `numbers`, or else those that a variable names by a
    number or the beginning of a UUID. Its list ends before the first word that names no GPU, such as -1. A
    part of a GPU (MIG-…) becomes None.
    """
    if hides_all_gpus(env):
        return []
    if numbers is not None:
        return [number if isinstance(number, int) else None for number in numbers]
    named = next((env[name] for name in VISIBLE if name in env), None)
    if named is None:
        return [*range(len(gpus))]
    chosen: list[int | None] = []
    for word in (word.strip() for word in named.split(",") if word):
        by_uuid = (at for at, gpu in enumerate(gpus) if gpu.uuid.startswith(word))
        is_number = word.isdigit() and len(word) < 5 and int(word) < len(gpus)
        number = int(word) if is_number else next(by_uuid, None)
        has_uuids = any(gpu.uuid for gpu in gpus)  # rocm-smi tells none
        if number is None and (_WHOLE_NUMBER.fullmatch(word) or (has_uuids and not is_part(word))):
            break
        chosen.append(number)
    return chosen


def is_part(name: str) -> bool:
    """Whether this names a part of a GPU. CUDA shows a process the first part of a list alone."""
    return name.startswith("MIG-")


def _of_sysfs(address: str) -> str:
    """A PCI address as sysfs has it: its domain has four digits, as long as they are enough."""
    if not re.fullmatch(_ADDRESS, address):
        return ""
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _whole(text: object, unit: int = 1) -> int | None:
    """The number in a tool's text, such as "41.0"; None for "[N/A]"."""
    match = re.fullmatch(r"(\d{1,18})(\.\d*)?", str(text))
    return int(match[1]) * unit if match else None


def tool_output(
    program: str,
    arguments: Sequence[str],
    path: str | None,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    stderr: int = DEVNULL,
) -> str | None:
    """The output of a program, or its beginning; "" if it does not run here, None if it does not end in time.

    This returns even if the program hangs in a driver, also at its end, or prints for ever.
    """
    from shutil import which  # takes 2 ms of each rank, and most look at no GPU

    file = which(program, path=path)
    if file is None:
        return ""
    try:
        tool = Popen(
            [file, *arguments],
            env=env,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    except OSError as error:  # an empty file, or a program for another processor
        if error.errno == errno.EAGAIN:  # this user gets no more processes
            raise
        return ""
    assert tool.stdout is not None
    text, chunk, poll = b"", b"?", select.poll()  # select() cannot have more than 1,024 open files
    deadline = time.monotonic() + timeout_s
    try:
        with tool.stdout as stdout:
            poll.register(stdout, select.POLLIN)
            while chunk and len(text) < _MOST_BYTES:
                if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                    return None
                chunk = os.read(stdout.fileno(), _MOST_BYTES)
                text += chunk
        if not chunk:
            tool.wait(max(_END_S, deadline - time.monotonic()))
    except TimeoutExpired:
        return None
    finally:
        if tool.returncode is None:
            # The tool may be a script with children. Do not wait: a driver may hold even a killed process.
            with suppress(OSError):
                os.killpg(tool.pid, signal.SIGKILL)
    return text.decode(errors="replace")


def hides_all_gpus(env: Mapping[str, str]) -> bool:
    """Whether a variable of `env` hides every GPU."""
    return any(env.get(name) in _HIDES_ALL for name in VISIBLE)


def is_of_one_host(name: str, value: str) -> bool:
    """Whether the variable names GPUs of one host, so that it means nothing on another."""
    return name in VISIBLE and value not in _HIDES_ALL


def for_numbers(gpus: Sequence[int | str], env: Mapping[str, str]) -> dict[str, str]:
    """The variables that choose these GPUs, numbered as nvidia-smi does unless `env` says otherwise."""
    numbers = ",".join(map(str, gpus))
    if is_part(numbers):
        return {_BY_NUMBER[0]: numbers}
    order = {} if _ORDER in env else {_ORDER: "PCI_BUS_ID"}
    return {**dict.fromkeys(_BY_NUMBER, numbers), **order}
