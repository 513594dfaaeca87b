"""What nvidia-smi says of the GPUs that the ranks on this machine use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from mpiddp.hosts.gpus import answer
from mpiddp.hosts.names import is_this_host

_QUERIES = ("--query-compute-apps=pid,gpu_uuid,used_gpu_memory", "--query-gpu=uuid,utilization.gpu")
_ANSWER_S = 10.0


def gpus_of(ranks: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """ "87% 12.3 GB" for each rank of this machine that uses a GPU: how busy it is, and the rank's memory."""
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
    arguments = (query, "--format=csv,noheader,nounits")
    text = answer("nvidia-smi", arguments, os.environ.get("PATH"), _ANSWER_S) or ""
    return [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
