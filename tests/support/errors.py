"""A pattern of an error: words of its sentence, and the values that a user gave."""

import re
from collections.abc import Callable

import pytest

from mpiddp.errors import UserError
from mpiddp.text import FIX


def error(words: str, *values: str) -> str:
    """One sentence that shows these words, and with the command below it these values in this order.

    `re.fullmatch` asserts that nothing stands before or after it.
    """
    text = rf"(?:[^\n]|\n{FIX})*"
    shown = "".join(f"{text}?{re.escape(value.rstrip(' '))}" for value in values)
    return rf"(?={text}{re.escape(words)}){shown}{text}"


def refusal(call: Callable[[], object]) -> str:
    """The sentence with which the call refuses bad input."""
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)
