"""Inject hangs and stragglers into real jobs, and time the launcher's sentence: docs/evidence/verdicts.md.

    python -m benchmarks.verdicts                    # about 15 minutes; as root for the slow link
    python -m benchmarks.verdicts --quiet-s 60       # with the launcher's own limit for a quiet job
    python -m benchmarks.verdicts --only disk,pause

`benchmarks.ranks.troubled` runs in the three ranks. Rank 1 has the trouble.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import ENV, start
from mpiddp.arguments import whole
from mpiddp.bench.report import markdown
from mpiddp.errors import UserError
from tests.support import cluster
from tests.support.cluster import links
from tests.support.ranks import ROOT, clean_env, mpiddp

SCRIPT = str(ROOT / "benchmarks" / "ranks" / "troubled.py")
# `mpiddp launch` with another limit of a quiet job.
LAUNCHER = (
    "import sys; from mpiddp.launch.monitor import hang; hang.QUIET_S = float(sys.argv.pop(1))\n"
    "from mpiddp.cli import main; sys.exit(main())"
)
MBIT = 20


@dataclass(frozen=True)
class Trouble:
    """What rank 1 does, and a pattern for the sentence that names it."""

    name: str
    says: str
    pattern: str
    is_viewed: bool = False  # `mpiddp top` tells it, and no line


def _hang(name: str, says: str, pattern: str) -> Trouble:
    return Trouble(name, says, f"no rank has made a step for .*{pattern}")


def _holds(name: str, says: str, pattern: str, *, who: str = "rank 1 on [^:]*") -> Trouble:
    return Trouble(name, says, rf"{who} holds? the others up: .*{pattern}")


IS_IN = "ranks? .*wait.* in backward .*; rank 1 on .* is in "
TROUBLES = (
    _hang("file", "waits for a file", rf"{IS_IN}wait_for_file \(troubled"),
    _hang("lock", "waits for a lock of a file", rf"{IS_IN}wait_for_lock \(troubled.*flock\(second"),
    _hang(
        "thread", "waits for a thread", rf"{IS_IN}wait_for_thread \(troubled.*Event\(\)\.wait\(\)"
    ),
    _hang("socket", "reads a socket", rf"{IS_IN}read_socket \(troubled.*recv\(1\)"),
    _hang("pipe", "reads a pipe of a child process", rf"{IS_IN}read_pipe \(troubled.*read\(\)"),
    _hang("worker", "a DataLoader's worker sleeps", rf"{IS_IN}main \(troubled.*next\(batches\)"),
    _hang(
        "hook", "sleeps in a hook of the model", rf"{IS_IN}sleep_in_hook \(troubled.*time\.sleep"
    ),
    _hang(
        "collective",
        "is in another collective",
        r"wait in backward .*; rank 1 on \S+ waits in all_reduce \(troubled",
    ),
    _hang("left", "has left the loop early", rf"{IS_IN}wait_for_thread \(troubled"),
    _hang("sigstop", "is stopped by SIGSTOP", "rank 1 on .* does not answer: stopped"),
    _hang("busy", "computes for ever", rf"{IS_IN}loop_for_ever \(troubled"),
    _holds("core", "shares its core with another process", "other processes have its core"),
    _holds("nice", "is nice, and shares its core", "other processes have its core"),
    _holds(
        "pinned",
        "ranks 1 and 2 share a core",
        "other processes have",
        who="rank [12] .*rank [12] .*",
    ),
    _holds("heavier", "has a larger model", r"it works for [\d.]+ m?s in a step of [\d.]+ m?s"),
    _holds("loader", "its DataLoader is slow", r"next\(batches\).* its data loader"),
    _holds("disk", "its disk is slow", r"write_to_disk \(troubled.* its disk"),
    _holds("sleep", "sleeps in each step", r"time\.sleep\(SLOW_S\)"),
    _holds(
        "link", f"its link has {MBIT} Mbit/s", "the network", who="the link (of|between) .*node1.*"
    ),
    Trouble(
        "pause",
        "pauses once, for 8 s",
        r"rank 1 on .* held the others up once, for (8|9|10) s after step \d+: .*pause_once",
        is_viewed=True,
    ),
)


@dataclass(frozen=True)
class Result:
    seconds: float | None  # from the trouble to the sentence
    sentence: str  # else what the launcher said


def measure(trouble: Trouble, quiet_s: int, limit_s: int) -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _started(trouble, folder, quiet_s) as job:
            lines: list[tuple[float, str]] = []
            reader = threading.Thread(target=_read, args=(job, lines), daemon=True)
            reader.start()
            began = _began(folder, job)
            while time.time() < began + limit_s and job.poll() is None:
                if trouble.is_viewed:
                    shown = mpiddp("top", str(job.pid), XDG_RUNTIME_DIR=name).stdout
                    lines += [(time.time(), line) for line in shown.splitlines() if " up " in line]
                for at, line in list(lines):
                    if re.search(trouble.pattern, line):
                        return Result(at - began, line)
                time.sleep(0.2)
            said = [line for _, line in lines if line.startswith("mpiddp: ") or " up" in line]
            return Result(None, " / ".join(said[-3:]) or "nothing")


def _began(folder: Path, job: subprocess.Popen[str]) -> float:
    file = folder / "began"
    deadline = time.monotonic() + 120
    while not file.exists() and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return file.stat().st_ctime if file.exists() else time.time()


def _read(job: subprocess.Popen[str], lines: list[tuple[float, str]]) -> None:
    assert job.stderr is not None
    for line in job.stderr:
        lines.append((time.time(), line.rstrip("\n")))


@contextlib.contextmanager
def _started(trouble: Trouble, folder: Path, quiet_s: int) -> Iterator[subprocess.Popen[str]]:
    """A job with this trouble, until the end of the block."""
    launcher = [sys.executable, "-c", LAUNCHER, str(quiet_s), "launch"]
    arguments = [SCRIPT, str(folder), trouble.name]
    folder.chmod(0o777)
    with contextlib.ExitStack() as stack:
        if trouble.name == "link":
            hosts = stack.enter_context(cluster.up(3))
            stack.enter_context(links.limited([hosts["node1"]], mbit=MBIT))
            where = ["-H", "node0:1,node1:1,node2:1"]
            job: subprocess.Popen[str] = hosts["node0"].popen(
                [*launcher, *where, *arguments], env=ENV
            )
        else:
            job = subprocess.Popen(
                [*launcher, "-H", "localhost:3", *arguments],
                env=clean_env({**ENV, "XDG_RUNTIME_DIR": str(folder)}),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            folder.chmod(0o700)
        try:
            yield job
        finally:
            for _ in range(2):  # the second one kills what is stopped, too
                with contextlib.suppress(ProcessLookupError):
                    job.terminate()
                time.sleep(0.5)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(20)
            job.kill()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdicts", description=__doc__)
    parser.add_argument("--only", metavar="NAME,…", default="", help="these troubles")
    parser.add_argument(
        "--quiet-s",
        type=whole(1),
        default=10,
        metavar="S",
        help="without a step for so long, a job may hang (default: 10; mpiddp launch: 60)",
    )
    parser.add_argument(
        "--limit-s",
        type=whole(1),
        default=180,
        metavar="S",
        help="give up on a sentence after so long (default: 180)",
    )
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [each.name for each in TROUBLES]
    if unknown := set(names) - {each.name for each in TROUBLES}:
        raise UserError(f"--only {','.join(sorted(unknown))}: there is no such trouble.")
    rows = []
    for trouble in TROUBLES:
        if trouble.name in names:
            if trouble.name == "link" and os.geteuid() != 0:
                continue
            found = measure(trouble, options.quiet_s, options.limit_s)
            took = "-" if found.seconds is None else f"{found.seconds:.0f} s"
            print(f"{trouble.name}: {took}: {found.sentence}", file=sys.stderr, flush=True)
            is_found = "no" if found.seconds is None else "yes"
            sentence = found.sentence.removeprefix("mpiddp: ").replace("|", "\\|")
            rows.append([trouble.says, is_found, took, sentence])
    print(markdown(("rank 1", "named", "after", "sentence"), rows))


if __name__ == "__main__":
    start(main)
