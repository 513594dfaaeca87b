"""--profile traces the chosen steps of the chosen ranks, and changes no bit. Each start has a record.

Tests mpiddp/train/profiling.py, mpiddp/train/run_record.py and the refusal of --log-to.
python -m pytest tests/ranks/train/test_profile.py
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from mpiddp.train.sinks import SINKS
from tests.support.errors import error
from tests.support.tiny_data import two_epochs
from tests.support.training import Ranks, contents, unequal, waiting_ranks


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from waiting_ranks(2, tmp_path_factory.mktemp("pool"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, pool: Ranks) -> Path:
    """The same training twice, at last with a profile of its steps 2 to 4 and 6 steps in sum."""
    folder = tmp_path_factory.mktemp("runs")
    options = two_epochs(folder, "--batch-size=4")
    profile = ["--profile=2:4", "--profile-ranks=all"]
    commands = [[*options, "--out", folder / "plain"], [*options, *profile, "--out", folder / "a"]]
    plain, profiled = pool.run(2, folder, commands)
    assert (plain.code, profiled.code) == (0, 0), profiled.stderr
    assert "profile" not in plain.stdout
    (folder / "said").write_text(profiled.stdout)
    return folder


def test_the_steps_and_the_communication_are_in_the_trace(runs: Path) -> None:
    traces = sorted((runs / "a/profile").iterdir())
    assert [trace.name for trace in traces] == ["rank_00000.json.gz", "rank_00001.json.gz"]
    for trace in traces:
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        complete = [event for event in events if event["ph"] == "X"]
        assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in complete)
        names = [event["name"] for event in complete]
        assert names.count("DistributedDataParallel.forward") == 3
        assert any(name.startswith("gloo:") for name in names)


def test_the_sentence(runs: Path) -> None:
    said = (runs / "said").read_text()
    found = re.search(
        r"profile of rank 0, steps 2 to 4: (\S+ \d+%, .*); "
        r"(\d+)% of (\d+\.\d{3}) s of communication was hidden behind computation",
        said,
    )
    assert found is not None, said
    assert len(found[1].split(", ")) == 5
    assert 0 <= int(found[2]) <= 100
    assert float(found[3]) > 0
    assert f"trace, for https://ui.perfetto.dev: {runs}/a/profile/rank_00000.json.gz" in said


def test_no_bit_changes(runs: Path) -> None:
    assert not (runs / "plain/profile").exists()
    assert unequal(contents(runs / "plain", 6), contents(runs / "a", 6)) == []


def test_a_run_that_ends_earlier_profiles_what_there_was(runs: Path, pool: Ranks) -> None:
    """The resume begins behind the first step of the profile, and its last step is never reached."""
    options = two_epochs(runs, "--batch-size=4", "--profile=4:9", "--out", str(runs / "b"))
    (stopped, done) = pool.run(2, runs, [[*options, "--stop-at-step=4"], options])
    assert (stopped.code, done.code) == (75, 0)
    assert "profile of rank 0, steps 4 to 4: " in stopped.stdout
    assert "profile of rank 0, steps 5 to 6: " in done.stdout
    assert [trace.name for trace in (runs / "b/profile").iterdir()] == ["rank_00000.json.gz"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--profile=7:9"], error("Name steps", "--profile 7:9: ", "6 steps")),
        (
            ["--profile=1:2", "--profile-ranks=2,5"],
            error("Name ranks", "--profile-ranks 2,5: ", "2 ranks"),
        ),
    ],
)
def test_a_profile_of_nothing_is_refused(
    runs: Path, pool: Ranks, options: list[str], sentence: str
) -> None:
    job = [*two_epochs(runs, "--batch-size=4"), *options, "--out", str(runs / "none")]
    (refused,) = pool.run(2, runs, [job])
    assert refused.code == 2, refused.stderr
    assert re.search(sentence, refused.stderr), refused.stderr
    assert not (runs / "none").exists()


def test_each_start_has_a_record(runs: Path) -> None:
    starts = sorted((runs / "b/starts").iterdir())
    assert [start.name for start in starts] == ["start_0001.json", "start_0002.json"]
    record = json.loads(starts[1].read_text())
    assert "tests.jobs.turns" in record["command"]
    assert record["packages"]["torch"]
    assert len(record["hosts_of_ranks"]) == 2
    assert set(record["git"]) == {"commit", "diff", "diff_is_cut"}
    assert record["environment"]["WORLD_SIZE"] == "2"
    assert record["environment"]["MPIDDP_CHANNEL_SECRET"] == "…"


def test_a_package_that_is_missing_is_named_before_anything_is_written(
    runs: Path, pool: Ranks
) -> None:
    missing = next(tool for tool in SINKS if find_spec(tool) is None)
    options = two_epochs(runs, "--batch-size=4", f"--log-to={missing}", "--out", str(runs / "c"))
    (refused,) = pool.run(2, runs, [options])
    assert refused.code == 2
    values = (f"--log-to {missing} ", f"{missing}, ", f"-m pip install {missing}")
    assert re.search(error("--log-to", *values), refused.stderr), refused.stderr
    assert not (runs / "c").exists()
