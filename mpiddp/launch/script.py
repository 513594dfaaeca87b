"""What each rank runs, as typed: a script, -m and a module, or -- and any program, with its arguments."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.launch import log

# Options that people write behind the script by mistake. With the first, they expect that nothing starts.
_STARTS_NOTHING = ("--dry-run", "--help", "-h")
_MISPLACED = (*_STARTS_NOTHING, "--hostfile", "-H", "-n", "--max-restarts", "--min-hosts")
_OWN_PARSER = re.compile(
    r"\b(argparse|\w*ArgumentParser|click|typer|fire|hydra|absl|tyro|docopt)\b"
)


def refuse_misplaced(job: Sequence[str], verb: str) -> None:
    """Point out an option of the launcher that follows a script whose own parser does not name it."""
    script, *arguments = job
    flags = [each for each in (text.partition("=")[0] for text in arguments) if each in _MISPLACED]
    if not flags or script in ("-m", "--"):
        return
    text = Path(script).read_text(encoding="utf-8", errors="replace").replace("_", "-")
    for flag in flags:
        is_named = re.search(rf"[\"']-*{re.escape(flag.lstrip('-'))}[\"']", text)
        if is_named or (flag in ("--help", "-h") and _OWN_PARSER.search(text)):
            continue
        sentence = (
            f"{flag} comes after {script}, so it goes to the script, which does not mention it."
        )
        if flag in _STARTS_NOTHING:
            raise UserError(
                f"{sentence} Write it before the script: {verb} {flag} {script}. If the script takes it "
                f"all the same: mpiddp launch … -- python {script} {flag}"
            )
        log.info(f"{sentence} Put options of {verb} before the script.")


def value_of(arguments: Sequence[str], option: str) -> str:
    """The value of an option among the arguments of a script: the last one, "" without any."""
    value = ""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == option:
            value = following
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return value


def read_job(module: list[str] | None, script: list[str]) -> tuple[str, ...]:
    """The job of these arguments, of which a script has to exist. Raises UserError."""
    # argparse gives no option a "--", nor what follows it.
    job = script if module is None else ["-m", *module, *script]
    program = "".join(job[:1])
    if not job[program in ("-m", "--") :]:
        raise UserError(
            "nothing to launch. Name a script or a module. Example: mpiddp launch -n 2 train.py, or: "
            "mpiddp launch -n 2 -m mpiddp train"
        )
    if ":" in job:
        raise UserError('an argument of the job is ":", where an mpirun begins another program.')
    if not (program in ("-m", "--") or os.path.isfile(program)):  # noqa: PTH113 - no error
        if os.path.exists(program):  # noqa: PTH110 - no error
            raise UserError(f"{program} is not a regular file. Expected a Python script.")
        hint = (
            f" To start any program: mpiddp launch … -- {program}" if shutil.which(program) else ""
        )
        raise UserError(f"script {program} not found (looked in {Path.cwd()}).{hint}")
    return tuple(job)
