"""The outcome of a job for programs: one JSON document, for `--report`, `--on-end` and `mpiddp wait`.

    {"version": 1, "cause": "failed", "exit_code": 1, "rank": 3, "host": "node2", "error": "rank 3 on …", …}

It is written as a whole, when the job begins, after each attempt and at the end. docs/reference.md shows it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mpiddp import errors
from mpiddp.errors import (
    BAD_INPUT,
    DONE,
    FAILED,
    INTERRUPTED,
    STOPPED,
    JobFailed,
    UserError,
    aid,
    cause_of,
)
from mpiddp.files import replace_file
from mpiddp.launch import log
from mpiddp.launch.judge.events import Outcome
from mpiddp.text import as_json, sentence_and_fix, shown

_CAUSES = {
    DONE: "done",
    FAILED: "failed",
    BAD_INPUT: "bad_input",
    STOPPED: "stopped",
    INTERRUPTED: "interrupted",
}
_UNKNOWN = "exit_code error known_cause fix rank host run_dir checkpoint resume ended_at"


def outcome_of(error: BaseException) -> Outcome:
    """The outcome of a job, or of an attempt, that an error of the launcher has ended."""
    if isinstance(error, KeyboardInterrupt):
        return Outcome(INTERRUPTED, "interrupted")
    error = errors.of_limit(error) or error
    if not isinstance(error, UserError | JobFailed):
        traceback.print_exception(error)
        return Outcome(FAILED, f"the launcher itself has failed: {errors.fault(error)}.")
    code = BAD_INPUT if isinstance(error, UserError) else FAILED
    return Outcome(code, errors.without_prefix(str(error)))


def print_outcome(outcome: Outcome) -> None:
    """Print the verdict, and the known cause below it."""
    for sentence in filter(None, (outcome.sentence, outcome.known_cause)):
        (log.info if outcome.code in (DONE, STOPPED) else log.error)(sentence)


class Report:
    """The report of one job, in these files. The command `on_end` runs once, with the path of the first.

    `folder` is the folder of a detached job. `starts` is a file to write to once the job starts. Raises
    UserError or JobFailed if a file cannot be written, or if `on_end` is no program.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str] = (),
        paths: Sequence[Path] = (),
        on_end: Sequence[str] = (),
        folder: Path | None = None,
        starts: int | None = None,
    ) -> None:
        self.name, self.command, self.folder, self._starts = name, command, folder, starts
        self._paths, self._on_end = list(paths), on_end
        self._facts: dict[str, Any] = {
            "name": name,
            "command": list(command),
            "launched_on": socket.gethostname(),
            "pid": os.getpid(),
            "began_at": time.time(),
            "cause": "running",
            **dict.fromkeys(_UNKNOWN.split()),
            "hosts": [],
            "failed_saves": 0,
            "attempts": [],
        }
        if on_end and not shutil.which(on_end[0]):
            raise UserError(f"--on-end: {shown(on_end[0])} is not a program.")
        self._lock = threading.Lock()  # of the files
        self._write(is_first=True)

    def begin(self, waits_for: str = "") -> None:
        """End the `mpiddp launch --detach` of the terminal: the job has started, or waits for something."""
        if waits_for or self._facts["cause"] == "waiting":
            self._facts |= {
                "cause": "waiting" if waits_for else "running",
                "error": waits_for or None,
            }
            self._write()
        if self._starts is not None:
            os.write(self._starts, b"\n")
            os.close(self._starts)
            self._starts = None

    def add(self, began_at: float, hosts: Sequence[str], outcome: Outcome) -> None:
        """Add an attempt that has just ended. `hosts` has the host of each rank."""
        span = {"began_at": began_at, "ended_at": time.time()}
        self._facts["hosts"] = list(dict.fromkeys(hosts))
        ranks = {"hosts": self._facts["hosts"], "world_size": len(hosts)}
        measured = {"gpus": outcome.gpus, "failed_saves": outcome.num_failed_saves}
        self._facts["attempts"].append(span | ranks | measured | _ending(outcome))
        self._facts["failed_saves"] += outcome.num_failed_saves
        # A disk may hang, but a restart does not wait for it. This user may get no more threads.
        aid("report of the attempt")(threading.Thread(target=self._write, daemon=True).start)()

    def end(self, outcome: Outcome, resume: str | None) -> None:
        """Add the end of the job, and the command that resumes it. Run the command of `on_end`."""
        self._facts |= _ending(outcome) | {
            "run_dir": outcome.announcement.run_dir or None,
            "checkpoint": outcome.announcement.checkpoint or None,
            "resume": resume,
            "ended_at": time.time(),
        }
        with aid("report"):  # the exit code of the job counts more
            self._write()
        if not self._on_end:
            return
        from tempfile import TemporaryDirectory  # takes 10 ms

        has_file, made = self._paths, "mpiddp-report-"
        with (
            aid("command of --on-end"),
            nullcontext("") if has_file else TemporaryDirectory(prefix=made) as folder,
        ):
            if not has_file:
                self._paths = [Path(folder, "report.json")]
                self._write()
            command = [*self._on_end, str(self._paths[0])]
            try:
                code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode
            except OSError as error:
                log.error(f"--on-end: cannot run {command[0]}: {error.strerror}.")
            else:
                if code:
                    log.error(f"--on-end: {command[0]} has ended with code {code}.")

    def _write(self, *, is_first: bool = False) -> None:
        for path in self._paths:
            try:
                with self._lock:  # so the latest facts are written last
                    replace_file(path, f"{as_json('launch', self._facts)}\n".encode())
            except OSError as error:
                sentence = f"--report: cannot write {path}: {error.strerror}."
                if is_first:
                    raise cause_of(error)(sentence) from None
                log.error(sentence)  # the job is worth more


def why_failed(report: Path, stderr: str) -> str:
    """Why a job has failed, by its report, or else by its stderr.

    The sentence of an agent that could not connect stands on stderr alone, before the error of the report.
    """
    ended = json.loads(report.read_bytes()) if report.exists() else {}
    lines = stderr.splitlines()
    sentences = [line[8:] for line in lines if re.match(r"mpiddp: \S", line)]
    if error := ended.get("error"):
        before = "".join(sentences[: sentences.index(error)][-1:]) if error in sentences else ""
        return error if ended["rank"] is not None or before in error else f"{before} {error}"
    return (sentences or lines or ["it printed no error"])[-1]


def _ending(outcome: Outcome) -> dict[str, Any]:
    error, fix = sentence_and_fix(outcome.sentence)
    cause, remedy = sentence_and_fix(outcome.known_cause)
    return {
        "cause": _CAUSES[outcome.code],
        "exit_code": outcome.code,
        "error": error or None,
        "known_cause": cause or None,
        "fix": remedy or fix or None,
        "rank": outcome.rank,
        "host": outcome.host,
    }
