"""The machine on which a figure was measured."""

from __future__ import annotations

import os
import platform
import re
import socket
from pathlib import Path
from typing import Any

from mpiddp.hosts.facts import package_version
from mpiddp.hosts.gpus import read_gpus


def machine() -> dict[str, Any]:
    """Describe this host, using only the standard library."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    return {
        "host": socket.gethostname(),
        "cpu": model[1] if model else platform.machine(),  # ARM has no such line
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 1024**3, 1),
        "gpus": [gpu.name for gpu in read_gpus() or ()],
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "mpi4py": package_version("mpi4py"),
    }
