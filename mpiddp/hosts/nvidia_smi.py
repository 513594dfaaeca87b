"""The GPUs of this host, as nvidia-smi lists them.

Standard library only: the launcher sends this file to other hosts.
"""

from __future__ import annotations

import re
import shutil
import subprocess

TIMEOUT_S = 20.0  # without persistence mode it takes about 10 s to wake eight GPUs


def gpu_names(path: str | None = None, *, timeout_s: float = TIMEOUT_S) -> list[str] | None:
    """The name of each GPU; [] without nvidia-smi, None if nvidia-smi does not answer.

    Args:
        path: the folders to search for nvidia-smi, in PATH's format (default: this process's PATH).
    """
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, "-L"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    # GPU 0: NVIDIA H200 (UUID: GPU-…)
    return re.findall(r"^GPU \d+: (.*?)(?: \(UUID: .*\))?$", done.stdout, re.MULTILINE)
