"""`--log-to`: the records of a run in the tools in which people look at runs, each through its own package.

    python -m mpiddp.train.sinks tensorboard RUN BYTES     # rank 0 starts it, with a pipe as stdin

Each tool has a process beside rank 0, which follows metrics.jsonl until its stdin ends: neither a slow server
nor an error or a crash of a package touches the training. RUN/log_to/tensorboard.json holds the id that the
tool has given the run, and how much of metrics.jsonl it has. The next start of the run continues there.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.run_dir import RunDir, save_json
from mpiddp.errors import UserError

FINISH_S = 20.0  # for a tool to take the last records; `--grace` is longer
_POLL_S = 1.0
_PROJECT = "mpiddp"  # unless the tool's own variable names another


@dataclass(frozen=True)
class RunFacts:
    """What a tool gets at the start."""

    folder: Path
    config: dict[str, Any]  # config.json
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
            config=run.config,
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
    opened: Any = trackio.init(project=project, name=name, resume="allow", config=run.config)
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


def follow(tool: str, run: RunDir, resumed_bytes: int, is_over: Callable[[], bool]) -> None:
    """Send the tool the records that it does not have yet, until `is_over`, which waits a moment.

    Args:
        resumed_bytes: the size of metrics.jsonl before this start of the run has added a record.
    """
    file = run.path / "log_to" / f"{tool}.json"
    file.parent.mkdir(exist_ok=True)
    sent: dict[str, Any] = (
        json.loads(file.read_bytes()) if file.exists() else {"id": "", "bytes": 0}
    )
    # A run that resumed has dropped the records of later steps, which the tool then gets again.
    end = min(sent["bytes"], resumed_bytes)
    kept, _ = read_records(run.metrics, 0, end)
    first_step = kept[-1]["step"] + 1 if kept else 0
    config = json.loads(run.config.read_bytes())
    sink = SINKS[tool](RunFacts(run.path.absolute(), config, sent["id"], first_step))
    is_last = False
    while not is_last:
        save_json(file, {"id": sink.id, "bytes": end})
        is_last = is_over()
        records, end = read_records(run.metrics, end)
        for record in records:
            sink.log(record["step"], _numbers(record))
    save_json(file, {"id": sink.id, "bytes": end})
    sink.finish()


def read_records(
    metrics: Path, start: int, end: int | None = None
) -> tuple[list[dict[str, Any]], int]:
    """The complete records between two positions of the file, and the position behind the last one."""
    with metrics.open("rb") as file:
        file.seek(start)
        data = file.read(None if end is None else end - start)
    data = data[: data.rfind(b"\n") + 1]
    records = []
    for line in data.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):  # a full disk has cut it
            records.append({**(record := json.loads(line)), "step": int(record["step"])})
    return records, start + len(data)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if k != "step" and type(v) in (int, float)}


def _main(tool: str, folder: str, resumed_bytes: str) -> None:
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints goes to the log, as its stderr

    def give_up() -> None:
        print(f"the last records took more than {FINISH_S:g} s", file=told, flush=True)
        os._exit(0)

    def is_over() -> bool:
        ended = bool(select.select([0], [], [], _POLL_S)[0])
        if ended:
            limit = threading.Timer(FINISH_S, give_up)
            limit.daemon = True
            limit.start()
        return ended

    try:
        follow(tool, RunDir(Path(folder)), int(resumed_bytes), is_over)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        print(f"{type(error).__name__}: {first_line[:300]}", file=told, flush=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
