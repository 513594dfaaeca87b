"""Options as fields of a dataclass: each is written once, and the parser is made from the fields.

@dataclass(frozen=True, kw_only=True)
class Options:
    lr: float = option("schedule", "peak learning rate", type=number(0), default=0.4)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from mpiddp.checkpoints.save_schedule import Interval, parse_interval
from mpiddp.text import shown

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
