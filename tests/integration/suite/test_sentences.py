"""The sentences of errors: each has an id, all stand in one file, and a test names each.

Tests tests/data/sentences.txt, which `python -m tests.support.sentences --update` writes.
python -m pytest tests/integration/suite/test_sentences.py
"""

from __future__ import annotations

import ast
import re

import pytest

from tests.integration.suite import test_rules_of_tests
from tests.support.sentences import (
    GOLDEN,
    error,
    golden,
    repeated,
    sentences,
    text_of,
    untested,
    without_id,
)


def test_the_file_has_the_sentences_of_the_package() -> None:
    now = golden(sentences())
    assert GOLDEN.read_text() == now, "python -m tests.support.sentences --update; git diff"


def test_each_error_has_an_id() -> None:
    assert without_id() == []


def test_a_test_names_each_id() -> None:
    assert untested(sentences()) == []


def test_no_test_repeats_a_sentence() -> None:
    """So a better sentence is one diff, in the file above."""
    assert repeated(sentences()) == []


def test_what_is_untested_or_repeated_is_found() -> None:
    told = {"a-zebra": "{}: the zebra has {} odd stripes.", "host-dash": "{} reaches {}. Refused."}
    assert untested(told) == ["a-zebra"]
    same = (test_rules_of_tests.__doc__ or "").partition("\n")[0]
    assert repeated({"a-host": f"{{}}: {same}: {{}}."}) == ["a-host"]


@pytest.mark.parametrize(
    ("text", "is_it"),
    [
        ("hosts.txt: no host a-b [the-id]", True),
        ("first line\nhosts.txt: a-b [the-id]\nlast line", True),
        ("hosts.txt: no host a-b [the-id-2]", False),
        ("hosts.txt: no host [the-id]", False),
        ("a-b: not in hosts.txt [the-id]", False),
        ("hosts.txt: a-b\n[the-id]", False),
    ],
)
def test_the_pattern_of_an_error(text: str, is_it: bool) -> None:
    assert bool(re.search(error("the-id", "hosts.txt", "a-b"), text)) == is_it


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("'a' 'b'", "ab"),
        ("f'a {b!r} c' f'{d}'", "a {} c{}"),
        ("'a ' + b", "a {}"),
        ("b + f'{c} d'", "{}{} d"),
        ("b", None),
        ("str(b)", None),
    ],
)
def test_the_text_of_an_error(source: str, text: str | None) -> None:
    assert text_of(ast.parse(source, mode="eval").body) == text
