"""The docstrings of the public names describe every parameter, and the reference of them can be built.

Tests docs/api_reference.py.
python -m pytest tests/docs/test_api_reference.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import mpiddp
from docs import api_reference
from docs.api_reference import of_class, of_function


def test_every_public_name_is_described() -> None:
    assert api_reference.problems() == []


def good(first: int, *rest: int, last: int = 0, **others: int) -> None:
    """A function.

    Args:
        first: a number.
        rest, last: others,
            example: more.
        others: by name.

    Raises:
        ValueError: none of them.
    """


def short(first: int) -> None:
    """A function whose parameter is not described."""


def wrong(first: int) -> None:
    """A function.

    Args:
        second: it has none.
    """


def bare() -> None: ...


@dataclass
class Record:
    """A record.

    Attributes:
        first: a number.
    """

    first: int
    second: int

    def method(self, third: int) -> None: ...

    @property
    def size(self) -> int:
        return 1

    def _own(self) -> None: ...


class Made:
    def __init__(self, first: int) -> None:
        """
        Args:
            first: a number.
        """

    @classmethod
    def make(cls, second: int) -> None:
        """Make one."""


def test_the_rules_of_a_function() -> None:
    """The test above can fail."""
    assert list(of_function(good, "good")) == []
    assert list(of_function(partial(good, 1), "good")) == []
    assert list(of_function(short, "short")) == ["short: its docstring does not describe first."]
    assert list(of_function(wrong, "wrong")) == [
        "wrong: its docstring does not describe first.",
        "wrong: its docstring describes second, which it does not have.",
    ]
    assert list(of_function(bare, "bare")) == ["bare has no docstring."]


def test_the_rules_of_a_class() -> None:
    assert list(of_class(Record, "Record")) == [
        "Record: its docstring does not describe second.",
        "Record.method has no docstring.",
        "Record.method: its docstring does not describe third.",
        "Record.size has no docstring.",
    ]
    assert list(of_class(Made, "Made")) == [
        "Made has no docstring.",
        "Made.make: its docstring does not describe second.",
    ]


def test_a_variable_has_its_docstring_below_it() -> None:
    resnet = api_reference.loaded("mpiddp.train.resnet")
    assert "resnet18" in api_reference.variable_docstring(resnet, "ARCHS")
    assert api_reference.variable_docstring(resnet, "BLOCKS") == ""


def test_the_pages_have_all_public_names(tmp_path: Path) -> None:
    pytest.importorskip("pdoc", reason="pip install -c constraints.txt pdoc")
    api_reference.build(tmp_path)
    page = (tmp_path / "mpiddp.html").read_text()
    for name in mpiddp.__all__:
        assert f'id="{name}"' in page, name
    assert re.search(r"<strong>max_result_bytes:</strong>", page)
    assert 'id="ARCHS"' in (tmp_path / "mpiddp/train/resnet.html").read_text()
    pages = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")}
    assert pages == {"index.html", "mpiddp.html", "mpiddp/train/resnet.html"}
