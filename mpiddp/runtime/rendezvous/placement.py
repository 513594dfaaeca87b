"""Compare the ranks: their problems, their files, and their hosts with the launcher's placement.

The launcher sets MPIDDP_PLACEMENT to the placement of the hostfile: "node1:4,node2:2" means ranks 0 to 3
on node1, and ranks 4 and 5 on node2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpiddp.errors import UserError
from mpiddp.protocol.variables import PLACEMENT
from mpiddp.runtime.rendezvous.result import RankInfo
from mpiddp.text import align_columns, parse_whole, shown

_MOST_RANKS = 999_999  # that a hostfile may have


def expected_hosts(placement: str) -> list[str]:
    """The host of each rank: [world_size]. IPv6 literals are in brackets: "[fd00::1]:2"."""
    hosts: list[str] = []
    try:
        for part in placement.split(","):
            name, _, count = part.rpartition(":")
            hosts += [name.strip("[]")] * parse_whole(count, 0, _MOST_RANKS + 1 - len(hosts))
    except ValueError:
        raise UserError(
            f'{PLACEMENT}="{shown(placement)}" is not a list of hosts such as node1:4,node2:2. '
            "Unset it; mpiddp launch sets it."
        ) from None
    return hosts


def check_alike(infos: Sequence[RankInfo], env: Mapping[str, str]) -> None:
    """Raise a UserError unless all ranks can begin, run the same files, and are placed as expected."""
    problems = {info.problem: info for info in reversed(infos) if info.problem}
    if problems:
        is_common = len(problems) == 1 and all(info.problem for info in infos)
        raise UserError(
            "\n".join(
                text if is_common else f"rank {info.rank} on {info.hostname}: {text}"
                for text, info in sorted(problems.items(), key=lambda each: each[1].rank)
            )
        )
    for info in infos:
        if info.program != infos[0].program:
            ours, theirs = dict(infos[0].program), dict(info.program)
            name = next(n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n))
            raise UserError(
                f"{name} differs on {info.hostname} (sha256 {theirs.get(name, 'none')[:8]} instead of "
                f"{ours.get(name, 'none')[:8]} on {infos[0].hostname}). Copy it again: mpiddp hosts push"
            )
    if placement := env.get(PLACEMENT):
        names = expected_hosts(placement)
        if not _is_placed(infos, names):
            raise UserError(
                f"the ranks are not placed as in the hostfile ({placement}). Check mpirun's own "
                f"settings (environment, mca-params.conf) and the host names.\n{table(infos, names)}"
            )


def _is_placed(infos: Sequence[RankInfo], names: Sequence[str]) -> bool:
    """Whether each name stands for one host, and none of them is the name of another host."""
    hosts = {info.host: info for info in infos}
    pairs = {(name, info.host) for name, info in zip(names, infos, strict=False)}
    one_to_one = len(pairs) == len({name for name, _ in pairs}) == len({host for _, host in pairs})
    known = {name for info in hosts.values() for name in _names(info)}
    fits = [
        # Any other name is an alias, by which mpirun has reached the host.
        _forms(name) & _names(hosts[host]) or not _forms(name) & known
        for name, host in pairs
    ]
    return len(names) == len(infos) and one_to_one and all(fits)


def _names(info: RankInfo) -> set[str]:
    return _forms(info.hostname) | {each.address for each in info.interfaces}


def _forms(name: str) -> set[str]:
    """The long and the short form of a name."""
    return {name, name.partition(".")[0]}


def table(infos: Sequence[RankInfo], expected: Sequence[str] = ()) -> str:
    """A line for each rank: its host, local rank and GPU, and the expected host if it is known."""
    rows = [("rank", "host", "local rank", "GPU", *(["expected host"] if expected else []))]
    for index, info in enumerate(infos):
        row = [str(info.rank), info.hostname, str(info.local_rank), info.gpu or "-"]
        if expected:
            row.append(expected[index] if index < len(expected) else "none")
        rows.append(tuple(row))
    return align_columns(rows)
