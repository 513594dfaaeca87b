"""What each rank runs, as typed: a script, -m and a module, or -- and any program, with its arguments."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.hosts.program_files import import_folders, texts_of
from mpiddp.text import FIX, all_of, did_you_mean

# If a script uses one of these libraries, a field, a parameter or a line of a docstring may be an option.
_TAKES_NAMES = re.compile(r"\b(HfArgumentParser|click|typer|fire|hydra|absl|tyro|docopt)\b")


def refuse_misplaced(
    job: Sequence[str], options: Mapping[str, argparse.Action], before: Sequence[str], verb: str
) -> None:
    """Raise UserError for options of the launcher behind a script or a module that does not take them itself.

    It accepts all arguments of a command, of a module whose source is not on this host, and after "--".

    Args:
        job: as `read_job` returns it.
        options: of the launcher, by spelling.
        before: what was typed before the job, without secrets, because it is printed.
        verb: such as "mpiddp launch".
    """
    kind, *names = {"-m": ["module"], "--": ["command"]}.get(job[0], ["script", job[0]])
    name, *arguments = [*names, *job[1:]]
    if kind == "command" or name == "mpiddp":  # whose verbs refuse what they do not take
        return
    flags = [word.partition("=")[0] for word in itertools.takewhile("--".__ne__, arguments)]
    flags = [flag for flag in flags if flag in options and not _is_named(flag, kind, name)]
    if flags:
        moved, kept = split(arguments, {flag: options[flag] for flag in flags})
        program = ["-m", name] if kind == "module" else [name]
        right = shlex.join([*verb.split(), *before, *moved, *program, *kept])
        python = shlex.join(["python", *program, *arguments])
        sentence = (
            f"{name} does not mention {all_of(flags)}, and an option after {name} goes to {name}."
        )
        raise UserError(
            sentence,
            fix=f"{right}\n{FIX}if {name} takes it all the same: mpiddp launch … -- {python}",
        )


def split(
    arguments: Sequence[str], options: Mapping[str, argparse.Action]
) -> tuple[list[str], list[str]]:
    """The arguments that are `options`, with their values; and all others. From "--" on, all are others."""
    taken, others, rest = list[str](), list[str](), iter(arguments)
    for word in rest:
        flag, equals, _ = word.partition("=")
        if flag in options:
            taken.append(word)
            if options[flag].nargs is None and not equals:
                taken += itertools.islice(rest, 1)
        else:
            others += [word, *rest] if word == "--" else [word]
    return taken, others


def _is_named(flag: str, kind: str, name: str) -> bool:
    """Whether the text of a script or a module, or of a file that it imports, has this option."""
    texts = texts_of(kind, name, str(Path.cwd()), import_folders())
    if not texts or flag in ("-h", "--help"):
        return True  # there is no source to read, or every script may have the option
    bare = re.escape(flag.lstrip("-").replace("_", "-"))
    return any(
        re.search(rf"[\"']-*{bare}[\"'=]", text)
        or (_TAKES_NAMES.search(text) and re.search(rf"(?<![\w-]){bare}(?![\w-])", text))
        for text in (text.decode(errors="replace").replace("_", "-") for text in texts)
    )


def read_job(module: list[str] | None, script: list[str]) -> tuple[str, ...]:
    """The job of these arguments, of which a script has to exist. Raises UserError."""
    # argparse gives "--" and all words after it to `script`, even if they follow -m.
    job = script if module is None else ["-m", *module, *script]
    program = "".join(job[:1])
    if not job[program in ("-m", "--") :]:
        sentence = "nothing to launch: expected a script, a module or a command."
        raise UserError(
            sentence, fix="mpiddp launch -n 2 train.py, or mpiddp launch -n 2 -m mpiddp train"
        )
    if ":" in job:
        raise UserError('an argument of the job is ":", where an mpirun begins another program.')
    files = (program, os.path.join(program, "__main__.py"))  # noqa: PTH118
    if not (program in ("-m", "--") or any(map(os.path.isfile, files))):
        if os.path.exists(program):  # noqa: PTH110 - no error
            raise UserError(f"{program} is not a regular file. Expected a Python script.")
        runs_script = "python" in program and any(map(os.path.isfile, job[1:2]))
        words = job[1:] if runs_script else ["--", *job]
        fix = f"mpiddp launch … {shlex.join(words)}" if shutil.which(program) else ""
        hint = did_you_mean(program, (path.name for path in Path().glob("*.py")))
        raise UserError(f"script {program} not found (looked in {Path.cwd()}).{hint}", fix=fix)
    return tuple(job)
