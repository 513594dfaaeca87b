"""`mpiddp drill`: the options, the time, and the order of the faults.

mpiddp drill -H localhost:2 train.py --out {out}
mpiddp drill --only kill,sigterm --budget 10m -n 2 -m mpiddp train --use-syn --out {out}
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from mpiddp.arguments import OneSentenceParser, duration, whole
from mpiddp.drill import report
from mpiddp.drill.command import OUT, Command, read_command
from mpiddp.drill.faults import FAULTS, NAMES, Fault
from mpiddp.drill.rehearse import Rehearsal, Stage
from mpiddp.drill.verdict import Result, first_difference, judge, judge_undisturbed
from mpiddp.errors import DONE, FAILED, UserError, print_error
from mpiddp.launch.options import option_parser, parse_values
from mpiddp.paths import cause_of
from mpiddp.text import counted, did_you_mean

_OVERHEAD_S = 30.0  # of a command beside its steps, on a loaded machine


def main(argv: list[str]) -> int:
    """Drill the job of `argv`. The exit code: 0 all faults passed, 1 one did not, 2 bad input.

    Raises:
        UserError: bad input, found before anything started.
    """
    options, command = _parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends its run too
    seed = options.seed if options.seed is not None else random.randrange(1000)
    work = _new_folder(options.work, has_hosts=bool(command.size.spare))
    stage = Stage(command, work, options.steps, seed)
    results = []
    try:
        for result in _drill(stage, options):
            results.append(result)
            _say(f"{len(results)}/{len(options.only) + 1} {report.line(result)}")
    except BaseException:  # Ctrl-C
        _say(f"what the runs printed and wrote: {work}")
        raise
    print(report.as_json(results) if options.json else report.table(results))
    failed = any(result.passed is False for result in results)
    if failed or options.work:
        _say(f"what the runs printed and wrote: {work} (--seed {seed})")
    else:
        shutil.rmtree(work)
    return FAILED if failed else DONE


def _drill(stage: Stage, options: argparse.Namespace) -> Iterator[Result]:
    command, faults = stage.command, options.only
    deadline = time.monotonic() + options.budget
    if not command.names_folder:
        _say(
            f"no argument has {OUT}, so each run has an empty working folder; relative paths of data are not "
            "found there"
        )
    reference = stage.undisturbed("undisturbed", options.budget)
    first = judge_undisturbed(reference)
    yield first
    steps, saves = reference.recording.length, len(reference.recording.saved_steps)
    counts = f"{counted(steps, 'step')}, {counted(saves, 'save')}"
    _say(f"undisturbed: {counts}, {reference.seconds:.0f} s")
    if reference.codes != [DONE] or not steps:
        return
    if steps < options.steps:
        _say(f"the script ends after {steps} steps, before --steps {options.steps}")
    if not reference.recording.saves:
        _say("the undisturbed run never called torch.save")

    @cache
    def again() -> Rehearsal:
        return stage.undisturbed("undisturbed_again", max(1.0, deadline - time.monotonic()))

    repeats = True
    for number, fault in enumerate(faults):
        left_s = deadline - time.monotonic()
        if why := _why_not(fault, command, reference, left_s):
            yield Result(fault.name, None, f"left out: {why}")
            continue
        limit_s = _limit_s(left_s, len(faults) - number, reference.seconds)
        other = stage.disturbed(fault, reference, limit_s)
        step = None if fault.before else first_difference(reference, other)
        if repeats and step is not None:
            repeats = False
            _say(
                f"the script is not deterministic: two runs differ from step {step} on. A resumed run may "
                "differ as much; samples and random numbers are not compared"
            )
        yield judge(fault, reference, other, again)


def _why_not(fault: Fault, command: Command, reference: Rehearsal, left_s: float) -> str:
    """Why a fault cannot be had here; "" if it can."""
    if left_s < 2 * reference.seconds:
        return "--budget has too little time left"
    elsewhere = reference.recording.ranks_beside(socket.gethostname())
    if fault.needs_hosts and not (command.size.spare and elsewhere):
        return "it needs two hosts"
    if fault.changes_ranks and command.size.ranks < 2:
        return "it needs two ranks"
    if fault.is_of_save and not reference.recording.saves:
        return "the script never calls torch.save"
    return ""


def _limit_s(left_s: float, faults: int, undisturbed_s: float) -> float:
    """The time of a command: the fault's share of what is left, yet enough to resume, and not far more."""
    enough_s = 2 * undisturbed_s + _OVERHEAD_S
    return min(left_s, max(left_s / faults, enough_s), enough_s + 2 * _OVERHEAD_S)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, Command]:
    """The options of the drill, and the command that it runs."""
    parser = option_parser()
    parser.prog, parser.usage = "mpiddp drill", "%(prog)s [options] (SCRIPT | -m MODULE) [ARGS ...]"
    parser.description = (
        "Run a script undisturbed, then once with each fault and a resume, and compare. "
        f"{OUT} in an argument of the script becomes a new folder for each run."
    )
    parser.epilog = "Exit codes: 0 all faults passed, 1 one did not, 2 bad input."
    _add_options(parser)
    values = parse_values(parser, argv)
    job = values.module or values.script
    own = OneSentenceParser(prog="mpiddp drill", add_help=False, allow_abbrev=False)
    _add_options(own)
    head = argv[: len(argv) - len(job)]
    options, rest = own.parse_known_args(head)
    return options, read_command([*rest, *job], job, is_module=bool(values.module))


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("the drill")
    add.add_argument(
        "--steps",
        type=whole(2),
        default=0,
        metavar="N",
        help="end every run after N steps (default: where the script ends)",
    )
    add.add_argument(
        "--budget",
        type=duration,
        default=3600.0,
        metavar="TIME",
        help="time of all faults, of which each has its share: 90s, 10m, 1h (default: 1h)",
    )
    add.add_argument(
        "--only",
        type=_faults,
        default=FAULTS,
        metavar="FAULT,FAULT",
        help=f"the faults, or none, by default all of: {', '.join(NAMES)}",
    )
    add.add_argument(
        "--seed", type=whole(0), metavar="K", help="seed of the steps and ranks (default: random)"
    )
    add.add_argument(
        "--work",
        metavar="DIR",
        help="a new folder for the runs, which all hosts see (default: a temporary one, with several hosts "
        "in the working folder)",
    )
    add.add_argument("--json", action="store_true", help="print the results as JSON")


def _faults(text: str) -> tuple[Fault, ...]:
    names = text.split(",")
    for name in names:
        if name not in (*NAMES, "none"):
            hint = did_you_mean(name, NAMES) or f" Expected one of: {', '.join(NAMES)}"
            raise argparse.ArgumentTypeError(f'"{name}" is no fault.{hint}'.rstrip("."))
    return tuple(fault for fault in FAULTS if fault.name in names)


def _new_folder(named: str | None, *, has_hosts: bool) -> Path:
    """The folder that the user names, else a temporary one. Several hosts share the working folder."""
    beside = Path.cwd() if has_hosts else None
    work = Path(named).absolute() if named else None
    try:
        if work is None:
            return Path(tempfile.mkdtemp(prefix="mpiddp-drill-", dir=beside))
        work.mkdir(parents=True, exist_ok=True)
        if any(work.iterdir()):
            raise UserError(f"--work {work} is not empty. Name a new folder.")
    except OSError as error:
        place = work or beside or tempfile.gettempdir()
        raise cause_of(error)(
            f"{place} cannot be written: {error.strerror}. Name a new folder: --work DIR"
        ) from None
    return work


def _say(sentence: str) -> None:
    print_error(f"mpiddp drill: {sentence}")
    sys.stderr.flush()
