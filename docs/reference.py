"""The page of exit codes, JSON, variables and patches, from the program.

python -m docs.reference     # writes reference.md
"""

from __future__ import annotations

import inspect
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from mpiddp import errors
from mpiddp.doctor.compare import Line
from mpiddp.drill.findings import Result
from mpiddp.hosts import allocations, gpus
from mpiddp.launch.judge.events import Announcement, Outcome, Phase, Record
from mpiddp.launch.plan import environment
from mpiddp.launch.plan.options import option_parser, variables_of_hostfiles, variables_of_options
from mpiddp.launch.run import outcome_file, status
from mpiddp.protocol import variables
from mpiddp.protocol.server import Event
from mpiddp.runtime import patches
from mpiddp.runtime.job.progress import BY_CALLS
from mpiddp.text import as_json
from mpiddp.watch.running_jobs import NO_ANSWER

PAGE = Path(__file__).with_suffix(".md")

_PAGE = """\
# Exit codes, JSON, variables

<!-- Written by `python -m docs.reference` from the program. Change it there. -->

## Exit codes

`mpiddp launch` and `mpiddp train` return these codes. `mpiddp wait` returns the code of its job,
`mpiddp run` under a plain mpirun the code of the script, and `./run.sh` the code of the training, or 2 if
its set-up fails.

{codes}

Other commands return 0 if all went well, 2 for bad input, and 130 after Ctrl-C. They return 1 if a disk or
a host failed, or if they have found something: a check of `doctor` or a fault of `drill` that did not pass,
a broken checkpoint (`checkpoints verify`), runs that differ (`train --check-determinism`), or nothing
(`explain`).

## The outcome of a job

`mpiddp launch --report FILE` writes one JSON document when the job begins, after each attempt and at the
end. `--on-end COMMAND` runs once at the end, without a shell, with the path of this file as its last
argument:

```sh
mpiddp launch --on-end ./tell_me.sh --hostfile hosts.txt train.py
```

A document is, for example:

{launch}

`cause` is `running`, `waiting` (for what `error` says, see `--wait-for-hosts`), {causes}. `checkpoint` is the newest complete one.
`failed_saves` counts the saves that have failed, in the job and in each attempt. A job whose last save has
failed has exit code 1.

Every JSON document of mpiddp begins with `kind` and `version`, which grows when a key changes its meaning.
A value that is not known is null or left out. Times are seconds since 1970, and memory is in bytes. The use
of a GPU is in percent, and in the report it is the mean of an attempt.

## Other documents

{others}

`mpiddp bench` writes `benchmark`, `command`, `started`, `environment`, `options` and `results` into its
`--out`.

## Environment variables

An option of `mpiddp launch` that takes one value may also stand in a variable: `MPIDDP_LOG_DIR=logs` is
`--log-dir logs`, and `MPIDDP_REQUEUE=1` is `--requeue`. A `#:` line of the hostfile and the command line take precedence. These are the variables:
{options}. Without `mpiddp launch`, as for `mpiddp run` under mpirun or for `mpiddp.init()`,
{by_hand} hold as well.

You may also set these variables:

{settable}

mpiddp sets these for a script, which may read them:

{readable}

The parts of mpiddp use these among themselves, so do not set them: {internal}.

## Variables that stay on their host

In a job on several hosts, all ranks get the variables of your shell, except these:

{kept}

The ids of a job and of an array's task reach all ranks all the same, for example `SLURM_JOB_ID`.

## Variables of a hostfile

A line `#: -x NAME=VALUE` of a hostfile may set these variables, because none of them runs a program, loads a
file or writes one. For any other, type `-x NAME=VALUE` on the command line, or use `--env-file`.

{of_hostfiles}

## Schedulers

{schedulers}

## Patches

mpiddp makes these changes in the process of a script. Each one can be left out:
`MPIDDP_NO_PATCHES=lines,gloo_end` leaves out two of them, and `all` leaves out every one. A process that
mpiddp has not started has only `stop_signal` and `no_dns`.

{patches}
"""

