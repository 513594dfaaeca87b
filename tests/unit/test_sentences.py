"""The sentences of errors: all stand in one file, and a test holds each.

Tests tests/data/sentences.txt, which `python -m tests.support.sentences --update` writes.
python -m pytest tests/unit/test_sentences.py
"""

from __future__ import annotations

import ast

import pytest

from tests.support.sentences import GOLDEN, golden, sentences, text_of, untested


def test_the_file_has_the_sentences_of_the_package() -> None:
    now = golden(sentences())
    assert GOLDEN.read_text() == now, "python -m tests.support.sentences --update; git diff"


def test_a_test_holds_each_sentence() -> None:
    assert untested(sentences()) == []


def test_a_sentence_that_no_test_holds_is_found() -> None:
    told = {"a:f": "{}: the zebra has {} odd stripes.", "a:g": "{}: expected {}."}
    assert untested(told) == ["a:f"]


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
