"""The file of --env-file: variables for the ranks, whose values are on no command line.

    # comments and blank lines are left out
    WANDB_API_KEY=0123abcd
    export HF_HOME=/data/hf        # a comment after a blank
    GREETING="two words"
    PATTERN='as $written'
    HTTPS_PROXY                    # a name alone: the value of the launcher's environment

Each line is read as a shell reads an assignment, but nothing is expanded: a `${NAME}` outside single quotes
is refused, because a shell would replace it. No error shows a part of a value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.paths import named_by

_MAX_BYTES = 1 << 20
_VARIABLE = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?:=(?P<value>.*))?", re.DOTALL)


def read_env_file(path: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """The variables of the file as -x has them: VAR=VALUE, or VAR for the value in `env`.

    Raises:
        UserError: the file cannot be read, a line is not in this format, or VAR is not in `env`.
        JobFailed: a file server failed.
    """
    option = f"--env-file {path}"
    with named_by("--env-file"), Path(path).open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise UserError(f"{option}: larger than {_MAX_BYTES >> 20} MiB: not a file of variables.")
    return tuple(parse_env_file(data, path, env))


def parse_env_file(data: bytes, source: str, env: Mapping[str, str]) -> Iterator[str]:
    """The variables in a file's bytes, as `read_env_file`. `source` is the file's name in errors."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{source}:{number}: not UTF-8 text.") from None
    for number, line in enumerate(text.split("\n"), start=1):
        variable = _variable(f"{source}:{number}", line.strip(" \t\r"))
        if variable and "=" not in variable and variable not in env:
            raise UserError(
                f"{source}:{number}: {variable} is not set here. Write: {variable}=VALUE"
            )
        if variable:
            yield variable


def _variable(where: str, line: str) -> str:
    """The variable of one line, VAR=VALUE or VAR; "" if there is none."""
    if line.startswith("#"):
        return ""
    words = shlex.shlex(line, posix=True, punctuation_chars=False)
    words.whitespace_split = True
    words.commenters = ""  # a "#" within a word is a part of it, as in a password
    try:
        found = list(takewhile(lambda word: not word.startswith("#"), words))
    except ValueError:
        raise UserError(
            f"{where}: a quote is not closed. A value is on one line, and an apostrophe or a backslash in "
            "it needs quotes."
        ) from None
    found = found[1:] if found[:1] == ["export"] else found
    if not found:
        return ""
    variable = _VARIABLE.fullmatch(found[0])
    if len(found) > 1 or variable is None or "\0" in line:
        raise UserError(
            f"{where}: expected NAME=VALUE, a name alone, or a # comment. A value with blanks needs "
            "quotes around it."
        )
    # Between single quotes it is no expansion.
    if "${" in (variable["value"] or "") and "${" in re.sub("'[^']*'", "", line):
        raise UserError(
            f"{where}: the value of {variable['name']} contains ${{…}}, which is not expanded here. Write "
            f"the value itself, or put it between single quotes: {variable['name']}='…'"
        )
    return found[0]
