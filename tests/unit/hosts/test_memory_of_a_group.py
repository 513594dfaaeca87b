"""What the kernel tells of a control group's memory, in both of its versions.

Tests mpiddp/hosts/processes.py.
python -m pytest tests/unit/hosts/test_memory_of_a_group.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpiddp.hosts.processes import OomKills, group_of, kills_in

NO_LIMIT_V1 = 0x7FFFFFFFFFFFF000


@pytest.mark.parametrize(
    ("lines", "folder"),
    [
        ("0::/user/job\n", "user/job"),
        ("0::/\n", ""),
        ("12:cpu,cpuacct:/c\n5:memory:/a/b:c\n0::/c\n", "memory/a/b:c"),
        ("12:cpu:/c\n", None),
        ("no columns\n", None),
        ("", None),
    ],
)
def test_the_control_group_of_a_process(tmp_path: Path, lines: str, folder: str | None) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cgroup").write_text(lines)
    found = group_of(7, tmp_path, Path("/mount"))
    assert found == (None if folder is None else Path("/mount", folder))
    assert group_of(8, tmp_path, Path("/mount")) is None


def test_the_control_group_of_this_process() -> None:
    found = group_of()
    assert found == group_of(os.getpid())
    assert found is None or found.is_relative_to("/sys/fs/cgroup")


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"memory.events": "low 0\noom 2\noom_kill 1\n", "memory.max": "4096\n"}, OomKills(1, 4096)),
        ({"memory.events": "oom_kill 0\n", "memory.max": "max\n"}, OomKills(0, None)),
        ({"memory.events": "low 0\n", "memory.max": "max\n"}, None),
        ({"memory.oom_control": "under_oom 0\noom_kill 3\n", "memory.limit_in_bytes": "8192\n"},
         OomKills(3, 8192)),
        ({"memory.oom_control": "oom_kill 3\n", "memory.limit_in_bytes": f"{NO_LIMIT_V1}\n"},
         OomKills(3, None)),
        ({"memory.oom_control": "oom_kill 3\n", "memory.limit_in_bytes": f"{1 << 60}\n"},
         OomKills(3, 1 << 60)),
        ({"memory.oom_control": "oom_kill 3\n", "memory.limit_in_bytes": f"{(1 << 60) + 4096}\n"},
         OomKills(3, None)),
        ({"memory.oom_control": "oom_kill many\n", "memory.limit_in_bytes": "1\n"}, None),
        ({"memory.events": "oom_kill 1\n"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_the_kills_of_a_control_group(
    tmp_path: Path, files: dict[str, str], kills: OomKills | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert kills_in(tmp_path) == kills
