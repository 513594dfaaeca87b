"""The command line `mpiddp COMMAND …` comes in, and the exit code of the command's main goes out."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module

from mpiddp import errors, world
from mpiddp.errors import JobFailed, UserError
from mpiddp.text import did_you_mean, with_fix

# verb: (module of mpiddp with main(argv) -> int, or "module:function", its line in `mpiddp --help`)
VERBS = {
    "launch": ("launch.main", "start a script, or any command, on every slot of a hostfile"),
    "run": ("runtime.agent", "the same; under mpirun, srun or torchrun, be one of their ranks"),
    "train": ("train.main", "train a ResNet: alone, as a rank, or by -n or -H as a job"),
    "ps": ("watch.table:ps", "list your jobs on this machine"),
    "top": ("watch.table:top", "watch the ranks of a job"),
    "stacks": ("watch.one_job:stacks", "print the current source line of each rank"),
    "logs": ("watch.one_job:logs", "print what a job of launch --detach prints"),
    "wait": ("watch.one_job:wait", "wait until a job of launch --detach has ended"),
    "stop": ("watch.one_job:stop", "stop a job, as Ctrl-C does"),
    "hosts": ("hosts.main", "check hosts, and work on all of them"),
    "doctor": ("doctor.main", "check the hosts before a job"),
    "explain": ("explain.main", "say why a job failed, from its log"),
    "checkpoints": ("checkpoints.main", "look after the checkpoints of a run"),
    "drill": ("drill.main", "rehearse a script with faults, and compare its resumed runs"),
    "bench": ("bench.main", "measure how a script scales, and the all-reduce"),
}

# The groups of `mpiddp --help`, by their first verbs.
HEAD = {"launch": "run", "ps": "watch", "hosts": "hosts", "explain": "after a run", "drill": "more"}

# Verbs that other verbs and mpiddp.spawn start. No help lists them.
INTERNAL_VERBS = {"launch-function": "launch.main:launch_function"}

# The errors of a stdout whose reader has gone away, or whose disk is full.
_OF_STDOUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)

# The verbs that every rank of a job runs.
RANK_VERBS = ("run", "train")
_HELP = frozenset(("-h", "--help", "--help-all"))  # of `train`: it needs neither a launch nor ranks


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Bad input prints one sentence on stderr and returns exit code 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args and args[0].startswith(("--local-rank", "--local_rank")):
        # torch.distributed.launch puts the rank before the user's arguments; the environment has it too.
        del args[0]
    verb, *rest = args or ["--help"]
    if verb == "help":
        verb, *rest = [*rest[:1], "--help"]
    if verb == "run" and not _is_rank():
        verb = "launch"
    if verb == "train" and not _is_rank() and _HELP.isdisjoint(rest):
        from mpiddp.launch.plan.options import launch_of_train

        if (launch := launch_of_train(rest)) is not None:
            verb, rest = "launch", launch
    is_rank = verb in RANK_VERBS
    if verb != "run" and hasattr(sys.stdout, "reconfigure"):  # the stdout of `run` is the script's
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: a path may be any bytes
    try:
        try:
            return _call(verb, rest)
        finally:
            if not is_rank and sys.stdout is not None:  # None if it was closed
                sys.stdout.flush()  # here, where its error can still be handled
    except (UserError, JobFailed) as error:
        # One rank of a job prints the error; other verbs ignore a launcher's variables.
        rank, local_rank = world.likely_ranks(os.environ) if is_rank else (0, 0)
        errors.print_from_one_rank(str(error), rank, local_rank)
        return errors.BAD_INPUT if isinstance(error, UserError) else errors.FAILED
    except (OSError, KeyboardInterrupt) as error:
        if is_rank:  # a script ends as it would under python
            raise
        if isinstance(error, KeyboardInterrupt):
            errors.print_error("interrupted")
            return errors.INTERRUPTED
        if error.filename is None and error.errno == errno.ENOENT:  # only os.getcwd() raises this
            errors.print_error(with_fix("this folder has been removed.", "change to another"))
            return errors.BAD_INPUT
        if (limit := errors.of_limit(error)) is not None:
            errors.print_error(limit)
            return errors.FAILED
        if error.filename is not None or error.errno not in _OF_STDOUT:
            raise
        if error.errno != errno.EPIPE:
            errors.print_error(f"stdout: {error.strerror}.")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python's flush at exit succeeds
        return errors.FAILED


def _is_rank() -> bool:
    """Whether a launcher has started this process as a rank, and not as the shell of `srun --pty`."""
    if "SLURM_PTY_PORT" in os.environ and os.environ.get("SLURM_TASK_PID") != str(os.getpid()):
        from mpiddp.hosts.allocations import in_slurm_terminal  # takes 10 ms of each rank

        if in_slurm_terminal(os.environ):
            return False
    return world.is_rank(os.environ)


def _call(verb: str, args: list[str]) -> int:
    if verb in ("-h", "--help"):
        print(_usage())
        return errors.DONE
    if verb in ("-V", "--version", "version"):
        from mpiddp import __version__

        print(f"mpiddp {__version__}")
        return errors.DONE
    modules = {name: module for name, (module, _) in VERBS.items()} | INTERNAL_VERBS
    if verb not in modules:
        hint = _hint(verb, args) or f" Expected one of: {', '.join(VERBS)}."
        raise UserError(f'mpiddp: unknown command "{verb}".{hint}')
    module, _, function = modules[verb].partition(":")
    try:
        main = getattr(import_module(f"mpiddp.{module}"), function or "main")
        if verb == "train" and _HELP.isdisjoint(args):
            from mpiddp.runtime.script import run_trainer

            return run_trainer(main, args)
        return int(main(args))
    except ModuleNotFoundError as error:
        if sentence := errors.missing_package(error, f"mpiddp {verb}"):
            raise UserError(sentence) from None
        raise


def _hint(verb: str, args: list[str]) -> str:
    """A hint for a word that is no verb, "" if nothing is similar."""
    if verb.startswith("-") or verb.endswith(".py"):
        launch = f" Did you mean: mpiddp launch {shlex.join([verb, *args])}"
        return did_you_mean(verb, ("--help", "--version")) or launch
    if verb in ("kill", "cancel", "end"):  # the most similar name is "drill", which injects faults
        return ' Did you mean "stop"?'
    return did_you_mean(verb, VERBS)


def _usage() -> str:
    lines = []
    for verb, (_, purpose) in VERBS.items():
        lines += [f"\n{HEAD[verb]}:"] if verb in HEAD else []
        lines.append(f"  {verb:<12} {purpose}")
    table = "\n".join(lines)
    return (
        "usage: mpiddp COMMAND [options]\n\n"
        "One mpirun starts your PyTorch script on every GPU of several machines.\n"
        f"{table}\n\n"
        "example: mpiddp launch -H node1:4,node2:4 train.py --lr 0.1\n"
        "See: mpiddp COMMAND --help, mpiddp --version"
    )
