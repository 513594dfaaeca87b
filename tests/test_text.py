"""The text functions that several parts of the program share: durations, percentiles, tables."""

import random
import statistics

import pytest

from mpiddp.text import align_columns, escaped, parse_duration, percentile


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("0.5", 0.5), (".5m", 30), ("90s", 90), ("55m", 3300), ("1.5h", 5400)],
)
def test_parse_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0s", "-1", "1d", "s", "1e3", "²s", "1 h", "5.", "nan"])
def test_parse_duration_rejects(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize("count", [2, 3, 10, 101])
def test_percentiles_equal_those_of_the_standard_library(count: int) -> None:
    draw = random.Random(count)
    values = [draw.random() for _ in range(count)]
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert [percentile(values, percent) for percent in range(1, 100)] == pytest.approx(cuts)
    assert percentile(values, 100) == max(values)


def test_the_percentile_of_one_value_is_that_value() -> None:
    assert percentile([0.3], 95) == 0.3


def test_columns_are_aligned() -> None:
    rows = [("name", "count", ""), ("a", "1,000", "x")]
    assert align_columns(rows) == "name  count\na     1,000  x"
    assert align_columns(rows, right=[1]) == "name  count\na     1,000  x"
    assert align_columns([("a", "1"), ("b", "22")], right=[1]) == "a   1\nb  22"


def test_characters_that_control_a_terminal_are_escaped() -> None:
    assert escaped("\x1b[31m\x07 \r\n\x7f\x9b") == r"\x1b[31m\x07 \r\n\x7f\x9b"
    assert escaped("a\u202eb\u2066c\u2028d\u200f") == r"a\u202eb\u2066c\u2028d\u200f"
    assert escaped("a\nb\rc", keep="\n") == "a\nb\\rc"
    plain = "é ü 日本 ✓ … \t 'x' \\ \N{ZERO WIDTH JOINER}"
    assert escaped(plain) == plain
