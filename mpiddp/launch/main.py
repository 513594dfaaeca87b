"""`mpiddp launch`: a command line comes in, a script runs on every host, and the exit code goes out.

    mpiddp launch --hostfile hostfiles/two_nodes --dry-run train.py --epochs 3

`mpiddp launch-function N`, the launcher of `mpiddp.spawn`, gets options and a function over the socket with
the file descriptor N, and sends the ranks' answers and the outcome back.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mpiddp.errors import DONE, FAILED, INTERRUPTED, STOPPED, UserError
from mpiddp.hosts.allocations import in_slurm_terminal
from mpiddp.launch import log
from mpiddp.launch.plan.environment import LEFT_OUT, parse_exports, without_values
from mpiddp.launch.plan.options import LaunchOptions, parse_options
from mpiddp.launch.run.control import Exchange
from mpiddp.launch.run.outcome_file import Report, outcome_of, print_outcome
from mpiddp.launch.run.output import open_closed_streams
from mpiddp.protocol.channel import DEFAULT_RANKS, encode, messages_over
from mpiddp.text import all_of
from mpiddp.world import World, leave_enclosing_job, leave_launchers


def main(argv: list[str]) -> int:
    """Launch the job of `argv`. The exit code: 0 done, 1 the job failed, 2 bad input, 75 stopped on request,
    130 interrupted. Raises UserError or JobFailed if there is no job yet of which a report could say so.
    """
    open_closed_streams()
    is_nested = leave_enclosing_job(os.environ)
    options = parse_options(argv)
    log.is_quiet = options.quiet
    home = os.path.expanduser("~")  # noqa: PTH111 - no error without a home folder
    if home != "~":
        os.environ.setdefault("HOME", home)  # a service may lack it, and Open MPI needs it
    if not (is_nested or options.names_hosts or in_slurm_terminal(os.environ)):
        world = World.from_env(os.environ)
        if world.world_size > 1:  # otherwise each rank of another launcher would start a job
            name = world.launcher.variables[0]
            raise UserError(
                f"mpiddp launch starts all ranks itself, but {name}={os.environ[name]} says that this is "
                f"already one of {world.world_size} ranks ({world.launcher.name}).",
                fix="write mpiddp run in place of mpiddp launch, or start it once; -H localhost starts a job "
                "on this machine alone",
            )
    leave_launchers(os.environ)
    if options.requeue:
        from mpiddp.launch.run.requeue import refuse_elsewhere

        refuse_elsewhere(os.environ)
    if options.dry_run:
        # Imported here, so that --help and a wrong option answer at once.
        from mpiddp.launch.plan.job_plan import make_plan

        plan = make_plan(options, os.environ)
        command = plan.starter.compose(plan.request)
        hidden = command.settings.keys() & options.settings.keys()
        print(command.explained(hidden))
        _say_left_out(hidden)
        return DONE
    job = Path(options.command[0]).name
    reports, folder, starts = [Path(options.report)] if options.report else [], None, None
    if options.detach:
        from mpiddp.watch.detached import detach

        detached, starts = detach(re.sub(r"[^\w.-]", "_", job.removesuffix(".py")))
        job = detached.name
        if starts is None:
            print(job)
            log.info(
                f"the job goes on in the background. To follow its output: mpiddp logs -f {job}"
            )
            return DONE
        reports.append(detached.report_path)
        folder = detached.folder
    printable = without_values(argv[: -len(options.command)], options.exports)
    typed = sys.argv[0]  # a path, as of ./run.sh, if the shell has not found it on PATH
    program = (
        typed if Path(typed).name == "mpiddp" and shutil.which("mpiddp") != typed else "mpiddp"
    )
    again = [program, "launch", *printable, *options.command]
    report = Report(job, again, reports, options.on_end or (), folder, starts)
    return _run_and_report(options, report)


def _run_and_report(options: LaunchOptions, report: Report) -> int:
    """Run the job, and say how it has ended and what resumes it."""
    from mpiddp.launch.run.job import run  # a dry run needs no sockets and secrets

    try:
        outcome = run(options, report)
    except (Exception, KeyboardInterrupt) as error:
        outcome = outcome_of(error)
    # timeout(1) and a closing terminal send each request twice; the ranks may have stopped in between.
    repeated = (signal.SIGTERM, signal.SIGHUP) if outcome.code in (STOPPED, INTERRUPTED) else ()
    for number in repeated:
        signal.signal(number, lambda *_: None)  # the command of --on-end does not inherit a handler
    print_outcome(outcome)
    announced = outcome.announcement
    # The stdout of the rank that failed explains the failure, perhaps alone.
    is_kept = options.log_dir or announced.run_dir or options.log_ranks != DEFAULT_RANKS
    if outcome.code == FAILED and outcome.rank and not is_kept:
        fix = "To show it: --log-ranks all. To keep it: --log-dir DIR"
        log.info(f"the stdout of rank {outcome.rank} was not shown. {fix}")
    resume_args, resume = announced.resume_args, None
    can_resume = outcome.code in (FAILED, INTERRUPTED) and (resume_args or announced.checkpoint)
    if outcome.code == STOPPED or can_resume:
        from mpiddp.launch.run.restart_args import added

        resume = shlex.join(added(report.command, resume_args))
    if resume and outcome.code != FAILED:
        _say_left_out(text.partition("=")[0] for text in options.exports if "=" in text)
        log.info(f"to resume: {resume}")  # the last line, which a user copies
    report.end(outcome, resume)
    if options.requeue:
        from mpiddp.launch.run.requeue import requeue

        requeue(os.environ, outcome)
    for number in repeated:
        signal.signal(number, signal.SIG_IGN)  # Python's end restores the default of the others
    return outcome.code


def _say_left_out(names: Iterable[str]) -> None:
    """Name the variables whose values a printed command lacks."""
    if missing := ", ".join(sorted(names)):
        log.info(f"{LEFT_OUT} replaces values that are never printed. Fill in below: {missing}")


# --- a function of mpiddp.spawn ---


def launch_function(argv: list[str]) -> int:
    """Launch the job of the caller at the other end of the socket `argv[0]`. The exit codes are launch's."""
    open_closed_streams()
    # The caller may ignore SIGINT, as a background process of a shell does, and still send it to this one.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    caller = socket.socket(fileno=int(argv[0]))
    caller.set_inheritable(False)
    try:
        call, function = next(messages_over(caller))
    except (OSError, StopIteration):  # the caller has ended
        return FAILED
    threading.Thread(target=_end_with, args=(caller,), daemon=True).start()
    exchange = Exchange(function)
    try:
        from mpiddp.launch.run.job import run

        leave_enclosing_job(os.environ)
        leave_launchers(os.environ)
        options = parse_options([*call["options"], "-m", "mpiddp.runtime.function"])
        log.is_quiet = options.quiet
        for name in ("dry_run", "detach", "report", "on_end", "restart_args", "requeue"):
            if getattr(options, name):
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"mpiddp.spawn: {flag} has no place here.", fix="leave it out")
        # The variables of `env=` are on no command line.
        settings = parse_exports([f"{name}={text}" for name, text in call["env"].items()], {})
        options = replace(options, settings={**options.settings, **settings})
        report = Report(Path(options.command[-1]).name)
        outcome = run(options, report, exchange)
        everyone = range(exchange.world_size)
        lacking = [f"rank {rank}" for rank in everyone if rank not in exchange.results]
        if outcome.code in (DONE, STOPPED) and lacking:
            sentence = f"{all_of(lacking)} ended without a result."
            outcome = outcome._replace(code=FAILED, sentence=sentence)
        if outcome.known_cause:  # the caller's exception has the verdict
            log.error(outcome.known_cause)
    except (Exception, KeyboardInterrupt) as error:
        outcome = outcome_of(error)
    is_done = outcome.code in (DONE, STOPPED)
    facts = {name: getattr(outcome, name) for name in ("code", "sentence", "rank", "host")}
    with contextlib.suppress(OSError):  # the caller has ended
        for rank, body in (exchange.results if is_done else exchange.errors).items():
            if is_done or rank == outcome.rank:  # the error of the rank that failed first
                caller.sendall(encode("answer", body, rank=rank))
        caller.sendall(encode("outcome", b"", **facts))
    return outcome.code


def _end_with(caller: socket.socket) -> None:
    """Stop the job, as on SIGTERM, when the caller has ended for any reason."""
    with contextlib.suppress(OSError):
        caller.recv(1)  # the caller sends nothing more, so this returns at its end
    os.kill(os.getpid(), signal.SIGTERM)
