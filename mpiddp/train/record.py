"""What a run leaves beside its checkpoints: its settings, each rank's log, a record of each start.

RUN/starts/start_0001.json is that of the first start, start_0002.json that of the first restart or resume:
the command, the versions of the packages, the commit. Neither the environment nor a diff is stored, so that
no secret can leak from there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import mpiddp

_GIT_S = 10.0
_HIDDEN = "…"  # in place of the password in user:password@host


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
    log = logging.getLogger("mpiddp.rank")
    log.propagate = False  # keep it off the console
    log.setLevel(logging.INFO)
    handler = logging.FileHandler(path, errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s%(zone)s %(message)s"))
    zone = {"zone": time.strftime("%z")}  # a container may have another one than the reader's host
    # A record that a full disk does not take is lost silently: the saves report it.
    handler.handleError = lambda record: None  # type: ignore[method-assign]
    log.addHandler(handler)
    who = f"rank {world.rank} of {world.world_size}, local rank {world.local_rank}"
    where = f"node {world.node_rank}, host {world.hostname}, pid {os.getpid()}"
    versions = f"python {platform.python_version()}, torch {_version('torch')}"
    log.info(f"started: {who}, {where}, {versions}, by {world.launcher.name}", extra=zone)
    try:
        yield
        log.info("done", extra=zone)
    except BaseException:
        log.exception("failed", extra=zone)
        raise
    finally:
        log.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()


@contextlib.contextmanager
def recorded(run: Path, world: mpiddp.World, hosts: list[str], started: str) -> Iterator[None]:
    """Write the record of this start while the body runs: git may be slow. Call this on rank 0 alone."""
    command = [sys.executable, *sys.orig_argv[1:]]
    facts = {
        "started": started,  # local time, 20261122-070847
        "command": shlex.join(map(without_password, command)),
        "folder": str(Path.cwd()),
        "started_by": world.launcher.name,
        "hosts_of_ranks": hosts,
    }
    writer = threading.Thread(target=_write, args=(run / "starts", facts), daemon=True)
    writer.start()
    yield
    writer.join(2 * _GIT_S)


def without_password(text: str) -> str:
    """The URL without its password. In `user:password@host`, everything before the last @ counts."""
    before, at, host = text.rpartition("@")
    scheme, slashes, login = before.rpartition("://")
    user, colon, _ = login.partition(":")
    return f"{scheme}{slashes}{user}:{_HIDDEN}@{host}" if at and colon else text


def _write(folder: Path, facts: dict[str, Any]) -> None:
    packages = {}
    for each in distributions():
        with contextlib.suppress(Exception):  # METADATA that is no text, for example
            packages[each.metadata["Name"]] = each.version
    versions = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": dict(sorted((name, version) for name, version in packages.items() if name)),
    }
    with contextlib.suppress(OSError):  # the training matters more than its record
        folder.mkdir(exist_ok=True)
        file = folder / f"start_{1 + len(list(folder.glob('start_*.json'))):04d}.json"
        save_json(file, {**facts, **versions, "git": git_state(Path.cwd())})


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of a folder, and whether files differ from it; None outside of a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None or commit.returncode:
        return None
    differs = _git(folder, "diff", "--quiet", "HEAD")
    is_dirty = differs is not None and differs.returncode == 1
    return {"commit": commit.stdout.strip(), "dirty": is_dirty}


def _git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    command = ["git", "--no-optional-locks", *arguments]
    try:
        return subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def _version(package: str) -> str:
    return str(getattr(sys.modules.get(package), "__version__", "-"))
