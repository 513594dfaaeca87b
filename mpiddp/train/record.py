"""What a run leaves beside its checkpoints: its settings, each rank's log, a record of each start.

RUN/starts/start_0001.json is that of the first start, start_0002.json that of the first restart or resume:
the command, the versions of the packages, the commit. Neither the environment nor a diff is stored, so that
no secret can leak from there.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch

import mpiddp

_GIT_S = 10.0


def save_json(path: Path, values: Mapping[str, Any]) -> None:
    """Replace the file, or on an error leave the existing one. NaN and infinities become null."""
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(finite, indent=1) + "\n")
    part.replace(path)


@contextlib.contextmanager
def rank_log(path: Path, world: mpiddp.World) -> Iterator[None]:
    """Write logs/rank_00003.log: the rank's identity, and the traceback if the body fails."""

    def write(text: str) -> None:
        with contextlib.suppress(OSError), path.open("a", errors="backslashreplace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S%z')} {text}\n")

    who = f"rank {world.rank} of {world.world_size}, local rank {world.local_rank}"
    where = f"node {world.node_rank}, host {world.hostname}, pid {os.getpid()}"
    versions = f"python {platform.python_version()}, torch {torch.__version__}"
    write(f"started: {who}, {where}, {versions}, by {world.launcher.name}")
    try:
        yield
    except BaseException:
        write(f"failed\n{traceback.format_exc()}")
        raise
    write("done")


def start_record(run: Path, world: mpiddp.World, hosts: list[str], started: str) -> None:
    """Begin to write the record of this start, beside the training: git may be slow. For rank 0 alone."""
    facts: dict[str, Any] = {
        "started": started,  # local time, 20261122-070847
        "command": shlex.join([sys.executable, *sys.orig_argv[1:]]),
        "folder": str(Path.cwd()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "started_by": world.launcher.name,
        "hosts_of_ranks": hosts,
    }

    def write() -> None:
        facts["packages"] = {str(each.metadata["Name"]): each.version for each in distributions()}
        facts["git"] = git_state(Path.cwd())
        with contextlib.suppress(OSError):  # the training matters more than its record
            (run / "starts").mkdir(exist_ok=True)
            number = 1 + len(list((run / "starts").glob("start_*.json")))
            save_json(run / "starts" / f"start_{number:04d}.json", facts)

    threading.Thread(target=write).start()


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of a folder, and whether files differ from it; None outside of a repository."""
    options = ("--always", "--abbrev=40", "--exclude=*", "--dirty=+")
    command = ["git", "--no-optional-locks", "describe", *options]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_GIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    commit = done.stdout.strip()
    return {"commit": commit.rstrip("+"), "dirty": commit.endswith("+")} if commit else None
