"""The text functions that several parts of the program share: durations, tables."""

import pytest

from mpiddp.text import escaped, parse_duration, parse_whole, shown


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("0.5", 0.5), (".5m", 30), ("90s", 90), ("55m", 3300), ("1.5h", 5400)],
)
def test_parse_duration(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "0s", "-1", "1d", "s", "1e3", "²s", "5.", "nan", "86400001", "9" * 5000 + "h"]
)
def test_parse_duration_rejects(text):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


def test_parse_whole():
    assert [parse_whole(text) for text in ("0", "007", "0" * 5000, "999999999")] == [
        0,
        7,
        0,
        10**9 - 1,
    ]
    assert parse_whole("4294967295", high=1 << 32) == (1 << 32) - 1


@pytest.mark.parametrize(
    ("text", "low", "high", "expectation"),
    [
        ("", 0, 9, "a whole number, 0 or more"),
        ("²", 1, 9, "a whole number, 1 or more"),
        ("0", 1, 9, "a whole number, 1 or more"),
        ("9", 0, 9, "a whole number, 0 or more and less than 9"),
        ("9" * 400, 0, 10**9, "a whole number, 0 or more and less than 1000000000"),
        ("9" * 5000, 0, 9, "a whole number, 0 or more and less than 9"),
    ],
)
def test_parse_whole_rejects(text, low, high, expectation):
    """int() itself refuses more than 4,300 digits."""
    with pytest.raises(ValueError, match=f"^{expectation}$"):
        parse_whole(text, low, high)


def test_an_error_shows_input_on_one_short_line():
    assert shown("a") == "a"
    assert shown("a\n\udcff") == r"a\n\udcff"
    assert len(shown("9" * 5000)) == len(shown("\n" * 5000)) == 60


def test_characters_that_control_a_terminal_are_escaped():
    assert escaped("\x1b[31m\x07 \r\n\x7f\x9b") == r"\x1b[31m\x07 \r\n\x7f\x9b"
    assert escaped("a\u202eb\u2066c\u2028d\u200f") == r"a\u202eb\u2066c\u2028d\u200f"
    assert escaped("a\nb\rc", keep="\n") == "a\nb\\rc"
    plain = "é ü 日本 ✓ … \t 'x' \\ \N{ZERO WIDTH JOINER}"
    assert escaped(plain) == plain
