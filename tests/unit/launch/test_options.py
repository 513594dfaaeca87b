"""Every option of `mpiddp launch`: what it becomes, its default, and what it contradicts.

Tests mpiddp/launch/{options,option_parser}.py.
python -m pytest tests/unit/launch/test_options.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.errors import UserError
from mpiddp.launch.options import (
    How,
    LaunchOptions,
    OutputOptions,
    RankProgram,
    When,
    Where,
    parse_mpi_args,
    parse_options,
)
from tests.support.errors import error

DEFAULTS = LaunchOptions(
    job=RankProgram(("train", "--lr", "1"), is_module=True),
    backend=None,
    where=Where(
        hostfile=None,
        host_list=None,
        local=False,
        n=None,
        npernode=None,
        exclude=None,
        min_hosts=None,
        min_ranks=None,
        spares=0,
        check=True,
        wait_s=None,
        share_gpus=False,
        avoid_flaky=False,
        push=False,
    ),
    how=How(
        mpirun=None,
        bind="none",
        master_addr=None,
        interface=None,
        exports=(),
        file_exports=(),
        mpi_args=(),
        timeout_s=None,
    ),
    when=When(
        max_restarts=0,
        grow_s=None,
        stop_after_s=None,
        grace_s=30.0,
        save_grace_s=600.0,
        hang_timeout_s=None,
    ),
    output=OutputOptions(log_ranks="default", prefix="auto", log_dir=None, quiet=False),
    dry_run=False,
    report=False,
    verbose=False,
)
JOB = ("-m", "train", "--lr", "1")


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MPIDDP_LOG_RANKS", "MPIDDP_PREFIX"):
        monkeypatch.delenv(name, raising=False)


def test_the_defaults() -> None:
    assert parse_options([*JOB]) == DEFAULTS


def where(**fields: object) -> LaunchOptions:
    return DEFAULTS._replace(where=DEFAULTS.where._replace(**fields))  # type: ignore[arg-type]


def how(**fields: object) -> LaunchOptions:
    return DEFAULTS._replace(how=DEFAULTS.how._replace(**fields))  # type: ignore[arg-type]


def when(**fields: object) -> LaunchOptions:
    return DEFAULTS._replace(when=DEFAULTS.when._replace(**fields))  # type: ignore[arg-type]


def output(**fields: object) -> LaunchOptions:
    return DEFAULTS._replace(output=DEFAULTS.output._replace(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--hostfile f", where(hostfile="f")),
        ("-H a:2,b", where(host_list="a:2,b")),
        ("--local", where(local=True)),
        ("-n 1", where(n=1)),
        ("--npernode 1", where(npernode=1)),
        ("--exclude a,b", where(exclude="a,b")),
        ("--share-gpus", where(share_gpus=True)),
        ("--min-hosts 1", where(min_hosts=1)),
        ("--min-ranks 1", where(min_ranks=1)),
        ("--spares 0", where(spares=0)),
        ("--spares 2", where(spares=2)),
        ("--no-check", where(check=False)),
        ("--push", where(push=True)),
        ("--avoid-flaky", where(avoid_flaky=True)),
        ("-q", output(quiet=True)),
        ("--quiet", output(quiet=True)),
        ("--wait-for-hosts 10m", where(wait_s=600.0)),
        *((f"--bind {each}", how(bind=each)) for each in ("none", "numa", "core", "gpu")),
        ("--mpirun /mpi", how(mpirun="/mpi")),
        ("--master-addr a", how(master_addr="a")),
        ("--interface eth0", how(interface="eth0")),
        ("-x A -x B=1", how(exports=("A", "B=1"))),
        ("--mpi-args=-v --mpi-args=--a_b", how(mpi_args=("-v", "--a_b"))),
        ("--timeout 1", how(timeout_s=1.0)),
        ("--timeout 5m", how(timeout_s=300.0)),
        ("--max-restarts 0", when(max_restarts=0)),
        ("--max-restarts 3", when(max_restarts=3)),
        ("--grow 10m", when(grow_s=600.0)),
        ("--stop-after 55m", when(stop_after_s=3300.0)),
        ("--grace 5", when(grace_s=5.0)),
        ("--save-grace 1h", when(save_grace_s=3600.0)),
        ("--hang-timeout 30", when(hang_timeout_s=30.0)),
        *((f"--log-ranks {each}", output(log_ranks=each)) for each in ("all", "none", "0,5")),
        *((f"--prefix {each}", output(prefix=each)) for each in ("auto", "always", "never")),
        ("--log-dir d", output(log_dir="d")),
        ("--dry-run", DEFAULTS._replace(dry_run=True)),
        ("--report", DEFAULTS._replace(report=True)),
        ("-v", DEFAULTS._replace(verbose=True)),
        ("--verbose", DEFAULTS._replace(verbose=True)),
    ],
)
def test_what_an_option_becomes(options: str, expected: LaunchOptions) -> None:
    assert parse_options([*options.split(), *JOB]) == expected


def test_variables_are_other_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_LOG_RANKS", "all")
    monkeypatch.setenv("MPIDDP_PREFIX", "never")
    assert parse_options([*JOB]) == output(log_ranks="all", prefix="never")


def test_the_variables_of_a_file(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(f"{name.upper()}=1\n")
    files = [each for name in "ab" for each in ("--env-file", str(tmp_path / name))]
    found = parse_options([*files, "-x", "C", *JOB]).how
    assert found == how(exports=("C",), file_exports=("A=1", "B=1")).how
    assert found.all_exports == ("A=1", "B=1", "C")


@pytest.mark.parametrize(
    "options",
    [
        "--grow 1m -H a,b --min-hosts 1",
        "--grow 1m -H a,b --min-ranks 1",
        "--grow 1m --hostfile f",
        "--spares 1 --wait-for-hosts 1m",
        "--no-check -H a",
    ],
)
def test_what_fits_together(options: str) -> None:
    parse_options([*options.split(), *JOB])


def test_an_argument_at_which_an_mpirun_begins_another_program() -> None:
    with pytest.raises(UserError, match=error("an argument", '":"')):
        parse_options(["-n", "1", "--", "echo", "x", ":"])


@pytest.mark.parametrize(
    ("argv", "job", "rank"),
    [
        (JOB, DEFAULTS.job, "mpiddp run -m train --lr 1"),
        (
            ("--", "prog", "-v"),
            RankProgram(("prog", "-v"), is_command=True),
            "mpiddp run -- prog -v",
        ),
        (("-m", "mpiddp", "run", "s"), RankProgram(("mpiddp", "run", "s"), True), "mpiddp run s"),
        (("-m", "mpiddp"), RankProgram(("mpiddp",), True), "mpiddp run -m mpiddp"),
        (
            ("-m", "mpiddp", "hosts"),
            RankProgram(("mpiddp", "hosts"), True),
            "mpiddp run -m mpiddp hosts",
        ),
    ],
)
def test_the_command_of_a_rank(argv: tuple[str, ...], job: RankProgram, rank: str) -> None:
    found = parse_options([*argv]).job
    assert found == job
    assert found.rank_command(Path("/python")) == ("/python", "-m", *rank.split())


def test_the_command_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    job = parse_options([str(script), "-n", "3"]).job  # what follows is the script's own
    assert job == RankProgram((str(script), "-n", "3"))
    assert job.rank_command(Path("/p")) == ("/p", "-m", "mpiddp", "run", str(script), "-n", "3")
    other = tmp_path / "train.txt"
    other.write_bytes(b"\x7fELF\0")
    for path, id in ((other, "not a Python"), (tmp_path, "a regular")):
        with pytest.raises(UserError, match=error(id, f"{path} ")):
            parse_options([str(path)])


@pytest.mark.parametrize(
    ("prefix", "world_size", "has"),
    [
        ("auto", 1, False),
        ("auto", 2, True),
        ("always", 1, True),
        ("never", 2, False),
    ],
)
def test_when_lines_have_a_prefix(prefix: str, world_size: int, has: bool) -> None:
    assert OutputOptions("all", prefix, None, quiet=False).has_prefix(world_size) is has


def test_the_ranks_that_are_shown_are_there() -> None:
    for fine in ("all", "none", "default", "0,3"):
        OutputOptions(fine, "auto", None, quiet=False).check_log_ranks(4)
    no_ranks = error("is no rank", "--log-ranks 0,4,9: ", "rank 4, 9;", "ranks 0 to 3.")
    with pytest.raises(UserError, match=f"^{no_ranks}$"):
        OutputOptions("0,4,9", "auto", None, quiet=False).check_log_ranks(4)
    no_rank = error("is no rank", "--log-ranks 1: ", "rank 1;", "rank 0 only")
    with pytest.raises(UserError, match=no_rank):
        OutputOptions("1", "auto", None, quiet=False).check_log_ranks(1)


def test_what_names_hosts_and_ranks() -> None:
    plain = DEFAULTS.where
    assert (plain.names_hosts, plain.names_ranks, plain.can_shrink) == (False, False, False)
    assert plain._replace(hostfile="f").names_hosts
    assert plain._replace(host_list="a").names_hosts
    assert plain._replace(n=1).names_ranks
    assert plain._replace(npernode=1).names_ranks
    assert plain._replace(min_hosts=1).can_shrink
    assert plain._replace(min_ranks=1).can_shrink


def test_mpi_args_are_split_as_a_shell_does() -> None:
    assert parse_mpi_args(["--mca pml 'u c x'", "", "-v"]) == ("--mca", "pml", "u c x", "-v")
    with pytest.raises(UserError, match=error("--mpi-args=", '--mpi-args="a: ')):
        parse_mpi_args(['"a'])
    with pytest.raises(UserError, match=error("option, and", '"true"')):
        parse_mpi_args(["true"])
