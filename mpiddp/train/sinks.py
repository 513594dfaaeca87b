"""`--log-to`: the records of a run in the tools in which people look at runs, each through its own package.

    with sinks.following("tensorboard,wandb", run, config): …

A thread of rank 0 follows metrics.jsonl. An error of a package becomes one warning, and the training goes on.
RUN/log_to/tensorboard.json holds the id that the tool has given the run, and the last step that it has. The
next start of the run continues there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpiddp.errors import UserError
from mpiddp.train.record import save_json

FINISH_S = 20.0  # for the tools to take the last records; `--grace` is longer
_POLL_S = 1.0
_PROJECT = "mpiddp"  # unless the tool's own variable names another
log = logging.getLogger("mpiddp")


@dataclass(frozen=True)
class RunFacts:
    """What a tool gets at the start."""

    folder: Path
    config: Mapping[str, Any]  # config.json
    id: str  # that the tool gave this run at its first start; "" then
    first_step: int  # the tool gets no record of earlier steps, and later ones anew


@dataclass(frozen=True)
class Sink:
    """A run that is open in a tool. Its functions may raise anything."""

    id: str
    log: Callable[[int, dict[str, float]], object]  # step, numbers by name
    finish: Callable[[], object]


def _tensorboard(run: RunFacts) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first_step)
    if not run.id:
        writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```")

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Sink(run.folder.name, log, writer.close)


def _wandb(run: RunFacts) -> Sink:
    import wandb

    def opened(mode: str) -> Any:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT") or _PROJECT,
            name=run.folder.name,
            id=run.id or None,
            resume="allow",
            dir=run.folder,
            config=dict(run.config),
            mode=mode,
            settings=wandb.Settings(console="off"),
        )

    try:
        mode = os.environ.get("WANDB_MODE")
        found = opened(mode or ("online" if wandb.login(prompt=False) else "offline"))
    except wandb.errors.CommError:  # no network
        found = opened("offline")
    found.define_metric("*", step_metric="step")  # its own steps cannot go back as a resume does
    return Sink(found.id, lambda step, values: found.log({"step": step, **values}), found.finish)


def _mlflow(run: RunFacts) -> Sink:
    import mlflow

    if not os.environ.get("MLFLOW_TRACKING_URI"):
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # its databases need more packages
        mlflow.set_tracking_uri((run.folder / "mlflow").as_uri())
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT)
    opened = mlflow.start_run(run_id=run.id or None, run_name=None if run.id else run.folder.name)
    if not run.id:
        mlflow.log_params(run.config)
    log = lambda step, values: mlflow.log_metrics(values, step=step)  # noqa: E731
    return Sink(opened.info.run_id, log, mlflow.end_run)


def _trackio(run: RunFacts) -> Sink:
    import trackio

    name = run.id or f"{run.folder.name}-{os.urandom(4).hex()}"  # by which it knows a run
    project = os.environ.get("TRACKIO_PROJECT") or _PROJECT
    opened: Any = trackio.init(project=project, name=name, resume="allow", config=dict(run.config))
    return Sink(name, lambda step, values: opened.log(values, step=step), opened.finish)


# tool, which is also the name of its package: what opens a run in it
SINKS: Mapping[str, Callable[[RunFacts], Sink]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}


def check_packages(tools: str | None) -> None:
    """Raise UserError if the package of a tool in this list, that of --log-to, is not installed."""
    for tool in tools.split(",") if tools else ():
        spec = find_spec(tool)
        if spec is None or spec.origin is None:  # wandb leaves a folder of its name behind
            raise UserError(
                f"--log-to {tool} needs {tool}, which {sys.executable} does not have. "
                f"Run: {sys.executable} -m pip install {tool}"
            )


@contextlib.contextmanager
def following(tools: str | None, run: Path, config: Mapping[str, Any]) -> Iterator[None]:
    """Send the records of the run to these tools while the body runs. Call this on rank 0 alone."""
    is_over = threading.Event()
    newest = max((step for step, _ in numbers(run / "metrics.jsonl", 0)[0]), default=-1)
    threads = [
        threading.Thread(target=_follow, args=(tool, run, config, newest, is_over), daemon=True)
        for tool in (tools.split(",") if tools else ())
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
    for thread in threads:  # not after an error, which the other ranks must learn of now
        thread.join(FINISH_S)
        if thread.is_alive():
            log.warning(f"warning: --log-to: the last records took more than {FINISH_S:g} s.")


def _follow(
    tool: str, run: Path, config: Mapping[str, Any], newest: int, is_over: threading.Event
) -> None:
    try:
        follow(tool, run, config, newest, is_over)
    except (Exception, SystemExit) as error:
        first_line = str(error).strip().partition("\n")[0]
        log.warning(
            f"warning: --log-to {tool}: {type(error).__name__}: {first_line[:300]!r}. The training "
            "continues, and metrics.jsonl has all records."
        )


def follow(
    tool: str, run: Path, config: Mapping[str, Any], newest: int, is_over: threading.Event
) -> None:
    """Send the tool the records of the steps that it does not have yet, until `is_over`.

    Args:
        newest: the last step of metrics.jsonl when this start of the run began. A run that resumed has
            dropped the records of later steps, which the tool then gets again.
    """
    file, metrics = run / "log_to" / f"{tool}.json", run / "metrics.jsonl"
    file.parent.mkdir(exist_ok=True)
    known: dict[str, Any] = {"id": "", "step": -1}
    if file.exists():
        known = json.loads(file.read_bytes())
    first_step = min(known["step"], newest) + 1
    sink = SINKS[tool](RunFacts(run.absolute(), config, known["id"], first_step))
    save_json(file, {"id": sink.id, "step": first_step - 1})
    position, is_last = 0, False
    while not is_last:
        is_last = is_over.wait(_POLL_S)
        records, position = numbers(metrics, position)
        new = [(step, values) for step, values in records if step >= first_step]
        for step, values in new:
            sink.log(step, values)
        if new:
            save_json(file, {"id": sink.id, "step": new[-1][0]})
    sink.finish()


def numbers(metrics: Path, start: int) -> tuple[list[tuple[int, dict[str, float]]], int]:
    """The step and the numbers of each record from this position on, and the position behind the last one."""
    with metrics.open("rb") as file:
        file.seek(start)
        data = file.read()
    data = data[: data.rfind(b"\n") + 1]
    records = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a full disk has cut it
            record = json.loads(line)
            step = int(record.pop("step"))
            records.append((step, {k: v for k, v in record.items() if type(v) in (int, float)}))
    return records, start + len(data)
