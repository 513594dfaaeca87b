"""A command line of mpirun behind `mpiddp launch` comes in, and the same in mpiddp's words goes out.

    mpiddp launch -np 4 -hostfile hosts -bind-to none -map-by slot -mca pml ob1 python main.py
    mpiddp launch -np 4 -hostfile hosts main.py

mpirun.txt has the options of mpirun. Those of `mpiddp launch` with the same meaning stay as they are.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mpiddp.arguments import long_form
from mpiddp.errors import UserError
from mpiddp.text import all_of, with_fix

_PYTHON = re.compile(r"(.*/)?python[0-9.]*")


def table(name: str) -> dict[str, str]:
    """A file of this folder: a comment, then a row for each line, with two spaces between its columns."""
    rows = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()[1:]
    return dict(row.split("  ", 1) for row in rows)


class Line(NamedTuple):
    """A command line in mpiddp's words."""

    argv: list[str]
    left_out: list[str]  # options that have no meaning here
    note: str = ""  # about its program

    def sentences(self, shown: Sequence[str]) -> list[str]:
        """What to tell the user, with the command line without its secrets."""
        without = f"without meaning here: {all_of(self.left_out)}. " if self.left_out else ""
        same = f"{without}{'The same' if without else 'the same'} in mpiddp's words: {shlex.join(['mpiddp', 'launch', *shown])}"
        return [same, *filter(None, [self.note])]


def in_our_words(argv: Sequence[str], options: Mapping[str, argparse.Action]) -> Line:
    """The command line `argv` without options of mpirun, before which `options` of a launch may stand.

    Raises one UserError for all options that would change where or how the ranks run.
    """
    rest, ours, left_out, refused = [*argv], list[str](), list[str](), list[str]()
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--"):
        name, equals, _ = rest[0].partition("=")
        name = long_form(name)
        count = _number_of_values(name)
        is_of_mpirun = count is not None and name not in options
        if not is_of_mpirun:
            action = options.get(rest[0].partition("=")[0], options.get(name))
            count = int(action is not None and action.nargs != 0)
        taken = rest[: 1 + (count or 0) - bool(equals and count)]
        del rest[: len(taken)]
        if not is_of_mpirun:
            ours += taken
            continue
        words = [name, *([taken[0].partition("=")[2]] if equals else []), *taken[1:]]
        meaning = _meaning(" ".join(words))
        if meaning.startswith("!"):
            where = f"{shlex.join(taken)} would change where or how the ranks run."
            refused.append(with_fix(where, meaning[2:]))
        elif meaning == "-":
            left_out.append(shlex.join(taken))
        else:
            ours += meaning.split(" ", 1)
    if refused:
        raise UserError("\n".join(refused))
    program, note = _program(rest)
    return Line([*ours, *program], left_out, note)


@cache
def _rows() -> Mapping[str, str]:
    return table("mpirun.txt")


def _number_of_values(name: str) -> int | None:
    """The number of values of an option of mpirun, None for any other option."""
    heads = ((pattern.split(" ")[0], pattern.count(" ")) for pattern in _rows())
    return next((count for head, count in heads if re.fullmatch(head, name)), None)


def _meaning(text: str) -> str:
    """The words of a launch for an option with its values; an incomplete option is left to mpiddp's parser."""
    for pattern, words in _rows().items():
        if match := re.fullmatch(pattern, text, re.DOTALL):
            return match.expand(words)
    return text


def _program(job: Sequence[str]) -> tuple[Sequence[str], str]:
    """The job of `python main.py`: the script, if this Python would run it, else a command, with a note."""
    name = "".join(job[:1])
    python = shutil.which(name) if _PYTHON.fullmatch(name) else None
    if python is None or (os.path.exists(name) and os.sep not in name):  # noqa: PTH110
        return job, ""
    rest = [*job[1:]]
    if not rest:
        return job, ""
    while rest[:1] == ["-u"]:  # the output of ranks is never late
        del rest[0]
    is_ours = os.path.realpath(Path(python).parent) == os.path.realpath(Path(sys.executable).parent)
    if is_ours and rest and (rest[0] == "-m" or not rest[0].startswith("-")):
        return rest, ""
    why = "has options of its own" if is_ours else f"is not the Python of mpiddp, {sys.executable}"
    sees = "mpiddp counts no steps in it, and cannot say where it hangs"
    return ["--", *job], f"{name} {why}, so it runs as a command: {sees}."
