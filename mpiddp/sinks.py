"""The sinks of `--log-to`: rank 0 also writes there what a script gives to `mpiddp.log_metrics`.

    mpiddp launch --log-to tensorboard --log-to wandb:my-project train.py
    MPIDDP_LOG_TO="tensorboard mlflow:sqlite:///runs.db" mpirun -n 2 python train.py

SINKS has a row for each library. It uses the library's own client, which reads its own variables, such as
WANDB_MODE or MLFLOW_EXPERIMENT_NAME. The launcher passes the option in MPIDDP_LOG_TO.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from mpiddp.errors import UserError
from mpiddp.protocol.variables import LOG_TO
from mpiddp.text import escaped, shown

# Takes a step, and numbers by name, NaN and infinities among them.
Write = Callable[[int, Mapping[str, float]], object]


class SinkRun(NamedTuple):
    """The run that is written."""

    key: str  # its name, the same after each restart and resume
    folder: Path  # where files of the run belong
    config: Mapping[str, Any]  # its settings by name, as JSON has them
    step: int  # the first of this process; an earlier start of the run may have written later ones


@contextmanager
def _tensorboard(where: str, run: SinkRun) -> Iterator[Write]:
    from torch.utils.tensorboard import SummaryWriter

    folder = Path(where or run.folder / "tensorboard")
    is_new = not folder.exists()
    # TensorBoard then ignores the steps that the run repeats.
    writer: Any = SummaryWriter(str(folder), purge_step=run.step)
    if is_new and run.config:
        writer.add_text("config", f"```json\n{json.dumps(run.config, indent=1)}\n```")

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    yield write
    writer.close()


@contextmanager
def _wandb(where: str, run: SinkRun) -> Iterator[Write]:
    import wandb

    # W&B ignores the steps of a resumed run that it has already.
    options = {"id": run.key, "name": run.key, "resume": "allow", "config": dict(run.config)}
    with wandb.init(project=where or None, **options) as client:
        yield lambda step, values: client.log(dict(values), step=step)


@contextmanager
def _mlflow(where: str, run: SinkRun) -> Iterator[Write]:
    import mlflow

    if where:
        mlflow.set_tracking_uri(where)
    # The server chooses the id of a run, so the tag leads to the run of an earlier start.
    tag = "mpiddp.run"
    before = mlflow.search_runs(filter_string=f"tags.`{tag}` = '{run.key}'", output_format="list")
    run_id = before[0].info.run_id if before else None
    with mlflow.start_run(run_id, run_name=run.key, tags={tag: run.key}) as active:
        if not before:
            mlflow.log_params(run.config)
        # A server that is slow or away would keep rank 0 from training, if this waited for it.
        options = {"synchronous": False, "run_id": active.info.run_id}
        last: list[Any] = []

        def write(step: int, values: Mapping[str, float]) -> None:
            last[:] = [mlflow.log_metrics(dict(values), step=step, **options)]

        yield write
        mlflow.flush_async_logging()
        for operation in last:
            operation.wait()  # raises its error


@contextmanager
def _trackio(where: str, run: SinkRun) -> Iterator[Write]:
    import trackio

    project = where or Path.cwd().name
    trackio.init(project=project, name=run.key, resume="allow", config=dict(run.config))
    yield lambda step, values: trackio.log(dict(values), step=step)
    trackio.finish()


# The name of a sink is that of its library's module, and of its package for pip. The function gets the WHERE
# of --log-to, or "", and opens the library in its context.
SINKS = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}


def wanted(env: Mapping[str, str]) -> list[tuple[str, str]]:
    """The name and the WHERE of each sink in MPIDDP_LOG_TO, or UserError."""
    text = env.get(LOG_TO, "")
    try:
        words = [checked(word).partition(":") for word in shlex.split(text)]
    except ValueError as error:
        raise UserError(f"{LOG_TO}={shown(text)}: {str(error).lower()}.") from None
    return [(name, where) for name, _, where in words]


def checked(text: str) -> str:
    """A value of --log-to as it is, or UserError."""
    if (name := text.partition(":")[0]) not in SINKS:
        raise UserError(
            f"--log-to {shown(name)}: expected NAME or NAME:WHERE, of {', '.join(SINKS)}."
        )
    return text


def require(env: Mapping[str, str]) -> None:
    """Raise UserError if the libraries of MPIDDP_LOG_TO are not installed. It imports none of them."""
    for name, _ in wanted(env):
        spec = find_spec(name)
        # W&B makes a folder "wandb" in the working folder, which python could import as a package.
        if spec is None or spec.origin is None:
            sentence = f"--log-to {name} needs {name}, which {sys.executable} does not have."
            raise UserError(sentence, fix=f"{sys.executable} -m pip install {name}")


def open_sinks(run: SinkRun) -> Sequence[Sink]:
    """The sinks of MPIDDP_LOG_TO. Only rank 0 may call this. Raises as `require`."""
    require(os.environ)
    return [Sink(name, where, run) for name, where in wanted(os.environ)]


class Sink:
    """One library that writes the run, until this process exits.

    The training matters more than its records: the first error, such as a full disk or a server that is gone,
    causes a warning and ends the sink.
    """

    def __init__(self, name: str, where: str, run: SinkRun) -> None:
        self._name, self._pid = name, os.getpid()
        self._open = ExitStack()
        self._write: Write | None = None
        with self._warning():
            self._write = self._open.enter_context(SINKS[name](where, run))
        atexit.register(self._close)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the numbers among the values."""
        if self._write is not None:
            numbers = {name: n for name, n in values.items() if isinstance(n, int | float)}
            with self._warning():
                self._write(step, numbers)

    def _close(self) -> None:
        if os.getpid() == self._pid:  # no forked child
            with self._warning():
                self._open.close()

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            what = escaped(lines[0] if lines else type(error).__name__).rstrip(".")
            logging.getLogger("mpiddp").warning(
                f"warning: --log-to {self._name}: {what}. The job goes on without it."
            )
            self._write = None
            self._open.pop_all()  # nothing of it is called again