# Variables that stand for options of launch, and that a rank reads itself.
_BY_HAND = ("MPIDDP_INTERFACE", "MPIDDP_LOG_DIR", "MPIDDP_TIMEOUT")
_SETTABLE = {
    "MPIDDP_LOG_TO": "`--log-to`: the libraries, with blanks between them: `tensorboard wandb:my-project`",
    "MPIDDP_DATA": "`--data-dir` of `mpiddp train`: the folder of the data",
    "MPIDDP_PREFIX": "whether [the rank stands in front of lines](launch.md#what-the-ranks-print): always, "
    "never, or auto, which is by default: if several ranks print",
    "MPIDDP_NO_PATCHES": "[patches](#patches) to leave out, or `all`",
    "MPIDDP_PYTHON": "the Python for the environment that `run.sh` makes",
}
_READABLE = {
    "MPIDDP_RUN_ID": "the id of the run, which is the same in all attempts",
    "MPIDDP_RESTART_COUNT": "restarts so far, also TORCHELASTIC_RESTART_COUNT",
    "MPIDDP_MAX_RESTARTS": "the limit, also TORCHELASTIC_MAX_RESTARTS",
    "MPIDDP_PLACEMENT": "hosts and ranks: node1:4,node2:2",
    "MPIDDP_JOB": "the id of the job",
    "MPIDDP_RUN_DIR": "at a restart, until the script opens a folder: the folder of the run before",
    "MPIDDP_ANNOUNCED": "at a restart: global_batch_size and world_size, as JSON",
}


def text() -> str:
    """The page."""
    causes = [f"`{cause}`" for cause in outcome_file._CAUSES.values()]
    return _PAGE.format(
        codes=_codes(),
        launch=_block(_outcome()),
        causes=f"{', '.join(causes[:-1])} or {causes[-1]}",
        others="\n\n".join(
            f"{does}:\n\n{_block(document)}" for does, document in _others().items()
        ),
        settable=_table("variable | holds", _SETTABLE),
        options=_listed(variables_of_options().values()),
        by_hand=_listed(_BY_HAND),
        readable=_table("variable | holds", _READABLE),
        schedulers=_schedulers(),
        kept="\n".join(f"- {why}: {_listed(names)}." for why, names in _kept().items()),
        of_hostfiles=_table("variable | what it does", variables_of_hostfiles()),
        internal=", ".join(f"`{name}`" for name in sorted(_names() - _public())),
        patches=_table(
            "patch | what it does", {patch.__name__: _says(patch) for patch in _patches()}
        ),
    )


def _table(head: str, rows: Mapping[str, str]) -> str:
    lines = [f"| `{name}` | {says} |" for name, says in rows.items()]
    return "\n".join([f"| {head} |", "|---|---|", *lines])


def _codes() -> str:
    """The constants of mpiddp.errors, with the comments behind them and their names in launch's help."""
    names = dict(re.findall(r"(\d+) ([a-z ]+)", str(option_parser().epilog)))
    rows = re.findall(r"^[A-Z_]+ = (\d+)  # (.+)$", inspect.getsource(errors), re.MULTILINE)
    lines = [f"| {code} | {names.pop(code)} | {means} |" for code, means in rows]
    assert not names
    return "\n".join(["| code | name | means |", "|---|---|---|", *lines])


def _block(document: str) -> str:
    """The document, with each short innermost list or object on one line."""

    def on_one_line(inner: re.Match[str]) -> str:
        words = re.sub(r"^([\[{]) | ([\]}])$", r"\1\2", " ".join(inner[0].split()))
        return words if len(words) < 100 else inner[0]

    shorter = re.sub(r"[\[{][^\[\]{}]+[\]}]", on_one_line, document)
    return f"```json\n{shorter}\n```"


# --- documents ---

_TIMES = [1764428100.5, 1764428400.25, 1764428400.5]
_GPU = {"rank": 1, "use": 97, "memory": 61_203_283_968, "memory_total": 85_520_809_984}
_GPU |= {"temperature": 71, "slowed": "power"}


def _record() -> Record:
    """Two ranks, of which rank 1 has made steps and has a GPU."""
    record = Record(["node1", "node2"], at=0.0)
    for rank in (0, 1):
        record.add(
            Event(
                "joining", rank, {"timeout_s": 60.0, "script": 4802 + rank}, 0.0, from_script=True
            )
        )
    for at in range(1, 5):
        facts = {
            "step": 100 * at,
            "counter": BY_CALLS,
            "own_s": 6.25 * at,
            "cpu_s": 12.5 * at,
            "memory": 2_147_483_648,
        }
        record.add(Event("progress", 1, facts, 10.0 * at, from_script=True))
    record.shown["loss"] = 0.412
    record.add(Event("gpus", 1, {"ranks": [_GPU]}, 40.0))
    return record


