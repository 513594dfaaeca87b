"""Which hosts a job takes: spares, hosts that fail the preflight, options that contradict each other.

Tests mpiddp/launch/{usable,plan}.py. No host is contacted here.
python -m pytest tests/unit/launch/test_usable_hosts.py
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpiddp.errors import DONE, UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.launch import remembered
from mpiddp.launch.options import parse_options
from mpiddp.launch.plan import THIS_MACHINE, _check, read_hosts, working_folder
from mpiddp.launch.remembered import Ended
from mpiddp.launch.starters.command import RankStarter
from mpiddp.launch.starters.table import STARTERS
from mpiddp.launch.usable import (
    Checked,
    Past,
    has_fewer,
    keep_usable,
    of_earlier_jobs,
    wanted_hosts,
)
from tests.support.errors import error

A, B, C = Host("a"), Host("b"), Host("c")
ALL = Hosts("file", (A, B, C))
NO_RANK = Host("d", slots=0)


def where(*options: str):  # type: ignore[no-untyped-def]
    return parse_options([*options, "-m", "train"])


def kept(*options: str, hosts: Hosts = ALL, complaints: dict[Host, str] | None = None) -> str:
    checked = Checked(complaints=complaints or {})
    found = keep_usable(hosts, checked, where(*options), Past())
    return "".join(host.name for host in found.hosts)


def test_without_a_problem_all_hosts_are_kept() -> None:
    assert kept() == "abc"
    assert kept(hosts=Hosts("file", (A, NO_RANK, B))) == "adb"  # a host without a rank is no spare


def test_the_last_hosts_are_spares(capfd: pytest.CaptureFixture[str]) -> None:
    assert kept("--spares", "1") == "ab"
    assert capfd.readouterr().err == "mpiddp: kept in reserve: c\n"
    assert kept("--spares", "2") == "a"
    assert capfd.readouterr().err == "mpiddp: kept in reserve: b, c\n"


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
        ((), 3, "cab"),
        (("--min-hosts", "2"), 3, "ca"),
        (("--min-hosts", "3"), 2, "cab"),
    ],
)
def test_an_avoided_host_is_left_out_or_placed_last(
    options: tuple[str, ...], enough: int, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    past = Past(avoided={"b": "b has failed"}, proven=(A, B, C), enough=enough)
    found = keep_usable(Hosts("file", (B, C, A)), Checked(), where(*options), past)
    assert "".join(host.name for host in found.hosts) == expected
    said = "leaving out a host: b has failed." if expected == "ca" else "b has failed: placed last."
    assert capfd.readouterr().err == f"mpiddp: {said}\n"


def test_a_host_that_held_a_job_up_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hosts"
    file.touch()
    named = Hosts("list", (Host("gpu16.invalid"), Host("GPU17.invalid"), Host("gpu18.invalid")))
    ended = Ended(DONE, slow={"gpu17.invalid": 0.86})
    remembered.note_attempt(where("--hostfile", str(file)), named, named, ended)
    known = "GPU17.invalid is 14 % slower than the others"
    for options, hint in (((), "--exclude HOST does without it"),):
        chosen = where("--hostfile", str(file), *options)
        past = of_earlier_jobs(chosen, named)
        kept = keep_usable(named, Checked(), chosen, past)
        assert kept.hosts[-1].name == ("GPU17.invalid" if options else "gpu18.invalid")
        assert capfd.readouterr().err == f"mpiddp: {known}: {hint}.\n"


def test_fewer_ranks_may_start_where_a_host_is_missing() -> None:
    """It is named no more, or failed the preflight, or is a spare that took part in the first attempt."""
    left = Hosts("file", (A, C))
    assert not has_fewer(ALL, ALL, where(), Past())
    assert has_fewer(left, ALL, where(), Past())
    assert not has_fewer(left, ALL, where("--spares", "1"), Past())
    assert has_fewer(left, left, where(), Past(enough=3))
    assert not has_fewer(ALL, ALL, where(), Past(enough=2))


def test_versions_that_differ_end_the_start() -> None:
    with pytest.raises(UserError, match=r"^torch differs: 1 on a and 2 on b\.$"):
        keep_usable(
            ALL, Checked(differences=("torch differs: 1 on a and 2 on b.",)), where(), Past()
        )


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


def test_hosts_that_are_just_enough() -> None:
    assert wanted_hosts(where("--spares", "1", "--min-hosts", "2"), ALL) == 2
    assert wanted_hosts(where("--spares", "2"), ALL) == 1


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


STARTER = {kind.name: RankStarter(kind, "1", Path("/bin/true")) for kind in STARTERS}


@pytest.mark.parametrize("option", ["--spares=1", "--min-hosts=2"])
def test_options_that_need_a_preflight_are_refused_where_srun_starts_the_ranks(option: str) -> None:
    def check(starter: RankStarter, *options: str) -> None:
        _check(parse_options(["-H", "a,b,c", *options, "-m", "train"]), ALL, starter, {})

    sentence = error("inside a", f"{option.partition('=')[0]}: ", "--mpirun PATH")
    by_scheduler = [starter for starter in STARTER.values() if starter.kind.has_scheduler]
    over_ssh = [starter for starter in STARTER.values() if not starter.kind.has_scheduler]
    assert by_scheduler
    assert over_ssh
    for starter in by_scheduler:
        check(starter)
        with pytest.raises(UserError, match=f"^{sentence}$"):
            check(starter, option)
    for starter in over_ssh:
        check(starter, option)


def test_what_is_known_of_several_hosts_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    for known, said in (
        ({"a": "a has failed"}, "a has failed: --exclude HOST does without it."),
        ({"a": "a has failed", "b": "b is slow"},
         "a has failed, b is slow: --exclude HOST does without it."),
        ({"d": "d has failed"}, ""),
    ):  # fmt: skip
        keep_usable(ALL, Checked(), where(), Past(known))
        assert capfd.readouterr().err == (f"mpiddp: {said}\n" if said else "")


def test_hosts_without_a_complaint() -> None:
    checked = Checked({A: None, B: None}, {B: "b is broken."})  # type: ignore[dict-item]
    assert checked.faultless == {A: None}
