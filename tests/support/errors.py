"""A pattern of an error: words of its sentence, and the values that a user gave."""

import re
from collections.abc import Callable

import pytest

from mpiddp.errors import UserError


def error(words: str, *values: str) -> str:
    """One line that shows these words, and these values in this order.

    `re.fullmatch` asserts that nothing stands before or after it.
    """
    shown = "".join(r"[^\n]*?" + re.escape(value.rstrip(" ")) for value in values)
    return rf"(?=[^\n]*{re.escape(words)}){shown}[^\n]*"


def refusal(call: Callable[[], object]) -> str:
    """The sentence with which the call refuses bad input."""
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)
