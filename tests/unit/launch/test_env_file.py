"""The variables that a user passes to the ranks: --env-file, and patterns of -x.

Tests mpiddp/launch/env_file.py, mpiddp/launch/starters/environment.py.
python -m pytest tests/unit/launch/test_env_file.py
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.launch.env_file import parse_env_file, read_env_file
from mpiddp.launch.options import parse_options
from mpiddp.launch.starters.environment import left_out_hint, parse_exports
from tests.support.errors import error

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

EXPECTED = error("expected NAME=VALUE", "f:2: ", "NAME=VALUE")
UNCLOSED = error("quote is", "f:2: ")
BRACES = error("which is", "f:2: ", " A ", "${…}", ": A='…'")


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
        ("GONE", error("set here", "f:2: GONE ", "Write: GONE=VALUE")),
        ('A="private-value', UNCLOSED),
        ("A=it's private-value", UNCLOSED),
        ("A=private-value\\", UNCLOSED),
        ("A=${HOME}/private-value", BRACES),
        ('A="${HOME}/private-value"', BRACES),
    ],
)
def test_a_bad_line_is_one_sentence_without_the_value(line: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        parse(f"OK=1\n{line}\n")
    assert re.fullmatch(sentence, str(refused.value))
    assert "private" not in str(refused.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    not_text = error("not UTF-8", "f:2: ")
    with pytest.raises(UserError, match=f"^{not_text}$"):
        tuple(parse_env_file(b"A=1\nB=\xff\n", "f", {}))
    gone = error(":", "--env-file ", "/gone: No such file or directory")
    with pytest.raises(UserError, match=f"^{gone}$"):
        read_env_file(f"{tmp_path}/gone", {})
    too_large = error("of variables", "--env-file /dev/zero: ", "1 MiB")
    with pytest.raises(UserError, match=f"^{too_large}$"):
        read_env_file("/dev/zero", {})


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """As `--env-file <(pass show wandb)` has it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    threading.Thread(target=pipe.write_text, args=("A=1\n",)).start()
    how = parse_options(["--env-file", str(pipe), "-x", "B=2", __file__])
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


def parse(text: str) -> tuple[str, ...]:
    return tuple(parse_env_file(text.encode(), "f", {"HERE": "x"}))
