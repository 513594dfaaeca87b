"""Stop requests at a random step of a training, and its resumption with the printed command."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from signal import Signals

from benchmarks.faults.job import END_TIMEOUT_S, ENV, HOSTS, Job, launch
from benchmarks.faults.table import Run
from tests.cluster import Cluster

STEPS = 60
EARLIEST, LATEST = 1, 30
BETWEEN_S = 0.1  # between the two Ctrl-C
TRAIN = (
    *("-m", "mpiddp", "train", "--use-syn", "--arch", "resnet20", "--batch-size", "2"),
    *("--amp", "off", "--epochs", "1", "--steps-per-epoch", str(STEPS)),
    *("--save-every", "10", "--log-every", "1", "--out", "."),
)


@dataclass(frozen=True)
class Request:
    name: str
    signals: tuple[Signals, ...]
    code: int
    message: str


REQUESTS = (
    Request("SIGTERM", (signal.SIGTERM,), 75, "mpiddp: SIGTERM: the ranks are saving and stopping"),
    Request("SIGUSR1", (signal.SIGUSR1,), 75, "mpiddp: SIGUSR1: the ranks are saving and stopping"),
    Request("Ctrl-C", (signal.SIGINT,), 75, "mpiddp: SIGINT: the ranks are saving and stopping"),
    Request("Ctrl-C twice", (signal.SIGINT,) * 2, 130, "mpiddp: interrupted: the job was stopped"),
)


def measure(request: Request, hosts: Cluster, starter: str, number: int) -> Run:
    """Stop a training once. In rounds with an odd `number`, resume it and check that it completes.

    Raises:
        TimeoutError: the job ended or hung before the request.
    """
    folder = hosts.shared / f"train-{os.urandom(4).hex()}"
    job = launch(hosts, folder, starter, HOSTS, (), TRAIN)
    try:
        at = random.randint(EARLIEST, LATEST)
        job.wait_until(lambda: _last_step(job) >= at, f"step {at}")
        since = time.time()
        for index, each in enumerate(request.signals):
            time.sleep(BETWEEN_S if index else 0.0)
            job.launcher.send_signal(each)
        code = job.end()
        ended_at = time.time()
    finally:
        orphans = job.kill_orphans()
    named = [line for line in job.lines if re.search(request.message, line.text)]
    reached, saved = _last_step(job), job.newest_checkpoint()
    is_right = code == request.code
    said = job.output()
    if number % 2:
        said += f"\n{_resume(job)}"
        is_right = is_right and _last_step(job) == STEPS and (folder / "summary.json").exists()
    return Run(
        request.name,
        starter,
        number,
        detected_s=named[0].at - since if named else None,
        ended_s=ended_at - since,
        code=code,
        is_code_right=is_right,
        is_named=bool(named),
        orphans=len(orphans),
        steps_lost=reached - saved,
        said=said[-2000:],
        load=os.getloadavg()[0],
    )


def _last_step(job: Job) -> int:
    file = job.folder / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    steps = [json.loads(line)["step"] for line in text.rpartition("\n")[0].splitlines()]
    return max(steps, default=0)


def _resume(job: Job) -> str:
    """Run the command that the launcher printed; without one, repeat the original command."""
    printed = re.search("mpiddp: to resume: mpiddp (.*)", job.output())
    arguments = shlex.split(printed[1]) if printed else job.arguments
    command = [sys.executable, "-m", "mpiddp", *arguments]
    done = job.hosts["node0"].run(command, env=ENV, cwd=job.folder, timeout_s=END_TIMEOUT_S)
    return f"resumed with code {done.returncode}: {done.stderr}"
