"""From the keyword arguments of `mpiddp.spawn` to the options of `mpiddp launch`.

The launcher's own parser knows the options, so none is defined a second time.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from mpiddp.errors import UserError
from mpiddp.launch.options import option_parser
from mpiddp.text import did_you_mean

Value: TypeAlias = str | int | float | bool | Sequence[str] | None

# Options of the command line that mean nothing to a function, or have a parameter of their own.
_LEFT_OUT = (
    *("help", "help-all", "dry-run", "hostfile", "npernode"),
    *("host", "hosts", "machinefile", "nproc-per-node", "standalone"),
)
_OWN = (
    *("hosts", "hostfile", "ranks", "ranks_per_host"),
    *("env", "cwd", "max_result_bytes"),
)


def launch_options(
    *,
    hosts: str | Sequence[str] | None,
    hostfile: object,
    ranks: int | None,
    ranks_per_host: int | None,
    others: Mapping[str, Value],
) -> list[str]:
    """The arguments of `mpiddp launch` before the job. Its parser checks their values.

    Raises:
        TypeError: an unknown keyword, or a value of another type.
        UserError: a host in a list that is not a string such as "node1:4".
    """
    arguments = []
    if hosts is not None:
        arguments += ["-H", hosts if isinstance(hosts, str) else _listed(hosts)]
    if hostfile is not None:
        arguments += [f"--hostfile={Path(str(hostfile)).absolute()}"]  # cwd may be another folder
    if ranks is not None:
        arguments += ["-n", str(ranks)]
    if ranks_per_host is not None:
        arguments += [f"--npernode={ranks_per_host}"]
    actions = _actions()
    for keyword, value in others.items():
        name = keyword.replace("_", "-")
        if name not in actions:
            known = [*_OWN, *(each.replace("-", "_") for each in actions)]
            raise TypeError(
                f"mpiddp.spawn() got an unexpected keyword argument {keyword!r}."
                f"{did_you_mean(keyword, known)}"
            )
        arguments += _arguments(keyword, f"--{name}", actions[name], value)
    return arguments


def _actions() -> dict[str, argparse.Action]:
    """The launcher's options by their long name, without the two dashes."""
    actions = option_parser()._option_string_actions.items()
    found = {name.removeprefix("--"): each for name, each in actions if name.startswith("--")}
    return {name: each for name, each in found.items() if name not in _LEFT_OUT}


def _arguments(keyword: str, option: str, action: argparse.Action, value: Value) -> list[str]:
    if value is None:
        return []
    is_flag = action.nargs == 0
    if is_flag is not isinstance(value, bool):
        expected = "True or False" if is_flag else "a value"
        raise TypeError(f"mpiddp.spawn: {keyword}: expected {expected}, not {value!r}.")
    if is_flag:
        return [option] if value else []
    if isinstance(value, (str, int, float)):
        return [f"{option}={value}"]
    if not isinstance(action, argparse._AppendAction):
        raise TypeError(f"mpiddp.spawn: {keyword}: expected one value, not {value!r}.")
    return [f"{option}={each}" for each in value]


def _listed(hosts: Sequence[str]) -> str:
    for host in hosts:
        if not isinstance(host, str) or not host or "," in host:
            raise UserError(
                f"mpiddp.spawn: hosts: {host!r} is not a host with its slots. "
                'Example: ["node1:4", "node2:4"]'
            )
    return ",".join(hosts)
