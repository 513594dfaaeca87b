"""A launch says what it knows of its hosts, and --avoid-flaky does without those that fail often.

Tests mpiddp/launch/usable.py. tests/cluster/launch/test_memory_of_hosts.py has real failures.
python -m pytest tests/ranks/smoke/test_avoided_hosts.py
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mpiddp.hosts.history import Event, File
from tests.support.ranks import launch, script

KNOWN = "b.invalid ended 2 of its last 3 jobs"
NAMES = ("a.invalid", "b.invalid", "c.invalid")


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    """b.invalid has ended two jobs."""
    path = tmp_path / "hosts.txt"
    path.write_text("".join(f"{name} slots=2\n" for name in NAMES))
    history = File.of(str(path))
    for number, failed in enumerate(({NAMES[1]: "killed."}, {}, {NAMES[1]: "lost."})):
        history.append(Event(time.time() - 9 + number, str(number), NAMES, failed))
    return path


@pytest.mark.parametrize(
    ("options", "sentences", "ranks"),
    [
        ((), [f"{KNOWN}: --avoid-flaky does without it where it can."], "abc"),
        (("--avoid-flaky",), [f"{KNOWN}: placed last."], "acb"),
        (("--avoid-flaky", "-n", "4"), [f"{KNOWN}: placed last."], "ac"),
        (("--avoid-flaky", "--min-hosts", "2"), [f"leaving out a host: {KNOWN}."], "ac"),
        (("--avoid-flaky", "--min-ranks", "4"), [f"leaving out a host: {KNOWN}."], "ac"),
        (("--avoid-flaky", "--min-ranks", "5"), [f"{KNOWN}: placed last."], "acb"),
        (("--avoid-flaky", "--spares", "1"), [f"leaving out a host: {KNOWN}."], "ac"),
        (("--avoid-flaky", "--exclude", "b.invalid"), [], "ac"),
    ],
)
def test_a_dry_run_shows_what_is_done_without(
    hostfile: Path, tmp_path: Path, options: tuple[str, ...], sentences: list[str], ranks: str
) -> None:
    before = sorted(tmp_path.iterdir())
    done = launch("--dry-run", "--hostfile", str(hostfile), *options, __file__)
    assert done.returncode == 0, done.stderr
    placed = [f"{name}.invalid: ranks {2 * at}-{2 * at + 1}" for at, name in enumerate(ranks)]
    assert done.stderr.splitlines() == [f"mpiddp: {line}" for line in (*sentences, *placed)]
    assert sorted(tmp_path.iterdir()) == before


def test_a_job_on_this_machine_is_not_remembered(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("localhost slots=2\n")
    state = tmp_path / "state"
    state.mkdir()
    for options in (("--hostfile", str(path)), ("-H", "localhost:2")):
        done = launch(*options, script(tmp_path, "raise SystemExit(3)"), XDG_STATE_HOME=str(state))
        assert done.returncode == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["hosts.txt", "script.py", "state"]
    assert list(state.iterdir()) == []
