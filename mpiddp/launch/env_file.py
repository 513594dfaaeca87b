"""The file of --env-file: variables for the ranks, whose values are on no command line.

    # comments and blank lines are left out
    WANDB_API_KEY=0123abcd
    export HF_HOME=/data/hf        # a comment after a blank
    GREETING="two words"           # \\n, \\t, \\", \\\\ and \\$ are escapes between double quotes
    PATTERN='as $written'
    HTTPS_PROXY                    # a name alone: the value of the launcher's environment

This is the format of python-dotenv, without values over several lines and without expansion: a `${NAME}`
outside single quotes is refused, because python-dotenv would replace it. No error shows a part of a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mpiddp.errors import UserError
from mpiddp.paths import named_by

_MAX_BYTES = 1 << 20
_LINE = re.compile(r"(?:export[ \t]+)?(?P<name>[A-Za-z_][A-Za-z0-9_]*)[ \t]*(?P<rest>.*)")
_QUOTED = re.compile(r"""(?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)")[ \t]*(?:\#.*)?""")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\", "$": "$"}


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
        content = line.strip(" \t\r")
        if content and not content.startswith("#"):
            variable = _variable(f"{source}:{number}", content)
            if "=" not in variable and variable not in env:
                raise UserError(
                    f"{source}:{number}: {variable} is not set here. Write: {variable}=VALUE"
                )
            yield variable


def _variable(where: str, line: str) -> str:
    """The variable of one line: VAR=VALUE or VAR."""
    found = _LINE.fullmatch(line)
    rest = found["rest"] if found else ""
    if found is None or (rest and rest[0] not in "=#") or "\0" in line:
        raise UserError(f"{where}: expected NAME=VALUE, a name alone, or a # comment.")
    if not rest.startswith("="):
        return found["name"]
    return f"{found['name']}={_value(where, found['name'], rest[1:].lstrip(' 	'))}"


def _value(where: str, name: str, text: str) -> str:
    if not text.startswith(("'", '"')):
        value = re.sub(r"(^|[ \t]+)#.*", "", text)
        _refuse_expansion(where, name, value)
        return value
    quoted = _QUOTED.fullmatch(text)
    if quoted is None:
        raise UserError(
            f"{where}: the value of {name} has no closing quote, or text after it. A value is on one "
            r"line; \n between double quotes is the end of a line."
        )
    if quoted["double"] is None:
        return quoted["single"]
    # "\$" keeps a dollar sign; what remains of "${" would be expanded elsewhere.
    _refuse_expansion(where, name, re.sub(r"\\.", "", quoted["double"]))
    return re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[0]), quoted["double"])


def _refuse_expansion(where: str, name: str, value: str) -> None:
    if "${" in value:
        raise UserError(
            f"{where}: the value of {name} contains ${{…}}, which is not expanded here. Write the value "
            f"itself, or put it between single quotes: {name}='…'"
        )
