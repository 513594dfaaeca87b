"""What launches write down of their hosts: whole lines, in bounded files, and never an error.

Tests mpiddp/hosts/history.py, mpiddp/hosts/history_verbs.py.
python -m pytest tests/unit/hosts/test_history.py
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpiddp import cli
from mpiddp.hosts.cluster import tree
from mpiddp.hosts.history import ENDING, MAX_BYTES, STEPS, Event, Files, History, Record, parse
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

NOW = time.time() - 1000
DAY_S = 86400.0


def job(
    number: int, *, failed: str = "", hosts: Sequence[str] = ("a", "b"), age_s: float = 0.0
) -> Event:
    """The end of a job, "a" to say that host a ended it."""
    return Event(
        NOW - age_s + number, f"job{number}", tuple(hosts), {failed: "killed."} if failed else {}
    )


def silent(number: int, host: str) -> Event:
    return Event(NOW + number, f"job{number}", (), {host: "ssh: no answer."})


@pytest.fixture
def hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "hosts.txt"
    path.write_text("a slots=1\nb slots=1\n")
    return path


def files(hostfile: Path | None) -> Files:
    return Files.of(None if hostfile is None else str(hostfile), os.environ)


# --- what is known of a host ---


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([job(1), job(2)], (2, 0, 0)),
        ([job(1, failed="a"), job(2)], (2, 1, 0)),
        ([job(1, failed="b"), job(2, failed="b")], (2, 0, 0)),
        ([job(n, failed="a") for n in range(1, 4)] + [job(n) for n in range(4, 7)], (5, 2, 0)),
        ([silent(1, "a"), silent(2, "a"), job(3)], (3, 0, 2)),
        ([job(1, failed="a"), silent(2, "a")], (2, 1, 1)),
        # The attempts of one launch are one job, and its worst attempt counts.
        ([job(1, failed="a"), job(1, failed="a"), silent(1, "a"), job(1)], (1, 1, 0)),
        ([silent(1, "a"), job(1, hosts=["b"]), job(1)], (1, 0, 1)),
        # Neither what is a month old nor what the user has forgotten.
        ([job(1, failed="a", age_s=31 * DAY_S), job(2)], (1, 0, 0)),
        ([job(1, failed="a"), Event(NOW + 2, forgotten=("a",)), job(3)], (1, 0, 0)),
        ([job(1, failed="a"), Event(NOW + 2, forgotten=("b",))], (1, 1, 0)),
    ],
)
def test_the_last_jobs_of_a_host_count(events: list[Event], expected: tuple[int, int, int]) -> None:
    record = History(tuple(events)).record("a")
    assert (record.jobs, record.ended, record.silent) == expected
    assert record.is_flaky == (expected[1] + expected[2] >= 2)


def measured(number: int, **slow: float) -> Event:
    """Figures of host a, with its part of the others' speed where it was slow."""
    figures = {"a": {"disk": 1e8, "link": 1e9}}
    return Event(NOW + number, slow={"a": slow} if slow else {}, figures=figures)


def held(number: int, part: float) -> Event:
    return Event(NOW + number, f"job{number}", ("a", "b"), slow={"a": {STEPS: part}})


@pytest.mark.parametrize(
    ("events", "doubt"),
    [
        ([measured(1)], ""),
        ([measured(1, disk=0.4)], "is 60 % slower than the others (disk)"),
        (
            [measured(1, disk=0.4), job(2), measured(3, link=0.3)],
            "is 70 % slower than the others (link)",
        ),
        ([measured(1, disk=0.4), measured(2)], ""),  # mended
        ([held(1, 0.5), held(2, 0.86)], "is 14 % slower than the others"),
        ([held(1, 0.5), measured(2)], "is 50 % slower than the others"),
        ([held(1, 0.86), *(job(n) for n in range(2, 6))], "is 14 % slower than the others"),
        ([held(1, 0.86), *(job(n) for n in range(2, 7))], ""),  # not in the last five
        (
            [job(1, failed="a"), job(2, failed="a"), held(3, 0.86)],
            "ended 2 of its last 3 jobs; 14 % slower than the others",
        ),
        ([held(1, 0.86), Event(NOW + 2, forgotten=("a",))], ""),
    ],
)
def test_a_slow_host_is_doubted_until_it_is_no_longer(events: list[Event], doubt: str) -> None:
    history = History(tuple(events))
    assert history.record("a").doubt == doubt
    assert history.record("b").doubt == ""


@pytest.mark.parametrize(
    ("record", "summary"),
    [
        (Record("a", 5, 3, 0), "ended 3 of its last 5 jobs"),
        (Record("a", 1, 0, 0), "ended none of its last 1 job"),
        (Record("a", 4, 0, 2), "did not answer in 2 of its last 4 jobs"),
        (Record("a", 5, 2, 1), "ended 2 of its last 5 jobs, and did not answer in 1"),
    ],
)
def test_one_clause_says_it(record: Record, summary: str) -> None:
    assert record.summary == summary


# --- the file ---


