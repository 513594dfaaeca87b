"""torch's flight recorder: NCCL's last operations, written to the run's folder if a collective times out.

To read the files: python -m torch.distributed.flight_recorder.fr_trace --prefix nccl_rank_ LOGS
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# The current name, and the one from before torch 2.9, which torch still accepts.
_LENGTH = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DUMPS = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)


def settings(logs: Path, env: Mapping[str, str]) -> dict[str, str]:
    """The environment variables to set before the process group starts, except those the user has set.

    torch appends the rank to the file's name.
    """
    defaults = {_LENGTH: "2000", _DUMPS: "1", _FILE: str(logs.absolute() / "nccl_rank_")}
    return {names[0]: value for names, value in defaults.items() if not env.keys() & {*names}}
