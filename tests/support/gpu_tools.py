"""Stand-ins of the vendors' GPU tools, which print what their documentation shows."""

from __future__ import annotations

import os
from pathlib import Path

# Sources: NVIDIA's MIG User Guide for nvidia-smi -L, "nvidia-smi --help-query-gpu", ROCm's documentation of
# amd-smi and rocm-smi, XPU Manager's user guide.
NVIDIA = """
case "$1" in
-L)
  echo "GPU 0: NVIDIA H200 (UUID: GPU-18ac)"
  echo "  MIG 1g.18gb     Device  0: (UUID: MIG-aa01)"
  echo "  MIG 1g.18gb     Device  1: (UUID: MIG-aa02)"
  echo "GPU 1: NVIDIA H200 (UUID: GPU-19ac)"
  echo "  MIG 1g.18gb     Device  0: (UUID: MIG-bb01)" ;;
--query-gpu=uuid,pci.bus_id)
  echo "GPU-18ac, 00000000:18:00.0"; echo "GPU-19ac, 00000000:9A:00.0" ;;
*) echo 00000000:18:00.0; echo 00000000:9A:00.0 ;;
esac
"""


def tool(folder: Path, name: str, text: str) -> str:
    """A stub of this tool. Returns a PATH that has it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.defpath}"