def test_an_event_is_one_line_beside_the_hostfile(hostfile: Path) -> None:
    event = job(1, failed="a")
    path = files(hostfile).append(event)
    assert path == hostfile.with_name(f"hosts.txt{ENDING}")
    assert json.loads(path.read_text()) == {
        "at": round(event.at, 3),
        "job": "job1",
        "hosts": ["a", "b"],
        "failed": {"a": "killed."},
    }
    files(hostfile).append(job(2))
    assert [each.job for each in files(hostfile).read().events] == ["job1", "job2"]


def test_without_a_place_beside_it_the_state_folder_has_the_line(hostfile: Path) -> None:
    state = hostfile.parent / "state" / "mpiddp" / f"hosts{ENDING}"
    beside = hostfile.with_name(f"hosts.txt{ENDING}")
    beside.mkdir()  # cannot be opened, by root neither
    assert files(hostfile).append(job(1)) == state
    assert files(None).append(job(2)) == state
    assert files(Path("/dev/stdin")).append(job(3)) == state
    assert len(files(hostfile).read().events) == 3


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_file_that_is_none_of_ours_is_left_alone(hostfile: Path, kind: str) -> None:
    """A stranger may have put it there, in a folder that all may write."""
    beside, other = hostfile.with_name(f"hosts.txt{ENDING}"), hostfile.with_name("other")
    other.write_text("mine\n")
    {
        "link": lambda: beside.symlink_to(other),
        "pipe": lambda: os.mkfifo(beside),
        "folder": beside.mkdir,
    }[kind]()
    assert files(hostfile).append(job(1)) != beside
    assert other.read_text() == "mine\n"
    assert len(files(hostfile).read().events) == 1


def test_a_place_that_takes_nothing_is_no_error(
    hostfile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert files(None).append(job(1)) is None
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(hostfile.parent / "nobody"))
    assert files(None) == Files(None, None)
    assert not (hostfile.parent / "nobody").exists()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    beside = hostfile.with_name(f"hosts.txt{ENDING}")
    beside.write_bytes(b"")
    program = (
        "import os, resource, signal, sys\n"
        "from mpiddp.hosts.history import Event, Files\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))\n"
        "files = Files.of(sys.argv[1], os.environ)\n"
        "files.append(Event(1.0, 'x' * 50))\n"  # as on a disk with room for 20 bytes
    )
    subprocess.run(
        [sys.executable, "-c", program, hostfile], cwd=ROOT, check=True, timeout=PATIENCE_S
    )
    assert limits == resource.getrlimit(resource.RLIMIT_FSIZE)
    assert beside.stat().st_size == 20
    files(hostfile).append(job(2))  # on a line of its own
    history = files(hostfile).read()
    assert [event.job for event in history.events] == ["job2"]
    assert history.broken == (f"{beside}:1",)


@pytest.mark.parametrize("name", ["HOME", "XDG_STATE_HOME"])
def test_a_folder_that_cannot_be_asked_for_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As one that another user owns; a name that is too long is one for root, too."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(name, f"/{'x' * 300}")
    assert files(None).existing == []
    assert files(None).append(job(1)) is None


def test_launches_at_the_same_time_lose_no_line(hostfile: Path) -> None:
    """Also while the older half of the file is dropped: each has its latest lines."""
    program = (
        "import os, sys, time\n"
        "from mpiddp.hosts.history import Event, Files\n"
        "files = Files.of(sys.argv[1], os.environ)\n"
        "for number in range(400):\n"
        "    files.append(Event(time.time(), f'{sys.argv[2]}.{number}', ('host' * 100,)))\n"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, hostfile, name], cwd=ROOT)
        for name in ("x", "y")
    ]
    assert [each.wait(PATIENCE_S) for each in writers] == [0, 0]
    history = files(hostfile).read()
    beside = hostfile.with_name(f"hosts.txt{ENDING}")
    assert history.broken == ()
    assert MAX_BYTES // 2 < beside.stat().st_size <= MAX_BYTES
    jobs = [event.job for event in history.events]
    for name in ("x", "y"):
        numbers = [int(each[2:]) for each in jobs if each.startswith(name)]
        assert numbers == list(range(numbers[0], 400)), name
    assert sorted(path.name for path in hostfile.parent.iterdir()) == ["hosts.txt", beside.name]


