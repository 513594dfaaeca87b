"""Which hosts a job takes: spares, hosts that fail the preflight, options that contradict each other.

Tests mpiddp/launch/{place,plan}.py. No host is contacted here.
python -m pytest tests/unit/launch/test_choose.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.launch.options import LaunchOptions, parse_options
from mpiddp.launch.place import Past, choose, wanted_hosts
from mpiddp.launch.plan import THIS_MACHINE, read_hosts, working_folder

A, B, C = Host("a"), Host("b"), Host("c")
ALL = Hosts("file", (A, B, C))
NO_RANK = Host("d", slots=0)


def kept(
    hosts: Hosts = ALL,
    complaints: dict[Host, str] | None = None,
    *,
    spares: int = 0,
    min_hosts: int | None = None,
    doubts: dict[str, str] | None = None,
    enough: int | None = None,
) -> str:
    options = LaunchOptions(spares=spares, min_hosts=min_hosts)
    past = Past(hosts, doubts or {}, enough)
    found = choose(past, complaints or {}, *wanted_hosts(options, past))
    return "".join(host.name for host in found.hosts)


def test_without_a_problem_all_hosts_are_kept() -> None:
    assert kept() == "abc"
    assert kept(hosts=Hosts("file", (A, NO_RANK, B))) == "adb"  # a host without a rank is no spare


def test_a_spare_takes_the_place_of_a_host_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert kept(complaints={B: "b is broken."}, spares=1) == "ac"
    assert kept(spares=1) == "ab"
    assert capfd.readouterr().err == (
        "mpiddp: leaving out a host: b is broken.\nmpiddp: kept in reserve: c\n"
    )


def test_a_host_that_fails_ends_the_start_unless_fewer_are_enough() -> None:
    with pytest.raises(UserError) as refused:
        kept(complaints={A: "a is broken.", C: "c is broken."})
    assert str(refused.value) == "a is broken.\nc is broken."
    assert kept(complaints={A: "x"}, min_hosts=2) == "bc"
    with pytest.raises(UserError):
        kept(complaints={A: "x", B: "y"}, min_hosts=2)


@pytest.mark.parametrize(
    ("min_hosts", "enough", "expected"),
    [
        (None, 2, "ca"),  # as many as in the first attempt
        (None, 3, "bca"),
        (2, 3, "ca"),
        (3, 2, "bca"),
        (2, None, "bca"),  # what earlier jobs have shown is only said
    ],
)
def test_an_avoided_host_is_left_out_if_the_options_allow(
    min_hosts: int | None, enough: int | None, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    doubts, hosts = {"b": "b has failed"}, Hosts("file", (B, C, A))
    assert kept(hosts, min_hosts=min_hosts, doubts=doubts, enough=enough) == expected
    said = "b has failed. To do without: --exclude b"
    said = "leaving out a host: b has failed." if expected == "ca" else said
    assert capfd.readouterr().err == f"mpiddp: {said}\n"


def test_exclude(tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text("node1 slots=4\nnode2 slots=2\nnode3 slots=0\n")

    def left(names: str, **when: bool) -> list[str]:
        options = parse_options(["--hostfile", str(file), "--exclude", names, "-m", "train"])
        return [host.name for host in read_hosts(options, {}, **when).hosts]

    assert left("NODE2, node3") == ["node1"]
    assert len(left("node9", is_first=False)) == 3


def test_where_the_hosts_come_from(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a.x slots=2\na.y\nb\n")
    slurm = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}

    def read(*options: str, env: dict[str, str] | None = None) -> Hosts:
        return read_hosts(parse_options([*options, "-m", "train"]), env or {})

    def names(*options: str, env: dict[str, str] | None = None) -> list[str]:
        return [host.name for host in read(*options, env=env).hosts]

    assert names("--hostfile", str(file)) == ["a.x", "a.y", "b"]
    assert names("--hostfile", str(file), "--exclude", "b", env=slurm) == ["a.x", "a.y"]
    assert names("-H", "c:2,d", env=slurm) == ["c", "d"]
    assert names("-H", "localhost", env=slurm) == ["localhost"]
    assert read() == THIS_MACHINE


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
