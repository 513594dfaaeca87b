"""The options of a benchmark as fields of a dataclass: each is written once, the parser is made from them.

@dataclass(frozen=True)
class Options:
    rounds: int = option("rounds of all sizes", type=whole(1), default=3)
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any

from mpiddp.arguments import whole

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def option(help: str, **keywords: Any) -> Any:
    """A field that is an option; `keywords` are argparse's. The default is None unless given."""
    return field(metadata={"help": help, **keywords})


def add_options(parser: argparse._ActionsContainer, record: type[DataclassInstance]) -> None:
    for each in fields(record):
        parser.add_argument(f"--{each.name.replace('_', '-')}", dest=each.name, **each.metadata)


def wholes(low: int) -> Callable[[str], tuple[int, ...]]:
    """A parser for ascending lists of whole numbers such as 1,2,4."""

    return lambda text: tuple(sorted({whole(low)(each) for each in text.split(",")}))


class DefaultsShown(argparse.ArgumentDefaultsHelpFormatter):
    """Append an option's default to its help, unless the help mentions one or there is none to print."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_default = "default" in (action.help or "")
        is_plain = action.default is None or isinstance(action.default, (bool, list))
        return action.help if has_default or is_plain else super()._get_help_string(action)
