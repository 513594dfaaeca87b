"""examples/pitfalls: each script shows what its page says. Tests mpiddp/runtime/sampler_epochs.py as well.

python -m pytest tests/test_pitfalls.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, launch, mpirun, script

PITFALLS = ROOT / "examples/pitfalls"
WARNING = "warning: a DistributedSampler begins its third pass, and set_epoch was never called"


def shown(name: str, *arguments: str | Path, options: tuple[str, ...] = ()) -> str:
    """What `mpiddp launch -n 2 OPTIONS examples/pitfalls/NAME ARGUMENTS` prints on stdout, and stderr."""
    done = launch("-n", "2", *options, str(PITFALLS / name), *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.quick
def test_without_set_epoch_every_epoch_has_the_same_order_and_a_warning() -> None:
    text = shown("set_epoch_forgotten.py")
    without, with_epochs = (
        re.findall(rf"^{how} set_epoch, epoch \d: (\[.*\])$", text, re.M)
        for how in ("without", "with")
    )
    assert len(without) == len(with_epochs) == 3
    assert len(set(without)) == 1
    assert len(set(with_epochs)) == 3
    assert text.count(WARNING) == 1


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


def test_a_collective_on_one_rank_hangs_and_the_report_shows_its_line() -> None:
    done = launch(
        "-n", "2", "--hang-timeout", "5s", str(PITFALLS / "collective_on_one_rank.py")
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "has made no step for 5 s" in done.stderr
    assert (
        "dist.all_reduce(mean_loss, group=metrics)  # the mistake: only rank 0 calls" in done.stderr
    )


@pytest.mark.parametrize("name", sorted(path.name for path in PITFALLS.glob("*.py")))
def test_the_page_names_each_script(name: str) -> None:
    assert f"]({name})" in (PITFALLS / "README.md").read_text()


SAMPLER = """
import sys, torch, mpiddp
from torch.utils.data import DistributedSampler
class Own(DistributedSampler):
    def set_epoch(self, epoch):
        self.epoch = epoch
with mpiddp.process_group(backend="gloo"):
    case = sys.argv[1]
    sampler = (Own if case == "own" else DistributedSampler)(range(4), shuffle=case != "in order")
    for epoch in range(2 if case == "two" else 6):
        if case == "set" or case == "own":
            sampler.set_epoch(epoch)
        with torch.set_grad_enabled(case != "evaluation"):
            assert len(list(sampler)) == 2
    print("end", flush=True)
"""


@pytest.mark.parametrize("case", ["set", "own", "in order", "evaluation", "two", "forgotten"])
def test_a_sampler_is_warned_of_once_and_never_wrongly(tmp_path: Path, case: str) -> None:
    """Under a plain mpirun, where the script imports the sampler before mpiddp joins."""
    done = mpirun(2, script(tmp_path, SAMPLER), case)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "end\nend\n"
    assert done.stderr.count(WARNING) == (case == "forgotten")


def test_nothing_imports_the_sampler_for_the_warning() -> None:
    code = (
        "import sys; from mpiddp.runtime.sampler_epochs import watch_samplers as watch; watch(); "
        "import torch; was = 'torch.utils.data.distributed' in sys.modules; "
        "from torch.utils.data import DistributedSampler as D; "
        "print(was, D.__iter__.__name__, D.__iter__.__wrapped__.__qualname__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith(" __iter__ DistributedSampler.__iter__\n"), done.stderr
