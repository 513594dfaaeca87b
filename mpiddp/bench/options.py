"""The options of a benchmark as fields of a dataclass: each is written once, the parser is made from them.

@dataclass(frozen=True)
class Options:
    rounds: int = option("rounds of all sizes", type=whole(1), default=3)
"""

from __future__ import annotations

import argparse
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def option(help: str, **keywords: Any) -> Any:
    """A field that is an option; `keywords` are argparse's. The default is None unless given."""
    return field(metadata={"help": help, **keywords})


def add_options(parser: argparse._ActionsContainer, record: type[DataclassInstance]) -> None:
    for each in fields(record):
        parser.add_argument(f"--{each.name.replace('_', '-')}", dest=each.name, **each.metadata)
