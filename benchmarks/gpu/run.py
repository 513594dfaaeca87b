"""Run the stages of a group within the group's time: each in a process of its own, killed after its limit.

Every stage's record stays in the state folder, so the same command runs only what is missing. After each
stage, `results.json` and the group's log are written into the output folder.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import ROOT
from benchmarks.gpu.stage import DONE, Stage, save
from mpiddp.hosts.pidfd import kill_marked

MARK = "MPIDDP_GPU_STAGE"  # in the environment of a stage and of all processes that it starts
RESULTS = "results.json"
_END_S = 5.0  # from SIGTERM to SIGKILL
_LEAST_S = 15.0  # no stage starts with less time
_REHEARSAL_FACTOR = 5  # a few cores, and perhaps busy ones

Found = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The folders of a run, and whether it is a rehearsal. `deadline` is on time.monotonic's clock."""

    out: Path
    state: Path
    rehearses: bool
    deadline: float
    at_once: int


@dataclass(frozen=True)
class _Running:
    stage: Stage
    process: subprocess.Popen[bytes]
    mark: str
    ends_at: float  # when it is stopped
    limit_s: float


def run_group(
    name: str, stages: Sequence[Stage], settings: Settings, note: Callable[[str], None]
) -> int:
    """Run the stages that have not passed yet, and return the number of those that have not passed now."""
    for folder in (settings.out, settings.state):
        folder.mkdir(parents=True, exist_ok=True)
    (settings.out / f"{name}.log").write_bytes(b"")
    waiting = [stage for stage in stages if not _is_done(_read(stage, settings), settings)]
    for known in stages:
        if known not in waiting:
            note(f"{known.name}: done before")
    running: list[_Running] = []
    try:
        while waiting or running:
            while len(running) < settings.at_once and (stage := _next(waiting, running)):
                waiting.remove(stage)
                left = settings.deadline - time.monotonic()
                if left < _LEAST_S:
                    note(f"{stage.name}: no time left in this command")
                elif reason := _lacks(stage, settings):
                    found = {"stage": stage.name, "rehearsal": settings.rehearses}
                    save(_file(stage, settings), {**found, "state": "skipped", "reason": reason})
                    note(f"{stage.name}: skipped: {reason}")
                else:
                    factor = _REHEARSAL_FACTOR if settings.rehearses else 1
                    running.append(_start(stage, min(factor * stage.limit_s, left), settings))
            for each in list(running):
                if each.process.poll() is None and time.monotonic() < each.ends_at:
                    continue
                running.remove(each)
                _end(each, settings, "")
                note(_line(_read(each.stage, settings)))
                _write_out(name, each.stage, settings)
            time.sleep(0.1)
    finally:
        for each in running:
            _end(each, settings, "the run was interrupted")
            _write_out(name, each.stage, settings)
    _collect(settings)
    return sum(not _is_done(_read(stage, settings), settings) for stage in stages)


def _next(waiting: Sequence[Stage], running: Sequence[_Running]) -> Stage | None:
    """The first stage that needs none of those that run."""
    names = {each.stage.name for each in running}
    return next((stage for stage in waiting if stage.needs not in names), None)


def _lacks(stage: Stage, settings: Settings) -> str:
    """Why the stage cannot run, "" if it can: a stage that it needs has not passed."""
    if not stage.needs:
        return ""
    file = settings.state / f"{stage.needs}.json"
    needed = json.loads(file.read_text()) if file.exists() else {}
    if needed.get("state") == "passed":
        return ""
    return f"it needs {stage.needs}, which has not passed"


def _start(stage: Stage, limit_s: float, settings: Settings) -> _Running:
    mark = f"{stage.name}-{secrets.token_hex(8)}"
    folder = settings.state / stage.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    _file(stage, settings).unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu", "stage", stage.name]
    command += ["--state", str(settings.state), "--rehearse" if settings.rehearses else "--real"]
    with (settings.state / f"{stage.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return _Running(stage, process, mark, time.monotonic() + limit_s, limit_s)


def _end(running: _Running, settings: Settings, reason: str) -> None:
    """End the stage and all that it started, and complete its record if it could not do so itself."""
    if running.process.poll() is None:
        reason = reason or f"it did not end within {running.limit_s:.0f} s"
        os.killpg(running.process.pid, signal.SIGTERM)
        try:
            running.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()
    kill_marked(f"{MARK}={running.mark}".encode())
    found = _read(running.stage, settings)
    if found.get("state") == "running" or not found:
        code = running.process.returncode
        found |= {"stage": running.stage.name, "rehearsal": settings.rehearses}
        found |= {"state": "stopped", "reason": reason or f"its process ended with code {code}"}
        found["seconds"] = round(time.monotonic() - running.ends_at + running.limit_s, 1)
        save(_file(running.stage, settings), found)
    # Checkpoints and images: the record and the log have what is left to know.
    shutil.rmtree(settings.state / running.stage.name, ignore_errors=True)


def _file(stage: Stage, settings: Settings) -> Path:
    return settings.state / f"{stage.name}.json"


def _read(stage: Stage, settings: Settings) -> Found:
    try:
        found: Found = json.loads(_file(stage, settings).read_text())
    except FileNotFoundError:
        return {}
    return found


def _is_done(found: Found, settings: Settings) -> bool:
    # What a machine with a GPU lacks may still come, such as a piece of the kit.
    enough = DONE if settings.rehearses else ("passed",)
    return found.get("state") in enough and found.get("rehearsal") is settings.rehearses


def _line(found: Found) -> str:
    reason = f": {found['reason']}" if found.get("reason") else ""
    return f"{found['stage']}: {found['state']} after {found.get('seconds', 0):.0f} s{reason}"


def _write_out(group: str, stage: Stage, settings: Settings) -> None:
    """Append the stage's log to the group's, and write all records so far into one file."""
    with (settings.out / f"{group}.log").open("ab") as log:
        log.write(f"===== {stage.name}\n".encode())
        log.write((settings.state / f"{stage.name}.log").read_bytes())
    _collect(settings)


def _collect(settings: Settings) -> None:
    files = sorted(settings.state.glob("*.json"), key=lambda file: file.stat().st_mtime)
    found = [json.loads(file.read_text()) for file in files if file.name != RESULTS]
    save(settings.out / RESULTS, found)
