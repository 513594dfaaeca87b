"""The script behind the reference chart runs its jobs over limited links, and its figures fit together.

Tests benchmarks/reference.py.
python -m pytest tests/cluster/train/test_reference_benchmark.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.support import cluster
from tests.support.cluster import cpus
from tests.support.cluster.links import burst_bytes
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


@pytest.mark.slow
def test_a_rehearsal_with_two_hosts(tmp_path: Path) -> None:
    if reason := cluster.why_not() or cpus.why_not():
        pytest.skip(reason)
    out = tmp_path / "out"
    options = ["--rounds=1", "--hosts=2", "--steps=2", "--warmup=1", "--batch-size=2", "--cores=1"]
    options.append(f"--chart={tmp_path / 'reference.png'}")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.reference", *options, f"--out={out}"],
        env=clean_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((out / "reference.json").read_text())["results"]
    runs = {name: run for name, [run] in results["runs"].items()}
    assert list(runs) == [
        "1 host", "2 workers on 1 host", "2 hosts, no limit", "2 hosts, 1 Gbit/s",
        "2 hosts, 100 Mbit/s", "accumulate 4", "bf16", "accumulate 4, bf16",
    ]  # fmt: skip

    # What a host sent is within its link's rate.
    limits = {"2 hosts, 1 Gbit/s": 1000}
    limits |= dict.fromkeys(list(runs)[4:], 100)
    for name, mbit in limits.items():
        for sent in runs[name]["sent_bytes"]:
            assert sent <= mbit * 1e6 / 8 * runs[name]["wall_s"] + burst_bytes(mbit), name

    # Each of two workers sends all bytes of the gradients once in a step: 269,722 numbers of resnet20.
    gradients = 4 * 269_722
    passes = 2  # discarded ones, before the steps
    for name in ("2 hosts, no limit", "2 hosts, 1 Gbit/s", "2 hosts, 100 Mbit/s", "accumulate 4"):
        assert min(runs[name]["sent_bytes"]) > gradients * (3 + passes), name
    plain, rounded = (max(runs[name]["sent_bytes"]) for name in ("2 hosts, 100 Mbit/s", "bf16"))
    assert rounded < plain - gradients  # half of those of three steps
    assert sum(runs["1 host"]["sent_bytes"] + runs["2 workers on 1 host"]["sent_bytes"]) < gradients

    assert "| 2 hosts, 100 Mbit/s | " in done.stdout
    assert f"Load before the first job: {results['load_before']:.1f}." in done.stdout
    with Image.open(tmp_path / "reference.png") as chart:
        assert chart.width > 1200
