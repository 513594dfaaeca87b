"""Which hosts a job takes: spares, hosts that fail the preflight, options that contradict each other.

Tests mpiddp/launch/{choose,plan}.py. No host is contacted here.
python -m pytest tests/unit/launch/test_choose.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.launch.choose import Checked, Past, choose, of_earlier_jobs, remember, wanted_hosts
from mpiddp.launch.options import parse_options
from mpiddp.launch.plan import THIS_MACHINE, _check, read_hosts, working_folder
from mpiddp.launch.starters.table import STARTERS
from tests.support.errors import error

A, B, C = Host("a"), Host("b"), Host("c")
ALL = Hosts("file", (A, B, C))
NO_RANK = Host("d", slots=0)


def where(*options: str):  # type: ignore[no-untyped-def]
    return parse_options([*options, "-m", "train"])


def kept(*options: str, hosts: Hosts = ALL, complaints: dict[Host, str] | None = None) -> str:
    checked = Checked(complaints=complaints or {})
    found, _ = choose(hosts, checked, where(*options), Past())
    return "".join(host.name for host in found.hosts)


def test_without_a_problem_all_hosts_are_kept() -> None:
    assert kept() == "abc"
    assert kept(hosts=Hosts("file", (A, NO_RANK, B))) == "adb"  # a host without a rank is no spare


def test_a_spare_takes_the_place_of_a_host_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert kept("--spares", "1", complaints={B: "b is broken."}) == "ac"
    assert capfd.readouterr().err == "mpiddp: leaving out a host: b is broken.\n"


def test_a_host_that_fails_ends_the_start() -> None:
    with pytest.raises(UserError) as refused:
        kept(complaints={A: "a is broken.", C: "c is broken."})
    assert str(refused.value) == "a is broken.\nc is broken."


@pytest.mark.parametrize(
    ("options", "complaints", "expected"),
    [
        (("--min-hosts", "2"), {A: "x"}, "bc"),
        (("--min-hosts", "2"), {A: "x", B: "y"}, None),
    ],
)
def test_a_job_may_be_smaller(
    options: tuple[str, ...], complaints: dict[Host, str], expected: str | None
) -> None:
    if expected is not None:
        assert kept(*options, complaints=complaints) == expected
        return
    with pytest.raises(UserError):
        kept(*options, complaints=complaints)


@pytest.mark.parametrize(
    ("options", "enough", "expected"),
    [
        ((), 2, "ca"),  # as many as in the first attempt
        ((), 3, "bca"),
        (("--min-hosts", "2"), 3, "ca"),
        (("--min-hosts", "3"), 2, "bca"),
    ],
)
def test_an_avoided_host_is_left_out_if_the_options_allow(
    options: tuple[str, ...], enough: int, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    past = Past(avoided={"b": "b has failed"}, proven=(A, B, C), enough=enough)
    found, _ = choose(Hosts("file", (B, C, A)), Checked(), where(*options), past)
    assert "".join(host.name for host in found.hosts) == expected
    said = "b has failed: --exclude HOST does without it."
    said = "leaving out a host: b has failed." if expected == "ca" else said
    assert capfd.readouterr().err == f"mpiddp: {said}\n"


def test_a_host_that_held_a_job_up_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hosts"
    file.touch()
    named = Hosts("list", (Host("gpu16.invalid"), Host("GPU17.invalid"), Host("gpu18.invalid")))
    options = where("--hostfile", str(file))
    remember(options, named, used=["gpu16.invalid"], slow={"gpu17.invalid": 0.86})
    choose(named, Checked(), options, of_earlier_jobs(options, named))
    assert capfd.readouterr().err == (
        "mpiddp: GPU17.invalid is 14 % slower than the others: --exclude HOST does without it.\n"
    )


def test_fewer_ranks_may_start_where_a_host_is_missing() -> None:
    """It is named no more, or failed the preflight, or is a spare that took part in the first attempt."""
    left, spare = Hosts("file", (A, C)), where("--spares", "1")
    broken = Checked(complaints={B: "b is broken."})
    for named, checked, options, past, expected in (
        (ALL, Checked(), where(), Past(), False),
        (ALL, broken, where("--min-hosts", "1"), Past(), True),
        (ALL, broken, spare, Past(), False),
        (left, Checked(), where(), Past(enough=3), True),
        (ALL, Checked(), where(), Past(enough=2), False),
    ):
        assert choose(named, checked, options, past)[1] is expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--spares", "3"), error("host for", "--spares 3 ", " file ", "3 hosts")),
        (("--min-hosts", "4"), error("but --min-hosts", "3 hosts", "--min-hosts is 4.")),
        (
            ("--spares", "1", "--min-hosts", "3"),
            error("but --min-hosts", "2 hosts", " 1 spare", "--min-hosts is 3."),
        ),
    ],
)
def test_hosts_that_cannot_be_enough(options: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        wanted_hosts(where(*options), ALL)
    assert re.fullmatch(sentence, str(refused.value))


def test_where_the_hosts_come_from(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a.x slots=2\na.y\nb\n")
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}

    def names(*options: str, env: dict[str, str] | None = None) -> list[str]:
        return [host.name for host in read_hosts(where(*options), env or {}).hosts]

    assert names("--hostfile", str(file)) == ["a.x", "a.y", "b"]
    assert names("--hostfile", str(file), "--exclude", "b", env=slurm) == ["a.x", "a.y"]
    assert names("-H", "c:2,d", env=slurm) == ["c", "d"]
    assert names("-H", "localhost", env=slurm) == ["localhost"]
    assert names() == ["localhost"]
    assert read_hosts(where(), {}) is THIS_MACHINE


def test_the_working_folder_has_the_shells_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "other").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    monkeypatch.chdir(link)
    assert working_folder({"PWD": str(link)}) == str(link)
    for pwd in ("", "link", str(tmp_path / "other"), str(tmp_path / "gone")):
        assert working_folder({"PWD": pwd}) == str(tmp_path / "real")
    assert working_folder({}) == str(tmp_path / "real")


@pytest.mark.parametrize("option", ["--spares=1", "--grow=1h"])
def test_options_that_need_a_preflight_are_refused_without_one(option: str) -> None:
    name = option.partition("=")[0]
    for kind in STARTERS:
        for without in ((), ("--no-check",)):
            options = parse_options(["-H", "a,b,c", option, *without, "-m", "train"])
            if not (kind.has_scheduler or without):
                _check(options, ALL, kind)
                continue
            with pytest.raises(UserError, match=f"^{name} needs the preflight"):
                _check(options, ALL, kind)
