"""The GPUs of each host: those of its hostfile entry, of -x, or on this machine of its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpiddp.errors import UserError
from mpiddp.hosts.gpu_variables import (
    VISIBLE,
    for_numbers,
    hides_all_gpus,
    is_of_one_host,
    written,
)
from mpiddp.hosts.hostfile import Hosts
from mpiddp.hosts.nodes import Node, is_this_host


def check_gpu_choice(hosts: Hosts, exports: Mapping[str, str | None]) -> None:
    """Raise UserError if both the hostfile and -x choose GPUs.

    Args:
        exports: the variables that the user names; None is the launcher's own value.
    """
    chosen = sorted(exports.keys() & set(VISIBLE))
    for host in hosts.hosts:
        if chosen and host.gpus is not None:
            raise UserError(
                f"{hosts.where(host)}: gpus= and -x {chosen[0]} both choose the GPUs of {host.name}. "
                "Leave one out."
            )


def variables_of_ranks(
    name: str, env: Mapping[str, str], exports: Mapping[str, str | None]
) -> dict[str, str]:
    """`env`, with the variables that choose GPUs as the ranks on the host `name` get them."""
    variables = {**env, **{each: value for each, value in exports.items() if value is not None}}
    if is_this_host(name):
        return variables
    return {
        each: value
        for each, value in variables.items()
        if each in exports or not is_of_one_host(each, value)
    }


def gpu_table(
    nodes: Sequence[Node], env: Mapping[str, str], exports: Mapping[str, str | None]
) -> str:
    """MPIDDP_GPUS: what the ranks of each node set before they load torch; "" for nothing.

    Numbers of the hostfile do not count in a job whose user hides all GPUs, and nobody has checked them.
    """
    own = {
        name: env[name]
        for name in VISIBLE
        if name in env and name not in exports and is_of_one_host(name, env[name])
    }
    choices: list[dict[str, str]] = []
    for node in nodes:
        if node.gpus is not None and not hides_all_gpus(env):
            choices.append(for_numbers(node.gpus, env))
        else:
            choices.append(own if is_this_host(node.name) else {})
    return written(choices)
