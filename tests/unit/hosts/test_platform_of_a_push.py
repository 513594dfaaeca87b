"""A host on which the programs of a pushed folder cannot run refuses it.

Tests mpiddp/hosts/cluster/receive.py.
python -m pytest tests/unit/hosts/test_platform_of_a_push.py
"""

from __future__ import annotations

import platform
from typing import Any

import pytest

from mpiddp.hosts.cluster.connection import Failed
from mpiddp.hosts.cluster.receive import _check_platform, this_platform
from tests.support.errors import error

HERE = this_platform()


def check(*, has_programs: bool = True, **other: Any) -> None:
    _check_platform({"platform": HERE | other, "has_programs": has_programs})


def test_the_platform_of_this_machine() -> None:
    assert HERE["machine"] == platform.machine()
    library, version = platform.libc_ver()
    assert HERE["glibc"] == (
        [int(part) for part in version.split(".")] if library == "glibc" else []
    )


def test_what_runs_here_is_taken() -> None:
    check()
    check(glibc=[])
    check(machine="z80", glibc=[99, 1], has_programs=False)


def test_another_processor_is_refused() -> None:
    with pytest.raises(Failed, match=error("the programs", f" {HERE['machine']}, ", " z80.")):
        check(machine="z80")


def test_an_older_glibc_is_refused() -> None:
    with pytest.raises(Failed, match=error("its glibc", "glibc", " 99.1 ")):
        check(glibc=[99, 1])
