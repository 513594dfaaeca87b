"""Stop requests at a random step of a training as people make them, and its resumption.

It resumes with the printed command, or with the original one where nobody could read what was printed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.faults.job import END_TIMEOUT_S, HOSTS, Job, Line, launch
from benchmarks.faults.table import Run
from benchmarks.harness import read_records
from mpiddp.drill import injectors
from tests.support.cluster import Cluster

STEPS = 60
EARLIEST, LATEST = 1, 30
BETWEEN_S = 0.4  # between the two Ctrl-C; closer ones could come from one
TRAIN = (
    *("-m", "mpiddp", "train", "--use-syn", "--batch-size", "2"),
    *("--amp", "off", "--epochs", "1"),
    *("--save-every", "10", "--log-every", "1", "--out", "."),
)


# After a Ctrl-C bash waits for the pipeline, as an interactive shell does.
TEE = ("bash", "-c", 'trap : INT; "$@" 2>&1 | tee log; exit ${PIPESTATUS[0]}', "bash")


@dataclass(frozen=True)
class Request:
    """`act` makes the request. `around` is the command that starts the launcher.

    message: a pattern for the launcher's line; "" if nobody can read it.
    arch: the model. The save of a large one outlasts the time between two requests.
    """

    name: str
    act: Callable[[Job], None]
    code: int
    message: str
    around: tuple[str, ...] = ()
    steps: int = STEPS
    arch: str = "resnet20"


def _send(*signals: int) -> Callable[[Job], None]:
    def act(job: Job) -> None:
        for index, each in enumerate(signals):
            time.sleep(BETWEEN_S if index else 0.0)
            injectors.send(each, job.command_pid())

    return act


def _on_command(inject: Callable[[int], None]) -> Callable[[Job], None]:
    return lambda job: inject(job.command_pid())


def _start_again(job: Job) -> None:
    """Start a second run into the same folder, which must be refused."""
    done = job.hosts["node0"].run(job.command, env=job.env, cwd=job.folder, timeout_s=END_TIMEOUT_S)
    job.lines += [Line(time.time(), f"second run: {line}") for line in done.stderr.splitlines()]
    job.lines.append(Line(time.time(), f"second run: code {done.returncode}"))


def _is_saving(name: str) -> str:
    return f"mpiddp: {name}: the ranks are saving and stopping"


REQUESTS = (
    Request("SIGTERM", _send(signal.SIGTERM), 75, _is_saving("SIGTERM")),
    Request("SIGUSR1", _send(signal.SIGUSR1), 75, _is_saving("SIGUSR1")),
    Request("Ctrl-C", _send(signal.SIGINT), 75, _is_saving("SIGINT")),
    Request(
        "Ctrl-C twice",
        _send(signal.SIGINT, signal.SIGINT),
        130,
        "mpiddp: interrupted: the job was stopped",
        arch="resnet50",
    ),
    Request(
        "`timeout` around the launcher",
        _send(signal.SIGTERM),
        75,
        _is_saving("SIGTERM"),
        around=("timeout", "1000"),
    ),
    Request(
        "SIGTERM to every process of a host",
        _on_command(injectors.to_all),
        75,
        _is_saving("SIGTERM"),
    ),
    Request("Ctrl-C with `2>&1 \\| tee log`", _on_command(injectors.ctrl_c), 75, "", around=TEE),
    Request("a second run into the folder", _start_again, 0, "second run: code 2", steps=500),
)


def measure(request: Request, hosts: Cluster, starter: str, number: int) -> Run:
    """Stop a training once. In rounds with an odd `number`, resume it and check that it completes.

    Raises:
        TimeoutError: the job ended or hung before the request.
    """
    folder = hosts.shared / f"train-{os.urandom(4).hex()}"
    train = (*TRAIN, "--arch", request.arch, "--steps-per-epoch", str(request.steps))
    job = launch(hosts, folder, starter, HOSTS, (), train, around=request.around)
    try:
        at = random.randint(EARLIEST, LATEST)
        job.wait_until(lambda: last_step(job) >= at, f"step {at}")
        since = time.time()
        request.act(job)
        code = job.end()
        ended_at = time.time()
    finally:
        orphans = job.kill_orphans()
    named = [
        line for line in job.lines if request.message and re.search(request.message, line.text)
    ]
    reached, saved = last_step(job), job.newest_checkpoint()
    is_right = code == request.code
    said = job.output()
    if number % 2:
        resumed = job.resume(said)
        said += f"\nresumed with code {resumed.returncode}: {resumed.stderr}"
        is_right = (
            is_right and last_step(job) == request.steps and (folder / "summary.json").exists()
        )
    return Run(
        request.name,
        starter,
        number,
        detected_s=named[0].at - since if named else None,
        ended_s=ended_at - since if request.code else None,
        code=code,
        is_code_right=is_right,
        is_named=bool(named) or not request.message,
        orphans=len(orphans),
        steps_lost=reached - saved,
        said=said[-2000:],
        load=os.getloadavg()[0],
    )


def last_step(job: Job) -> int:
    """The newest step in the records of a training that logs every step."""
    records = read_records(job.folder / "metrics.jsonl")
    return max((record["step"] for record in records), default=0)
