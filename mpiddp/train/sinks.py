"""`--log-to`: the records of a run in the tools in which people look at runs, each through its own package.

    with sinks.following("tensorboard,wandb", run, config, step=0) as record:
        record(1, train_loss=0.5)      # in metrics.jsonl, and in both tools

A thread of rank 0 sends the records to each tool. An error of a package becomes one warning, and the training
goes on. RUN/log_to/tensorboard.json holds the id that the tool has given the run, which a resume continues.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import mpiddp
from mpiddp.errors import UserError
from mpiddp.train.record import save_json

FINISH_S = 20.0  # for the tools to take the last records; `--grace` is longer
_PROJECT = "mpiddp"  # unless the tool's own variable names another
log = logging.getLogger("mpiddp")


class RunFacts(NamedTuple):
    """What a tool gets at the start."""

    folder: Path
    config: Mapping[str, Any]  # config.json
    id: str  # that the tool gave this run at its first start; "" then
    first_step: int  # the tool gets no record of earlier steps, and later ones anew


class Sink(NamedTuple):
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


Record = tuple[int, dict[str, float]]


@contextlib.contextmanager
def following(
    tools: str | None, run: Path, config: Mapping[str, Any], *, step: int
) -> Iterator[Callable[..., None]]:
    """Give the body a `mpiddp.log_metrics` that also sends the numbers to these tools.

    Args:
        step: the one from which the run starts or resumes.
    """
    threads: dict[threading.Thread, SimpleQueue[Record | None]] = {}
    for tool in tools.split(",") if tools else ():
        queue: SimpleQueue[Record | None] = SimpleQueue()
        arguments = (tool, run, config, step + 1, queue)
        threads[threading.Thread(target=_send, args=arguments, daemon=True)] = queue
    for thread in threads:
        thread.start()

    def record(step: int, **values: Any) -> None:
        mpiddp.log_metrics(step, **values)
        numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
        for queue in threads.values():
            queue.put((step, numbers))

    try:
        yield record
    finally:
        for queue in threads.values():
            queue.put(None)
    for thread in threads:  # not after an error, which the other ranks must learn of now
        thread.join(FINISH_S)
        if thread.is_alive():
            log.warning(f"warning: --log-to: the last records took more than {FINISH_S:g} s.")


def _send(
    tool: str,
    run: Path,
    config: Mapping[str, Any],
    first_step: int,
    records: SimpleQueue[Record | None],
) -> None:
    file = run / "log_to" / f"{tool}.json"
    try:
        file.parent.mkdir(exist_ok=True)
        known = str(json.loads(file.read_bytes())["id"]) if file.exists() else ""
        sink = SINKS[tool](RunFacts(run.absolute(), config, known, first_step))
        save_json(file, {"id": sink.id})
        while (record := records.get()) is not None:
            sink.log(*record)
        sink.finish()
    except (Exception, SystemExit) as error:
        first_line = str(error).strip().partition("\n")[0]
        log.warning(
            f"warning: --log-to {tool}: {type(error).__name__}: {first_line[:300]!r}. The training "
            "continues, and metrics.jsonl has all records."
        )
