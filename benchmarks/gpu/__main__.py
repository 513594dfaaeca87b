"""What only a GPU can show, on one machine within half an hour; see docs/evidence/gpu.md.

python -m benchmarks.gpu pack gpu-kit                  # where there is a network
python3 -m benchmarks.gpu unpack gpu-kit /tmp/gpu      # where there is a GPU, but no MPI
/tmp/gpu/bin/python -m benchmarks.gpu run correct --out DIR
python -m benchmarks.gpu table DIR                     # fill the tables of docs/
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from benchmarks.gpu import report
from benchmarks.gpu.jobs import ROOT
from benchmarks.gpu.run import RESULTS, Settings, run_group
from benchmarks.gpu.stage import Context, run_stage, save
from benchmarks.gpu.stages import GROUPS, STAGES, Group
from mpiddp.arguments import OneSentenceParser, whole
from mpiddp.errors import BAD_INPUT, DONE, FAILED, INTERRUPTED, UserError
from mpiddp.hosts.gpus import gpu_names
from mpiddp.text import all_of

STATE = Path("bench/gpu")
MINUTES = 6


def main(argv: list[str]) -> int:
    """Run one command and return its exit code. Raises UserError for bad input."""
    options = _parser().parse_args(argv)
    if options.command in ("pack", "unpack"):
        from benchmarks.gpu import kit  # imports torch, which the other commands do not need

        if options.command == "pack":
            kit.pack(options.kit, _note, with_images=options.images)
        else:
            kit.unpack(options.kit, options.target, _note)
    elif options.command == "table":
        report.fill(options.results, ROOT)
    elif options.command == "stage":
        return _stage(options)
    else:
        return _run(options)
    return DONE


def _run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the stages as on Ctrl-C
    deadline = time.monotonic() + 60 * options.minutes
    name = options.name
    if name not in GROUPS and name not in STAGES:
        raise UserError(f'"{name}" is neither a group ({all_of(list(GROUPS))}) nor a stage.')
    group = GROUPS[name] if name in GROUPS else Group((STAGES[name],))
    rehearses = not _has_gpu() if options.rehearse is None else options.rehearse
    settings = Settings(
        options.out.absolute(),
        options.state.absolute(),
        rehearses,
        deadline,
        1 if rehearses else group.at_once,
    )
    settings.state.mkdir(parents=True, exist_ok=True)
    for file in options.done:
        _take_over(file, settings)
    if rehearses:
        _note("no GPU: a rehearsal with tiny sizes")
    missing = run_group(name, group.stages, settings, _note)
    _note(
        f"{len(group.stages) - missing} of {len(group.stages)} stages done; {options.out / RESULTS}"
    )
    return FAILED if missing else DONE


def _has_gpu() -> bool:
    """Whether there is a GPU to measure. Raises UserError if there is one that nvidia-smi does not list."""
    names = gpu_names()
    if not names and (names is None or Path("/dev/nvidia0").exists()):
        raise UserError(
            "This machine seems to have a GPU, but nvidia-smi does not list it. Put a working nvidia-smi on "
            "PATH, or use --real or --rehearse."
        )
    return bool(names)


def _take_over(file: Path, settings: Settings) -> None:
    """Keep the stages that passed in an earlier run, on another machine."""
    for record in json.loads(file.read_text()):
        own = settings.state / f"{record['stage']}.json"
        is_real = record["state"] == "passed" and not record["rehearsal"]
        if is_real and not own.exists():
            save(own, record)


def _stage(options: argparse.Namespace) -> int:
    """Run one stage in this process, for `run`."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A shell's background commands ignore it, and so would the jobs that are to stop on Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    data = Path(sys.prefix) / "data"
    stage = STAGES[options.name]
    context = Context(
        name=stage.name,
        is_tiny=options.rehearse,
        folder=options.state / stage.name,
        file=options.state / f"{stage.name}.json",
        data=data if data.is_dir() else None,
    )
    return DONE if run_stage(stage, context) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = OneSentenceParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    pack = commands.add_parser("pack", help="download and compress what the other machine lacks")
    pack.add_argument("kit", type=Path, nargs="?", default=Path("gpu-kit"), help="a new folder")
    pack.add_argument("--no-images", dest="images", action="store_false", help="leave out CIFAR-10")
    unpack = commands.add_parser("unpack", help="check the pieces, and install what they bring")
    unpack.add_argument("kit", type=Path, help="the folder of the pieces, or of one piece")
    unpack.add_argument("target", type=Path, help="the environment, new or of an earlier piece")
    run = commands.add_parser("run", help="run the stages of a group that have not passed yet")
    run.add_argument("name", help=f"a group, {all_of(list(GROUPS))}, or a single stage")
    run.add_argument("--out", type=Path, required=True, help="folder of results.json and the log")
    run.add_argument("--minutes", type=whole(1), default=MINUTES, help="time of the whole command")
    run.add_argument(
        "--done", type=Path, action="append", default=[], help="results.json of an earlier run"
    )
    stage = commands.add_parser("stage", help="(internal) one stage, started by run")
    stage.add_argument("name", choices=STAGES)
    for each in (run, stage):
        each.add_argument("--state", type=Path, default=STATE, help="folder of the records")
        each.add_argument(
            "--rehearse", action="store_true", default=None, help="tiny sizes; so without a GPU"
        )
        each.add_argument("--real", dest="rehearse", action="store_false", help="full sizes")
    table = commands.add_parser("table", help="fill the tables of docs/ from records")
    table.add_argument("results", type=Path, help="a folder with results.json files, at any depth")
    return parser


def _note(sentence: str) -> None:
    print(f"gpu: {sentence}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(BAD_INPUT)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
