"""`mpiddp drill`: run a script undisturbed, then once with each fault and a resume, and compare.

mpiddp drill -H localhost:2 train.py --out {out}
mpiddp drill --only kill,sigterm -n 2 -m mpiddp train --use-syn --out {out}
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from mpiddp.arguments import OUT, Option, as_arguments, whole
from mpiddp.drill.faults import FAULTS, NAMES, Fault
from mpiddp.drill.findings import Result, judge, judge_undisturbed
from mpiddp.drill.rehearse import Drill
from mpiddp.errors import DONE, FAILED, UserError, named_by, print_error
from mpiddp.launch.plan.entrypoint import read_job
from mpiddp.launch.plan.job_plan import make_plan
from mpiddp.launch.plan.options import LaunchOptions, option_parser, parse_options
from mpiddp.text import align_columns, as_json, counted

_HEAD = ("fault", "result", "steps lost", "weights at the end")
_VERDICTS = {None: "-", True: "pass", False: "FAIL"}
_ENDS = {None: "not compared", True: "equal", False: "differ"}


def main(argv: list[str]) -> int:
    """Drill the job of `argv`. The exit code: 0 all faults passed, 1 one has not.

    Raises UserError for bad input, which is found before anything has started.
    """
    options, drill = _parse(argv)
    # An exit, and not a death by the signal, also ends the launcher of the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = list[Result]()
    try:
        for result in _results(drill, options.only):
            results.append(result)
            why = result.cause and f": {result.cause}"
            number = f"{len(results)}/{len(options.only) + 1}"
            _say(f"{number} {result.fault}: {_VERDICTS[result.passed]}{why}")
    except BaseException:  # Ctrl-C
        _say(f"what the runs printed and wrote: {drill.work}")
        raise
    rows = {"results": [*map(asdict, results)]}
    print(as_json("drill", rows) if options.json else table(results))
    # A fault that needs more ranks is left out. Each other one has to pass.
    needed = [*filter(drill.has_ranks_for, options.only)] or options.only
    passed = {result.fault for result in results if result.passed}
    failed = not results[0].passed or not passed.issuperset(fault.name for fault in needed)
    if failed or options.work:
        _say(f"what the runs printed and wrote: {drill.work} (--seed {drill.seed})")
    else:
        shutil.rmtree(drill.work)
    return FAILED if failed else DONE


def _results(drill: Drill, faults: tuple[Fault, ...]) -> Iterator[Result]:
    if not drill.names_folder:
        _say(f"no argument has {OUT}: each run begins in an empty folder, without your files")
    undisturbed = drill.undisturbed()
    yield judge_undisturbed(undisturbed)
    steps, saves = undisturbed.length, undisturbed.saved_steps()
    counts = f"{counted(steps, 'step')}, {counted(len(saves), 'save')}"
    _say(f"undisturbed: {counts}, {undisturbed.seconds:.0f} s")
    if undisturbed.codes != (DONE,) or not steps:
        return
    for fault in faults:
        if not drill.has_ranks_for(fault):
            yield Result(fault.name, None, "left out: it needs two ranks")
        else:
            yield judge(undisturbed, fault, drill.run(fault, undisturbed))


def table(results: Sequence[Result]) -> str:
    rows = [_HEAD]
    for result in results:
        lost = "-" if result.steps_lost is None else str(result.steps_lost)
        rows.append((result.fault, _VERDICTS[result.passed], lost, _ENDS[result.weights_equal]))
    sentences = [f"{result.fault}: {result.cause}." for result in results if result.cause]
    return "\n".join([align_columns(rows), *sentences])


def _parse(argv: list[str]) -> tuple[argparse.Namespace, Drill]:
    """The options, and the drill that they choose."""
    parser = option_parser()
    names = LaunchOptions.__dataclass_fields__
    of_launch = [action for action in parser._actions if action.dest in names]
    for action in of_launch:
        action.help = argparse.SUPPRESS
    parser.prog, parser.usage = "mpiddp drill", "%(prog)s [options] (SCRIPT | -m MODULE) [ARGS ...]"
    parser.description = (
        "Run a script undisturbed, then once with each fault and a resume, and compare. "
        f"{OUT} in an argument of the script becomes a new folder for each run."
    )
    parser.epilog = (
        "Takes the options of mpiddp launch too: mpiddp launch --help-all\n"
        "Exit codes: 0 all faults passed, 1 one did not, 2 bad input."
    )
    group = parser.add_argument_group("the drill")
    steps = "end every run after N steps (default: where the script ends)"
    only = f"the faults, or none, by default all of: {', '.join(NAMES)}"
    work = "a new folder for the runs, which all hosts see (default: a temporary one)"
    for option in (
        Option("--steps", value="N", parse=whole(2), default=0, help=steps),
        Option("--only", value="FAULT,FAULT", parse=_faults, default=FAULTS, help=only),
        Option(
            "--seed",
            value="K",
            parse=whole(0),
            help="seed of the steps and ranks (default: random)",
        ),
        Option("--work", value="DIR", help=work),
        Option("--json", help="print the results as JSON"),
    ):
        option.add_to(group)
    values = parser.parse_args(argv)
    return values, _drill(values, as_arguments(of_launch, values))


def _drill(values: argparse.Namespace, launch: list[str]) -> Drill:
    """The drill of a job with these options of `mpiddp launch`. Its hosts are checked, as before any start.

    Raises UserError for an invalid option, no such script, or a host that cannot be used.
    """
    job = read_job(values.module, values.script)
    options = parse_options([*launch, *job], "mpiddp drill")
    if job[0] == "--":
        sentence = 'mpiddp drill: it observes a Python script or a module in each rank, and not a command after "--".'
        raise UserError(sentence, fix="mpiddp drill -n 2 train.py --out {out}")
    if options.dry_run:
        raise UserError("mpiddp drill: --dry-run runs nothing.", fix="leave it out")
    placed = make_plan(options, os.environ).request.hosts
    if job[0] != "-m":  # the script runs in another working folder
        job = (os.path.abspath(job[0]), *job[1:])  # noqa: PTH100, because a link stays a link
    seed = values.seed if values.seed is not None else random.randrange(1000)
    work = _new_folder(values.work, is_shared=len(placed.hosts) > 1)
    return Drill(launch, job, placed.world_size, work, values.steps, seed)


def _faults(text: str) -> tuple[Fault, ...]:
    names = text.split(",")
    if wrong := [name for name in names if name not in (*NAMES, "none")]:
        raise argparse.ArgumentTypeError(
            f'"{wrong[0]}" is not a fault. Expected: {", ".join(NAMES)}'
        )
    return tuple(fault for fault in FAULTS if fault.name in names)


def _new_folder(named: str | None, *, is_shared: bool) -> Path:
    """The folder that the user names, else a temporary one. Several hosts share the working folder."""
    with named_by("--work" if named else ""):
        if named is None:
            parent = Path.cwd() if is_shared else None
            return Path(tempfile.mkdtemp(prefix="mpiddp-drill-", dir=parent))
        work = Path(named).absolute()
        work.mkdir(parents=True, exist_ok=True)
        if any(work.iterdir()):
            raise UserError(f"--work {work} is not empty.", fix="name a new folder")
    return work


def _say(sentence: str) -> None:
    print_error(f"mpiddp drill: {sentence}")
