"""What nvidia-smi says of the GPUs that the ranks on this machine use."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from mpiddp.hosts.names import is_this_host

_QUERIES = ("--query-compute-apps=pid,gpu_uuid,used_gpu_memory", "--query-gpu=uuid,utilization.gpu")
_ANSWER_S = 10.0


def gpus_of(ranks: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """ "87% 12.3 GB" for each rank of this machine that uses a GPU: how busy it is, and the rank's memory."""
    if shutil.which("nvidia-smi") is None:
        return {}
    pids = {rank["pid"]: rank["rank"] for rank in ranks if is_this_host(rank["host"])}
    processes, gpus = map(_table, _QUERIES)
    busy = {row[0]: row[1] for row in gpus if len(row) == 2}
    found = {}
    for pid, uuid, megabytes in (row for row in processes if len(row) == 3):
        if pid.isdigit() and int(pid) in pids:
            memory = f" {int(megabytes) / 1024:.1f} GB" if megabytes.isdigit() else ""
            found[pids[int(pid)]] = f"{busy.get(uuid, '?')}%{memory}"
    return found


def _table(query: str) -> list[list[str]]:
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
