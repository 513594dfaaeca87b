"""The variables that choose the GPUs of a process, and how a launcher hands them to the ranks of each host.

A number in such a variable is a GPU of one host. So the value of the launcher's host is not passed to the
others; only a value that hides all GPUs is, because it asks for a job without them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

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
    """The variables of the host with this number in MPIDDP_GPUS.

    Raises:
        ValueError: any other text.
    """
    try:
        choices = json.loads(text)
        choice = choices[host]
        if {*choice} <= {*VISIBLE, _ORDER} and all(
            isinstance(each, str) for each in choice.values()
        ):
            return dict(choice)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        pass
    raise ValueError("not a list of each host's variables of GPUs")
