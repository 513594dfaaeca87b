"""Several names, or a number of things, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence


def listed(words: Sequence[str], most: int = 8) -> str:
    """The first of many words, as an error may show them."""
    more = f", and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def all_of(words: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def counted(number: int, noun: str) -> str:
    """ "1 host", "2 hosts"."""
    return f"{number} {noun}{'s' * (number != 1)}"
