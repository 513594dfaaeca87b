"""The groups that the ranks of tests/jobs/mesh_groups.py print."""

from __future__ import annotations

import json


class Ranks:
    """What the ranks of the job have printed."""

    def __init__(self, output: str) -> None:
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        found = sorted(lines, key=lambda each: each["rank"])
        self.hosts: list[str] = [each["host"] for each in found]
        self._groups: list[dict[str, list[int]]] = [each["groups"] for each in found]

    def groups(self, name: str) -> list[list[int]]:
        """The groups along a dimension. Their ranks agree on them."""
        groups = sorted({tuple(groups[name]) for groups in self._groups})
        for rank, own in enumerate(self._groups):
            assert rank in own[name]
        assert sorted(rank for group in groups for rank in group) == list(range(len(self.hosts)))
        return [list(group) for group in groups]

    def num_hosts(self, group: list[int]) -> int:
        return len({self.hosts[rank] for rank in group})