def _outcome() -> str:
    """The document of a job that has failed, as `--report` writes it."""
    sentence = "rank 1 on node2 was killed by SIGKILL. The other ranks were stopped."
    outcome = Outcome(
        errors.FAILED, sentence, 1, "node2",
        known_cause="the kernel has killed a process of rank 1, because the host had no memory left.",
        announcement=Announcement(run_dir="runs/a", checkpoint="runs/a/checkpoints/step_00000400"),
        gpus=[{"rank": rank, **use.summary} for rank, use in _record().gpus.items()],
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(outcome_file.socket, "gethostname", return_value="node1"),
        mock.patch.object(outcome_file.os, "getpid", return_value=4711),
        mock.patch.object(outcome_file.time, "time", side_effect=_TIMES),
    ):
        path = Path(folder, "report.json")
        command = ["mpiddp", "launch", "-H", "node1,node2", "train.py"]
        report = outcome_file.Report("train.py", command, [path])
        report.add(_TIMES[0], ["node1", "node2"], outcome)
        report.end(outcome, None)
        return path.read_text(encoding="utf-8").rstrip()


def _others() -> dict[str, str]:
    """A document of each other kind, by the command that prints it."""
    facts = {"age_s": 40.5, **status.job_facts(_record(), {1: b"epoch 3, loss 0.412\n"}, 40.5)}
    line = Line(
        "limits", "warn", "/dev/shm has 64 MB on node2", "start the container with --ipc host"
    )
    drilled = Result("kill", False, "differs from step 21", (1, 0), 1, False)
    doctor = {
        "hosts": ["node1", "node2"],
        "seconds": 5.7,
        "status": "warn",
        "lines": [asdict(line)],
    }
    # `mpiddp.launch.run.status` calls a job restarting whose agents are held.
    phases = ", ".join(phase.name.lower() for phase in Phase).replace("held", "restarting")
    return {
        f"`mpiddp ps --json`, where `phase` is {phases}, {NO_ANSWER} or suspended": as_json(
            "ps", {"jobs": [{"pid": 4711, "name": "train.py", **facts}]}
        ),
        "`mpiddp doctor --json`": as_json("doctor", doctor),
        "`mpiddp drill --json`": as_json("drill", {"results": [asdict(drilled)]}),
    }


# --- variables and patches ---


def _kept() -> dict[str, list[str]]:
    """The variables that stay on their host, by the reason."""
    return {
        "A login or a host sets its own": expanded(environment.OF_A_HOST.pattern),
        "They number the GPUs of one host": [*gpus.VISIBLE],
        **{
            f"{row.name} sets them in its jobs, for one host": expanded(row.sets)
            for row in allocations.SCHEDULERS
            if row.sets != "$"
        },
    }


def _names() -> set[str]:
    """Every variable of mpiddp."""
    values = {value for value in vars(variables).values() if isinstance(value, str)}
    return {value for value in values if value.startswith("MPIDDP_")}


def _public() -> set[str]:
    return {*variables_of_options().values(), *_SETTABLE, *_READABLE}


def expanded(pattern: str) -> list[str]:
    """The names that a pattern of alternatives and groups stands for; NAME* without a "$" at its end."""
    pattern = re.sub(r"(\w)\?", r"(|\1)", pattern)
    while group := re.search(r"([^|()]*)\(([^()]*)\)([^|()]*)", pattern):
        before, parts, after = group.groups()
        names = [f"{before}{part}{after}" for part in parts.split("|")]
        pattern = pattern[: group.start()] + "|".join(names) + pattern[group.end() :]
    return [name[:-1] if name.endswith("$") else f"{name}*" for name in pattern.split("|")]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _schedulers() -> str:
    """The table of the schedulers, with the docstrings of the functions that read their hosts."""
    rows = []
    for row in allocations.SCHEDULERS:
        name, _, hosts = _says(row.read).partition(": ")
        by = "-" if row.read is allocations.unlisted else row.transport.name
        rows.append(f"| {name} | {hosts} | {by} |")
    return "\n".join(["| scheduler | hosts and slots | reached through |", "|---|---|---|", *rows])


def _patches() -> list[Callable[..., Any]]:
    return [
        *patches.BEFORE_RANKS_MEET,
        *patches.ONCE_THEY_HAVE_MET,
        *patches.ONCE_TORCH_IS_THERE,
        *patches.IN_A_CALL,
    ]


def _says(patch: Callable[..., Any]) -> str:
    """The first paragraph of its docstring."""
    summary = " ".join(str(inspect.getdoc(patch)).partition("\n\n")[0].split())
    return summary.rstrip(".")


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
