"""Several names, a number of things, or the nearest known name, in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """' Did you mean "launch"?' for "lauch"; "" where no known name is near."""
    from difflib import get_close_matches  # only an error needs it

    nearest = get_close_matches(name, list(known), n=1)
    return f' Did you mean "{nearest[0]}"?' if nearest else ""
