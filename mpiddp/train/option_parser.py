"""Options as fields of a dataclass: each is written once, and the parser is made from the fields.

@dataclass(frozen=True, kw_only=True)
class Options:
    lr: float = option("schedule", "peak learning rate", type=number(0), default=0.4)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from mpiddp.text import Interval, parse_interval, parse_whole, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class Option:
    """Everything about an option but its name, which is the field's."""

    group: str  # its heading in --help
    flag: str
    of_steps: bool
    noted: bool
    fixed: str
    keywords: Mapping[str, Any]  # those of argparse's add_argument


def option(
    group: str,
    help: str,
    *,
    flag: str = "",
    of_steps: bool = True,
    noted: bool = False,
    fixed: str = "",
    **keywords: Any,
) -> Any:
    """A field of a dataclass that is an option.

    Args:
        help: the text in --help, which shows the choices and the default beside it.
        flag: its spelling, by default the field's name with dashes.
        of_steps: False for the length of a run, its files and its checks, which single steps do not have.
        noted: a resume with another value changes the steps that follow, and says so.
        fixed: why a resume may not change it; "" if it may.
        keywords: further arguments of argparse's add_argument. The default is None unless given.
    """
    about = Option(group, flag, of_steps, noted, fixed, {"help": help, **keywords})
    return field(metadata={"option": about})


def options_of(record: type[DataclassInstance]) -> dict[str, Option]:
    """The options of the record, by the name of their field."""
    return {each.name: each.metadata["option"] for each in fields(record)}


def flag_of(name: str, about: Option) -> str:
    return about.flag or f"--{name.replace('_', '-')}"


def add_options(parser: argparse.ArgumentParser, record: type[DataclassInstance]) -> None:
    """Add every option of the record, in its group."""
    groups: dict[str, Any] = {}
    for name, about in options_of(record).items():
        if about.group not in groups:
            groups[about.group] = parser.add_argument_group(about.group)
        groups[about.group].add_argument(flag_of(name, about), dest=name, **about.keywords)


def number(low: float, high: float = float("inf"), *, above: bool = False) -> Any:
    """A parser for numbers in [low, high), or in (low, high) with `above`."""

    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (low < value if above else low <= value) or not value < high:
            bound = f"{'greater than' if above else 'at least'} {low:g}"
            bound += f" and less than {high:g}" if high < float("inf") else ""
            raise argparse.ArgumentTypeError(f"expected a number {bound}, not {shown(text)!r}")
        return value

    return parsed


def interval(text: str) -> Interval:
    """A parser for 20 (steps), 30s, 10m and 1h."""
    try:
        return parse_interval(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            "expected a number of steps (1 or more) or a time such as 30s, 10m or 1h, "
            f"not {shown(text)!r}"
        ) from None


def path(text: str) -> str:
    """A path as written. An empty one usually comes from a shell variable that is not set."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, not an empty string")
    return text


def names(known: Collection[str]) -> Callable[[str], str]:
    """A parser for names of a table, separated by commas. The value keeps this form."""

    def parsed(text: str) -> str:
        given = list(dict.fromkeys(text.split(",")))
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(
                f"expected some of {', '.join(known)}, not {shown(unknown[0])!r}"
            )
        return ",".join(given)

    return parsed


def step_range(text: str) -> str:
    """A parser for 10:15, the steps 10 to 15."""
    try:
        first, last = split_steps(text)
        if first <= last:
            return f"{first}:{last}"
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(
        f"expected a first and a last step, such as 10:15, not {shown(text)!r}"
    )


def split_steps(text: str) -> tuple[int, int]:
    """The steps 10 and 15 of "10:15". Raises ValueError for another text."""
    first, last = text.split(":")
    return parse_whole(first, 1), parse_whole(last, 1)


def ranks(text: str) -> str:
    """A parser for 0,5 or all, for `mpiddp.protocol.messages.is_shown`."""
    try:
        return (
            text if text == "all" else ",".join(str(parse_whole(each)) for each in text.split(","))
        )
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected all, or ranks such as 0,5, not {shown(text)!r}"
        ) from None