def test_a_launch_that_holds_the_file_delays_no_other(
    hostfile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpiddp.hosts.history._LOCK_S", 0.1)
    path = files(hostfile).append(job(1))
    program = (
        "import fcntl, sys\n"
        "file = open(sys.argv[1])\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        began = time.monotonic()
        assert files(hostfile).append(job(2)) == path
        assert time.monotonic() - began < 10
        assert len(files(hostfile).read().events) == 2
        # So a file system without locks has a bounded file, too.
        path.write_bytes(b"x\n" * MAX_BYTES)
        files(hostfile).append(job(3))
        assert path.stat().st_size < 1.1 * MAX_BYTES
        holder.communicate(timeout=PATIENCE_S)
    assert [event.job for event in files(hostfile).read().events] == ["job3"]


def test_a_long_line_does_not_drop_all_others(hostfile: Path) -> None:
    """As that of a doctor who has measured thousands of hosts."""
    for number in range(9):
        files(hostfile).append(job(number))
    for number in (9, 10):
        files(hostfile).append(job(number, hosts=["x" * MAX_BYTES]))
    assert [event.job for event in files(hostfile).read().events] == ["job8", "job9", "job10"]


def test_the_end_of_a_file_is_read_that_nobody_could_shorten(hostfile: Path) -> None:
    path = files(hostfile).append(job(1))
    assert path is not None
    line = path.read_bytes()
    path.write_bytes(b"x" * 8 * MAX_BYTES + b"\nbroken\n" + line)
    history = files(hostfile).read()
    assert ([event.job for event in history.events], history.broken) == (
        ["job1"],
        (f"a line of {path}",),
    )


@pytest.mark.parametrize(
    "line",
    [
        *(b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"at": 1', b"{}", b'{"at": "x"}'),
        *(b'{"at": NaN}', b'{"at": 1e300}', b'{"at": -5}', b'{"at": 1, "hosts": "abc"}'),
        *(b'{"at": 1, "hosts": [1]}', b'{"at": 1, "failed": []}', b'{"at": 1, "job": []}'),
        *(b'{"at": 1, "failed": {"a": 1}}', b'{"at": 1, "forgotten": 3}', b"[" * 100_000),
        *(b'{"at": 1, "slow": {"a": 1}}', b'{"at": 1, "figures": {"a": {"b": "x"}}}'),
        *(b'{"at": 1, "slow": {"a": {"b": -1}}}', b'{"at": 1, "figures": {"a": {"b": NaN}}}'),
    ],
)
def test_a_line_that_is_no_event_is_skipped(line: bytes) -> None:
    assert parse(line) is None


def test_a_push_leaves_the_history_here(hostfile: Path) -> None:
    files(hostfile).append(job(1))
    assert tree.HISTORY == ENDING
    names = [
        row[tree.PATH]
        for row in tree.list_tree(
            str(hostfile.parent), [path.name for path in hostfile.parent.iterdir()]
        )
    ]
    assert names == ["hosts.txt"]


# --- the verbs ---


def test_history_and_forget(hostfile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for event in (job(1, failed="a"), job(2), silent(3, "\x1b[2J")):
        files(hostfile).append(event)
    beside = hostfile.with_name(f"hosts.txt{ENDING}")
    with beside.open("a") as file:
        file.write("not an event\n")

    def run(*arguments: str) -> tuple[int, list[str], str]:
        code = cli.main(["hosts", *arguments])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(NOW + 1))
    code, lines, err = run("history", str(hostfile))
    assert (code, err) == (0, f"{beside}:4 is no line of a history, and is skipped.\n")
    assert [line.split()[0] for line in lines] == ["host", "a", "b", "\\x1b[2J", "from"]
    assert "ended 1 of its last 2 jobs" in lines[1]
    assert lines[1].endswith(f"{at}  killed.")
    code, lines, _ = run("history", str(hostfile), "A")
    assert (code, len(lines)) == (0, 3)
    assert lines[0] == f"{at}  ended the job: killed."
    assert lines[1].endswith("  took part, with 1 other host")

    assert run("forget", str(hostfile), "a")[:2] == (0, ["forgot a."])
    code, lines, _ = run("history", str(hostfile), "a")
    assert (code, lines) == (1, [f"nothing is known of a host a in {beside}."])
    assert run("forget", str(hostfile))[1] == ["forgot b, \\x1b[2J."]
    assert run("history", str(hostfile))[:2] == (1, [f"nothing is known of any host in {beside}."])
    assert run("history", "b")[1] == ["nothing is known of a host b in any file."]


def test_figures_are_written_and_shown(hostfile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = Event(
        NOW,
        slow={"a": {"disk": 0.41239}},
        figures={"a": {"disk": 1.23456e8, "matrix product": 812.345}},
    )
    path = files(hostfile).append(event)
    files(hostfile).append(held(1, 0.86))
    assert path is not None
    assert json.loads(path.read_text().splitlines()[0]) == {
        "at": round(NOW, 3),
        "slow": {"a": {"disk": 0.4124}},
        "figures": {"a": {"disk": 123_500_000.0, "matrix product": 812.3}},
    }
    assert cli.main(["hosts", "history", str(hostfile), "a"]) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.endswith("  measured: disk 123.5 MB/s (41 % of the others'), matrix product 812/s")
    assert second.endswith("  took part, with 1 other host, and held them up: 14 % slower")
    assert cli.main(["hosts", "history", str(hostfile)]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert "ended none of its last 1 job; 59 % slower than the others (disk)" in row


def test_what_cannot_be_forgotten_is_an_error(
    hostfile: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = files(hostfile).append(job(1))
    assert path is not None
    path.symlink_to(path.rename(hostfile.with_name("moved")))
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert cli.main(["hosts", "history", str(hostfile)]) == 0
    assert cli.main(["hosts", "forget", str(hostfile)]) == 2
    assert re.fullmatch(rf"{error('the history')}\n", capsys.readouterr().err)
