"""The variables that a user passes to the ranks: --env-file, and patterns of -x.

Tests mpiddp/launch/env_file.py, mpiddp/launch/starters/environment.py.
python -m pytest tests/unit/launch/test_env_file.py
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.launch.env_file import parse_env_file, read_env_file
from mpiddp.launch.options import parse_options
from mpiddp.launch.starters.environment import left_out_hint, parse_exports

FILE = r"""
# a comment
PLAIN=one
export EXPORTED=three   # a comment after a blank, which doesn't count
HASH=a#b
EMPTY=
SINGLE='as $written \n # ${HOME}' # comment
DOUBLE="two words \"quoted\" $5 \\ #"
URL=postgres://u:p@h/db?a=b&c=$d
HERE
"""

EXPECTED = (
    "f:2: expected NAME=VALUE, a name alone, or a # comment. "
    "A value with blanks stands between quotes."
)
UNCLOSED = (
    "f:2: a quote is not closed. A value is on one line, and an apostrophe or a backslash in it stands "
    "between quotes."
)


def test_the_format_of_the_file() -> None:
    assert dict(each.split("=", 1) for each in parse(FILE)[:-1]) == {
        "PLAIN": "one",
        "EXPORTED": "three",
        "HASH": "a#b",
        "EMPTY": "",
        "SINGLE": r"as $written \n # ${HOME}",
        "DOUBLE": 'two words "quoted" $5 \\ #',
        "URL": "postgres://u:p@h/db?a=b&c=$d",
    }
    assert parse(FILE)[-1] == "HERE"


def test_windows_line_endings_and_a_byte_order_mark_do_no_harm() -> None:
    assert tuple(parse_env_file(b"\xef\xbb\xbfA=1\r\nB='2'\r\n", "f", {})) == ("A=1", "B=2")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("two words", EXPECTED),
        ("A=private value", EXPECTED),
        ("A = private-value", EXPECTED),
        ("=private-value", EXPECTED),
        ("1A=private-value", EXPECTED),
        ("A-B=private-value", EXPECTED),
        ("A=\0private-value", EXPECTED),
        ("GONE", "f:2: GONE is not set here. Write: GONE=VALUE"),
        ('A="private-value', UNCLOSED),
        ("A=it's private-value", UNCLOSED),
        ("A=private-value\\", UNCLOSED),
        (
            "A=${HOME}/private-value",
            "f:2: the value of A contains ${…}, which is not expanded here. Write the value itself, or "
            "put it between single quotes: A='…'",
        ),
        (
            'A="${HOME}/private-value"',
            "f:2: the value of A contains ${…}, which is not expanded here. Write the value itself, or "
            "put it between single quotes: A='…'",
        ),
    ],
)
def test_a_bad_line_is_one_sentence_without_the_value(line: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        parse(f"OK=1\n{line}\n")
    assert str(error.value) == sentence


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^f:2: not UTF-8 text\.$"):
        tuple(parse_env_file(b"A=1\nB=\xff\n", "f", {}))
    with pytest.raises(UserError, match=r"^--env-file .*/gone: No such file or directory\.$"):
        read_env_file(f"{tmp_path}/gone", {})
    too_large = r"^--env-file /dev/zero: larger than 1 MiB: not a file of variables\.$"
    with pytest.raises(UserError, match=too_large):
        read_env_file("/dev/zero", {})


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """As `--env-file <(pass show wandb)` has it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=("A=1\n",)).start()
    how = parse_options(["--env-file", str(pipe), "-x", "B=2", __file__]).how
    assert how.all_exports == ("A=1", "B=2")


def test_a_name_takes_precedence_over_a_file_and_both_over_a_pattern() -> None:
    env = {"APP_A": "here", "APP_B": "here", "APP_KEY": "private-value"}
    exports = ["APP_A=file", "APP_B=file", "APP_B=option", "APP_*"]
    assert parse_exports(exports, env) == {"APP_A": "file", "APP_B": "option"}


def test_a_pattern_passes_no_variable_that_may_be_a_secret() -> None:
    env = dict.fromkeys(("WANDB_MODE", "WANDB_API_KEY", "WANDB_DIR", "BASH_FUNC_WANDB_%%"), "")
    assert parse_exports(["WANDB_*"], env) == {"WANDB_MODE": None, "WANDB_DIR": None}
    assert parse_exports(["*NDB_?ODE"], env) == {"WANDB_MODE": None}
    assert left_out_hint(["WANDB_*"], env) == (
        "a pattern passes no secret: WANDB_API_KEY may be one. To pass it by name: -x WANDB_API_KEY"
    )
    assert left_out_hint(["WANDB_*", "WANDB_API_KEY"], env) == ""
    assert "WANDB_API_KEY" in parse_exports(["WANDB_*", "WANDB_API_KEY"], env)


@pytest.mark.parametrize(
    ("export", "sentence"),
    [
        ("NO_SUCH_*", "-x 'NO_SUCH_*': no variable here has such a name."),
        ("*", '-x *: "*" is not a valid variable name. Example: -x DEBUG=1'),
        ("A*=private-value", '-x A*=…: "A*" is not a valid variable name. Example: -x DEBUG=1'),
    ],
)
def test_a_bad_pattern_is_one_sentence(export: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        parse_exports([export], {"A": "1"})
    assert str(error.value) == sentence


def parse(text: str) -> tuple[str, ...]:
    return tuple(parse_env_file(text.encode(), "f", {"HERE": "x"}))
