"""examples/pitfalls: each script shows what its page says.

python -m pytest tests/ranks/examples/test_pitfalls.py
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.ranks import ROOT, launch

PITFALLS = ROOT / "examples/pitfalls"


def shown(name: str, *arguments: str | Path, options: tuple[str, ...] = ()) -> str:
    """What `mpiddp launch -n 2 OPTIONS examples/pitfalls/NAME ARGUMENTS` prints on stdout, and stderr."""
    done = launch("-n", "2", *options, str(PITFALLS / name), *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_without_set_epoch_every_epoch_has_the_same_order() -> None:
    text = shown("set_epoch_forgotten.py")
    without, with_epochs = (
        re.findall(rf"^{how} set_epoch, epoch \d: (\[.*\])$", text, re.M)
        for how in ("without", "with")
    )
    assert len(without) == len(with_epochs) == 3
    assert len(set(without)) == 1
    assert len(set(with_epochs)) == 3


def test_sync_batch_norm_is_one_process_and_batch_norm_is_not() -> None:
    text = shown("batch_norm.py")
    found = dict(re.findall(r"^(\w+) differs from one process by up to (\S+)$", text, re.M))
    assert float(found["BatchNorm"]) > 0.1
    assert float(found["SyncBatchNorm"]) < 1e-5


def test_a_file_that_all_ranks_save_is_that_of_any_rank(tmp_path: Path) -> None:
    text = shown("save_on_all_ranks.py", tmp_path / "snapshot.pt")
    assert "saved by rank 0: the file is 6 times that of rank 0\n" in text
    by_all = text.partition("saved by all ranks: the file is ")[2]
    assert by_all
    assert not by_all.startswith("6 times that of rank 0")


def test_ranks_meet_in_a_new_file(tmp_path: Path) -> None:
    assert "the ranks of 2 add up to 1\n" in shown("file_init.py", tmp_path / "store")


def test_a_collective_on_one_rank_hangs_and_the_report_shows_its_line() -> None:
    done = launch(
        "-n", "2", "--hang-timeout", "5s", str(PITFALLS / "collective_on_one_rank.py")
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "has made no step for 5 s" in done.stderr
    assert (
        "dist.all_reduce(mean_loss, group=metrics)  # the mistake: only rank 0 calls" in done.stderr
    )
