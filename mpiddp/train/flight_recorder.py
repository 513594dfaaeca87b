"""What NCCL did last, kept in the run's folder when a collective times out: torch's flight recorder.

To read the files: python -m torch.distributed.flight_recorder.fr_trace --prefix nccl_rank_ LOGS
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

# The name that torch has now, and the one it had before 2.9 and still knows.
_LENGTH = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_FILE = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_DUMPS = ("TORCH_NCCL_DUMP_ON_TIMEOUT",)


def settings(logs: Path, env: Mapping[str, str]) -> dict[str, str]:
    """The environment variables to set before the process group is formed, but what the user has set.

    torch appends the rank to the file's name.
    """
    wanted = {_LENGTH: "2000", _DUMPS: "1", _FILE: str(logs.absolute() / "nccl_rank_")}
    return {names[0]: value for names, value in wanted.items() if not env.keys() & {*names}}
