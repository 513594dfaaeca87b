"""Whatever the text from outside, a parser returns or raises its documented error, in bounded time.

tests/support/outside_text.py lists the parsers. `--hypothesis-profile=long` tries more inputs.
python -m pytest tests/integration/test_parsers.py
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.outside_text import PARSERS, Parser

# The same inputs in every run; no database of failures.
IN_THE_SUITE = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
IS_LONG = settings.get_current_profile_name() == "long"
LONG = 50_000  # repeats: a parser whose time grows with the square of the length takes minutes


@pytest.mark.parametrize("name", PARSERS)
def test_any_text_gives_a_value_or_the_documented_error(name: str) -> None:
    @(settings() if IS_LONG else IN_THE_SUITE)
    @given(PARSERS[name].inputs)
    def check(text: object) -> None:
        PARSERS[name].check(text)

    check()


@pytest.mark.parametrize("name", PARSERS)
def test_a_long_text_takes_little_time(name: str) -> None:
    for unit in ("1", " ", ":", "[", "a,", "[1],", "\n", "=", "0.", "a:1 \n", "{", '"'):
        for end in ("", "x"):
            _check_in_any_form(PARSERS[name], unit * LONG + end)


def _check_in_any_form(parser: Parser, text: str) -> None:
    """Check `text` in the form that the parser takes: text, bytes, or a list of arguments."""
    kind = type(_one_input(parser))
    if kind is str:
        parser.check(text)
    elif kind is bytes:
        parser.check(text.encode())
    elif kind is list:
        parser.check([text])


def _one_input(parser: Parser) -> object:
    found: list[object] = []

    @settings(IN_THE_SUITE, max_examples=1)
    @given(parser.inputs)
    def keep(text: object) -> None:
        found.append(text)

    keep()
    return found[0]


@pytest.mark.parametrize("wrong", [RuntimeError("a bug"), OverflowError("a bug")])
def test_the_test_notices_an_error_that_is_not_documented(wrong: Exception) -> None:
    def fail(text: str) -> None:
        raise wrong

    with pytest.raises(type(wrong)):
        Parser(fail, st.text(), (ValueError,)).check("")
    Parser(fail, st.text(), (type(wrong),)).check("")  # raises nothing: it is documented
