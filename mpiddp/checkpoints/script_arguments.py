"""The arguments of `mpiddp.Checkpoints`, checked before anything else happens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mpiddp.checkpoints.plain_state import check_state
from mpiddp.checkpoints.save_schedule import Interval, parse_interval
from mpiddp.checkpoints.shards.state import split


def check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step: expected a whole number, not {step!r}")
    if not 0 <= step < 1 << 53:
        raise ValueError(f"step: expected 0 or more, not {step}")


def check_entries(name: str, entries: Mapping[str, Any]) -> None:
    if not isinstance(entries, Mapping) or not all(isinstance(key, str) for key in entries):
        raise TypeError(f'{name}: expected a dict with names as keys: {{"model": …}}')
    check_state(name, dict(entries))
    if name == "per_rank" and split(dict(entries))[1]:
        raise TypeError("per_rank: cannot save a DTensor, which all ranks share. Save it in state.")


def checked_keep(keep: int) -> int:
    if isinstance(keep, bool) or not isinstance(keep, int):
        raise TypeError(f"keep: expected a whole number, not {keep!r}")
    if keep < 1:
        raise ValueError(f"keep: expected 1 or more, not {keep}")
    return keep


def checked_interval(every: int | str | None) -> Interval | None:
    if every is None:
        return None
    if isinstance(every, bool) or not isinstance(every, (int, str)):
        raise TypeError(f'every: expected a number of steps or a time such as "10m", not {every!r}')
    try:
        return parse_interval(str(every))
    except ValueError as error:
        raise ValueError(f"every: {error}") from None


def checked_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The config as it will be read again. Raises TypeError if it is not JSON."""
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"config: expected a dict, not {type(config).__name__}")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(config or {})))
    except (TypeError, ValueError) as error:
        raise TypeError(f"config: expected numbers, strings, lists and dicts: {error}") from None
    return plain
