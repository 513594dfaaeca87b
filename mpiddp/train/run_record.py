"""The record of a start of a run: command, packages, git commit and changes, hosts, environment. No secrets.

RUN/starts/start_0001.json is that of the first start, start_0002.json that of the first restart or resume.
The options stand in config.json, the results in summary.json.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.run_dir import RunDir, save_json
from mpiddp.launch.starters.environment import LEFT_OUT, is_secret
from mpiddp.protocol.variables import PLACEMENT, RESTART_COUNT, RUN_ID
from mpiddp.runtime.job.coordinator import Coordinator

_DIFF_BYTES = 256 << 10
_GIT_S = 10.0
_WRITE_S = 2 * _GIT_S + 1.0  # for a record that is not written when the training ends
# `user:password@host`. In a URL everything before the last @ counts: a password may contain anything.
_PASSWORD = re.compile(r"(?<=://)[^\s/:]*:\S*@|(?<=://)[^\s/]*@|[^\s:/@=,]+:[^\s/]+@")
_LONGEST_WORD = 2048  # the pattern takes the square of it, and holds the interpreter's lock
# "+OPENAI_API_KEY=sk-…" in a diff. A short value is a number of the code, such as TOKEN_SIZE = 512.
_SETTING = re.compile(
    r"""^([-+ ]\s*(?:export )?["']?([A-Z][A-Z0-9_]*)["']?\s*[=:]\s*)\S{8,}.*$""", re.MULTILINE
)


@contextlib.contextmanager
def recorded(run: RunDir, coordinator: Coordinator, started: str) -> Iterator[None]:
    """Write the record of this start while the body runs: git may be slow. Call this on rank 0 alone."""
    facts = {
        "started": started,  # local time, 20261122-070847
        "command": shlex.join(map(without_password, [sys.executable, *sys.orig_argv[1:]])),
        "folder": str(Path.cwd()),
        "run_id": os.environ.get(RUN_ID),
        "restarts": os.environ.get(RESTART_COUNT),
        "started_by": coordinator.world.launcher.name,
        "placement": os.environ.get(PLACEMENT),  # by the hostfile
        "hosts_of_ranks": coordinator.hostnames,
        "environment": public(os.environ),
    }
    writer = threading.Thread(target=_write, args=(run, facts), name="run record", daemon=True)
    writer.start()
    yield
    writer.join(_WRITE_S)


def public(env: Mapping[str, str]) -> dict[str, str]:
    """The variables, without the values of those with secret names, and without passwords in URLs."""
    return {
        name: LEFT_OUT if is_secret(name) else without_password(value)
        for name, value in sorted(env.items())
    }


def without_password(text: str) -> str:
    return re.sub(r"\S+", _without_password, text)


def _without_password(word: re.Match[str]) -> str:
    if "@" not in word[0]:
        return word[0]
    return LEFT_OUT if len(word[0]) > _LONGEST_WORD else _PASSWORD.sub(f"{LEFT_OUT}@", word[0])


def without_secrets(diff: str) -> str:
    """The diff without passwords in URLs, and without the values of settings with secret names."""
    return _SETTING.sub(_without_secret, without_password(diff))


def _without_secret(line: re.Match[str]) -> str:
    return f"{line[1]}{LEFT_OUT}" if is_secret(line[2]) else line[0]


def _write(run: RunDir, facts: dict[str, Any]) -> None:
    packages = {}
    for each in distributions():
        with contextlib.suppress(Exception):  # METADATA that is no text, for example
            packages[each.metadata["Name"]] = each.version
    versions = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": dict(sorted((name, version) for name, version in packages.items() if name)),
    }
    folder = run.path / "starts"
    with contextlib.suppress(OSError):  # the training matters more than its record
        folder.mkdir(exist_ok=True)
        file = folder / f"start_{1 + len(list(folder.glob('start_*.json'))):04d}.json"
        save_json(file, {**facts, **versions, "git": git_state(Path.cwd())})


def git_state(folder: Path) -> dict[str, Any] | None:
    """The commit of a folder, and what differs from it; None outside of a repository, or without git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    diff = _git(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD") or ""
    return {
        "commit": commit.strip(),
        "diff": without_secrets(diff[:_DIFF_BYTES]),
        "diff_is_cut": len(diff) > _DIFF_BYTES,
    }


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None
