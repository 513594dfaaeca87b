"""--log-to: the tools in which people look at runs, each through its own package.

    with following("tensorboard,wandb", run, vars(config), step=0) as record:
        record(1, train_loss=0.5)      # in metrics.jsonl, and in both tools

A thread of rank 0 sends the records to each tool. An error of a package, which may be anything, becomes one
warning, and the training goes on. RUN/log_to/tensorboard.json holds the id that the tool has given the run,
which a resume continues.
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
from typing import Any

import mpiddp
from mpiddp.errors import UserError

FINISH_S = 20.0  # for the tools to take the last records; `--grace` is longer
_PROJECT = "mpiddp"  # unless the tool's own variable names another
log = logging.getLogger("mpiddp")

Config = Mapping[str, Any]  # config.json
Records = SimpleQueue[tuple[int, dict[str, float]] | None]  # step, numbers by name; None at the end
# A run that is open in a tool: its id there, what logs the numbers of a step, and what finishes.
Sink = tuple[str, Callable[[int, dict[str, float]], object], Callable[[], object]]

# Each tool gets the folder of the run, its configuration, the id that the tool gave it at its first start
# ("" then), and the first step: it gets no record of earlier steps, and later ones anew.


def _tensorboard(folder: Path, config: Config, run_id: str, first_step: int) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
    if not run_id:
        writer.add_text("config", f"```json\n{json.dumps(config, indent=1)}\n```")

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return folder.name, log, writer.close


def _wandb(folder: Path, config: Config, run_id: str, _: int) -> Sink:
    import wandb

    options: dict[str, Any] = {
        "project": os.environ.get("WANDB_PROJECT") or _PROJECT,
        "name": folder.name,
        "id": run_id or None,
        "resume": "allow",
        "dir": folder,
        "config": dict(config),
        "settings": wandb.Settings(console="off"),
    }
    try:
        mode = os.environ.get("WANDB_MODE")
        mode = mode or ("online" if wandb.login(prompt=False) else "offline")
        found = wandb.init(mode=mode, **options)
    except wandb.errors.CommError:  # no network
        found = wandb.init(mode="offline", **options)
    found.define_metric("*", step_metric="step")  # its own steps cannot go back as a resume does
    return found.id, lambda step, values: found.log({"step": step, **values}), found.finish


def _mlflow(folder: Path, config: Config, run_id: str, _: int) -> Sink:
    import mlflow

    if not os.environ.get("MLFLOW_TRACKING_URI"):
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # its databases need more packages
        mlflow.set_tracking_uri((folder / "mlflow").as_uri())
    mlflow.set_experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT)
    opened = mlflow.start_run(run_id=run_id or None, run_name=None if run_id else folder.name)
    if not run_id:
        mlflow.log_params(config)
    log = lambda step, values: mlflow.log_metrics(values, step=step)  # noqa: E731
    return opened.info.run_id, log, mlflow.end_run


def _trackio(folder: Path, config: Config, run_id: str, _: int) -> Sink:
    import trackio

    name = run_id or f"{folder.name}-{os.urandom(4).hex()}"  # by which it knows a run
    project = os.environ.get("TRACKIO_PROJECT") or _PROJECT
    opened: Any = trackio.init(project=project, name=name, resume="allow", config=dict(config))
    return name, lambda step, values: opened.log(values, step=step), opened.finish


# tool, which is also the name of its package: what opens a run in it
SINKS: Mapping[str, Callable[[Path, Config, str, int], Sink]] = {
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
def following(
    tools: str | None, run: Path, config: Config, *, step: int
) -> Iterator[Callable[..., None]]:
    """Give the body a `mpiddp.log_metrics` that also sends the numbers after this step to these tools."""
    queues: list[Records] = []
    threads: list[threading.Thread] = []
    for tool in tools.split(",") if tools else ():
        queues.append(SimpleQueue())
        arguments = (tool, run, config, step + 1, queues[-1])
        threads.append(threading.Thread(target=_send, args=arguments, daemon=True))
        threads[-1].start()

    def record(step: int, **values: Any) -> None:
        mpiddp.log_metrics(step, **values)
        numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
        for queue in queues:
            queue.put((step, numbers))

    try:
        yield record
    finally:
        for queue in queues:
            queue.put(None)
    for thread in threads:  # not after an error, which the other ranks must learn of now
        thread.join(FINISH_S)
        if thread.is_alive():
            log.warning(f"warning: --log-to: the last records took more than {FINISH_S:g} s.")


def _send(tool: str, run: Path, config: Config, first_step: int, records: Records) -> None:
    file = run / "log_to" / f"{tool}.json"
    try:
        file.parent.mkdir(exist_ok=True)
        known = str(json.loads(file.read_bytes())["id"]) if file.exists() else ""
        run_id, log_numbers, finish = SINKS[tool](run.absolute(), config, known, first_step)
        file.write_text(json.dumps({"id": run_id}), encoding="utf-8")
        for step, numbers in iter(records.get, None):
            log_numbers(step, numbers)
        finish()
    except (Exception, SystemExit) as error:
        first_line = str(error).strip().partition("\n")[0]
        log.warning(
            f"warning: --log-to {tool}: {type(error).__name__}: {first_line[:300]!r}. The training "
            "continues, and metrics.jsonl has all records."
        )
