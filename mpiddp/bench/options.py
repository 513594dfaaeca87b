"""The options of a benchmark as fields of a dataclass: each is written once, the parser is made from them.

@dataclass(frozen=True)
class Options:
    rounds: int = option("scaling", "rounds of all sizes", type=whole(1), default=3)
"""

from __future__ import annotations

import argparse
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def option(group: str, help: str, **keywords: Any) -> Any:
    """A field of a dataclass that is an option.

    Args:
        group: its heading in --help. help: the text there, which shows the choices and the default beside it.
        keywords: further arguments of argparse's add_argument. The default is None unless given.
    """
    return field(metadata={"group": group, "keywords": {"help": help, **keywords}})


def add_options(parser: argparse.ArgumentParser, record: type[DataclassInstance]) -> None:
    """Add every option of the record, in its group."""
    groups: dict[str, Any] = {}
    for each in fields(record):
        name = each.metadata["group"]
        if name not in groups:
            groups[name] = parser.add_argument_group(name)
        flag = f"--{each.name.replace('_', '-')}"
        groups[name].add_argument(flag, dest=each.name, **each.metadata["keywords"])
