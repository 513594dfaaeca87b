"""mpiddp.mesh on the real ranks of one host: its groups, and bad input in one sentence.

Tests mpiddp/runtime/torch/device_mesh.py, examples/hybrid.py.
python -m pytest tests/ranks/runtime/test_mesh_on_one_host.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.errors import error
from tests.support.mesh_groups import Ranks
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env, launch, mpirun, own_lines

JOB = str(ROOT / "tests" / "jobs" / "mesh_groups.py")


EXAMPLE = ROOT / "examples" / "hybrid.py"


def test_a_mesh_on_one_host() -> None:
    done = launch("-H", "localhost:2", JOB, "plain", "tp=2")
    assert done.returncode == 0, done.stderr
    ranks = Ranks(done.stdout)
    assert ranks.groups("tp") == [[0, 1]]
    assert ranks.groups("dp") == [[0], [1]]


@pytest.mark.parametrize(
    ("sizes", "id", "values"),
    [
        (
            ["dp=3", "tp=1"],
            "is not",
            ["dp = 3 ", "2 ranks (1 host × 2)."],
        ),
        (["tp=1", "pp=RANK"], "expected", ["rank 0: pp=0: ", "1 or more, or -1"]),
        (
            ["tp=1RANK"],
            "the calls",
            [
                "mesh(tp=10, device_type='cpu') on rank 0",
                "mesh(tp=11, device_type='cpu') on rank 1",
            ],
        ),
        (["tp=2", "device_type=gpu0"], "of device", ["device_type='gpu0': ", "cuda or cpu"]),
    ],
)
def test_bad_input_is_one_sentence(sizes: list[str], id: str, values: list[str]) -> None:
    done = launch("-H", "localhost:2", JOB, "init", *sizes)
    assert done.returncode == 2, done.stderr
    sentences = re.findall(error(id, "mpiddp.mesh: ", *values), done.stderr)
    assert len(sentences) == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_bad_input_under_a_plain_mpirun() -> None:
    done = mpirun(2, JOB, "init", "dp=3")
    assert done.returncode == 2, done.stderr
    sentence = error("is not", "mpiddp.mesh: dp = 3 ", "2 ranks (1 host × 2).")
    assert re.fullmatch(sentence, own_lines(done.stderr)[0]), done.stderr
    assert len(re.findall(sentence, done.stderr)) == 1


def test_without_a_process_group(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import mpiddp\nmpiddp.mesh(tp=2)\n")
    done = launch("-H", "localhost:2", str(script))
    assert done.returncode == 2, done.stderr
    sentence = error("mpiddp.mesh needs", "mpiddp.mesh ", "mpiddp.init()")
    assert len(re.findall(sentence, done.stderr)) == 1, done.stderr


def losses(output: str) -> list[float]:
    return [float(each) for each in re.findall(r"step \d+: loss ([0-9.]+)", output)]


@pytest.fixture(scope="module")
def plain_losses() -> list[float]:
    """The losses of the example's network and batches, without any parallelism."""
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(EXAMPLE.read_text(), str(EXAMPLE), "exec"), names)
    model: nn.Module = names["network"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(1, names["STEPS"] + 1):
        batch = torch.randn(names["BATCH"], 32, generator=generator)
        loss = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            found.append(loss.item())
    assert found[-1] < found[0] / 2  # it learns, so a wrong gradient shows
    return found


def test_the_example_in_one_process(plain_losses: list[float]) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == pytest.approx(plain_losses, abs=2e-6)


def test_the_example_on_dp_and_tp(plain_losses: list[float]) -> None:
    done = launch("-H", "localhost:4", str(EXAMPLE), "--tp", "2")
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == pytest.approx(plain_losses, rel=1e-4)
