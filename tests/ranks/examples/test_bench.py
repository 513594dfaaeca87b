"""`mpiddp bench` with small real jobs: their tables and JSON are checked for consistency.

Tests mpiddp/bench/.
python -m pytest tests/ranks/examples/test_bench.py
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env, mpiddp
from tests.support.running import running

BENCH = [sys.executable, "-m", "mpiddp", "bench"]
RANK = [sys.executable, "-m", "mpiddp", "bench-rank"]
SMALL = ["--arch", "resnet20", "--batch-size", "2"]


def bench(*options: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return mpiddp("bench", *options, **extra)


def measured(out: Path, name: str, *options: str) -> tuple[dict[str, Any], list[list[str]]]:
    """The results of a benchmark that succeeded, and the cells of its table's lines."""
    done = bench(name, *options, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in out.iterdir()] == [f"{name}.json"]
    record = json.loads((out / f"{name}.json").read_text())
    assert record["benchmark"] == name
    assert record["command"].startswith(f"mpiddp bench {name} ")
    assert "Open MPI" in record["environment"]["mpi"]
    [host] = record["environment"]["hosts"]
    assert host["cores"] == os.cpu_count()
    assert {"host", "cpu", "gpus", "torch", "python", "memory_gib"} <= host.keys()
    results: dict[str, Any] = record["results"]
    return results, [line.split() for line in done.stdout.splitlines()]


def test_scaling_computes_speed_and_efficiency_from_the_timed_steps(tmp_path: Path) -> None:
    options = ["-H", "localhost:2", "--rounds", "1", "--steps", "2", "--warmup", "1", *SMALL]
    results, lines = measured(tmp_path / "out", "scaling", *options)
    alone, both = results["points"]
    assert [(p["ranks"], p["num_hosts"], p["global_batch_size"]) for p in (alone, both)] == [
        (1, 1, 2),
        (2, 1, 4),
    ]
    speeds = []
    for point in (alone, both):
        [steps] = point["step_s"]
        assert len(steps) == 2
        speeds.append(point["images_per_s"]["median"])
        from_steps = point["global_batch_size"] * 2 / sum(steps)
        if point is alone:
            assert speeds[-1] == pytest.approx(from_steps)
        else:  # the slowest rank overall is not the slowest in every step
            assert from_steps <= speeds[-1] * 1.000001 <= 2 * from_steps
    assert both["efficiency"]["median"] == pytest.approx(speeds[1] / 2 / speeds[0])
    assert results["settings"]["arch"] == "resnet20"
    assert results["settings"]["low_res_epochs"] == 0
    assert [line[:3] for line in lines[3:5]] == [["1", "1", "2"], ["2", "1", "4"]]


def test_allreduce_bus_bandwidth_of_three_ranks(tmp_path: Path) -> None:
    options = ["-H", "localhost:3", "--max-size", "64K", "--seconds", "0.000001", "--repeats", "5"]
    options += ["-x", "A=private-value"]
    results, lines = measured(tmp_path / "out", "allreduce", *options)
    assert "private-value" not in (tmp_path / "out" / "allreduce.json").read_text()
    assert [point["bytes"] for point in results["points"]] == [1024, 4096, 16384, 65536]
    for point in results["points"]:
        speed = point["bytes"] / point["time_s"] / 1e9
        assert point["backend"] == "gloo"
        assert point["count"] == 5  # odd, so that the median speed follows from the median time
        assert point["bus_gb_per_s"]["median"] == pytest.approx(speed * 4 / 3, rel=1e-6)
    assert lines[-3][:3] == ["gloo", "64", "KiB"]


def test_a_start_is_timed_against_torchrun(tmp_path: Path) -> None:
    results, _ = measured(tmp_path / "out", "start", "--ranks", "1", "--rounds", "1")
    [point] = results["points"]
    for name in ("wall_s", "cpu_s"):
        ours, theirs, ratio = (point[name][each] for each in ("mpiddp", "torchrun", "ratio"))
        assert ratio["median"] == pytest.approx(ours["median"] / theirs["median"])
        assert ours["median"] > 0.5  # the import of torch alone takes longer


def test_scaling_trains_on_smaller_images_if_asked(tmp_path: Path) -> None:
    """It accepted the option, trained on whole images, and wrote that it had not."""
    seen = {}
    for low in ("0", "1"):
        options = ["-H", "localhost:1", "--rounds", "1", "--steps", "3", "--arch", "resnet20"]
        options += ["--batch-size", "64", "--epochs", "1", "--low-res-epochs", low]
        results, _ = measured(tmp_path / low, "scaling", *options)
        assert results["settings"]["low_res_epochs"] == int(low)
        seen[low] = min(results["points"][0]["step_s"][0])
    assert seen["1"] < 0.85 * seen["0"]  # 24 pixels instead of 32


def test_step_compares_the_runner_with_a_bare_loop(tmp_path: Path) -> None:
    options = ["-H", "localhost:1", "--rounds", "1", "--steps", "4", *SMALL]
    results, _ = measured(tmp_path / "out", "step", *options, "--grad-accum-steps", "2")
    assert results["settings"]["grad_accum_steps"] == 1
    # The exposed communication was a difference of two blocks, and could be negative.
    phases = {name: each["low"] for name, each in results["phases"].items()}
    assert min(phases.values()) >= 0
    assert min(phases[name] for name in ("forward", "backward", "optimizer")) > 0
    runner, bare, again = results["loops"]
    names = [each["loop"] for each in (runner, bare, again)]
    assert names == ["runner", "bare loop", "bare loop again"]
    ratio = runner["step_s"]["median"] / bare["step_s"]["median"]
    assert runner["to_bare"]["median"] == pytest.approx(ratio)


def test_loader_reads_a_generated_folder_with_each_number_of_workers(tmp_path: Path) -> None:
    options = ["-H", "localhost:1", "--rounds", "1", "--batches", "2", "--images", "8"]
    options += ["--workers", "0,1", "--batch-size", "4", "--arch", "resnet20"]
    results, _ = measured(tmp_path / "out", "loader", *options)
    speeds = {each["source"]: each["images_per_s"]["median"] for each in results["sources"]}
    assert list(speeds) == ["image folder, 0 workers", "image folder, 1 worker"]
    assert min(speeds.values()) > 0
    for each in results["sources"]:
        times = each["images_per_s"]["median"] / results["model_images_per_s"]
        assert each["times_model"] == pytest.approx(times)


def test_bench_imports_no_torch_in_the_launching_process() -> None:
    names = [path.stem for path in (ROOT / "mpiddp" / "bench").glob("*.py")]
    code = (
        f"from importlib import import_module\nfor name in {names}:\n"
        "    import_module(f'mpiddp.bench.{name}')\n"
        "import sys; print({'torch', 'numpy', 'matplotlib', 'mpi4py'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_env(),
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ["speed"],
            error("bench: unknown", '"speed"', "scaling, allreduce, start, step, loader"),
        ),
        (
            ["scaling", "--rounds", "0"],
            error(
                *("--help", "mpiddp bench scaling: ", "--rounds: ", "'0'"),
                "mpiddp bench scaling --help",
            ),
        ),
        (
            ["allreduce", "--max-size", "huge"],
            error(
                *("--help", "mpiddp bench allreduce: ", "--max-size: ", "'huge'"),
                "mpiddp bench allreduce --help",
            ),
        ),
        (
            ["step", "--ark", "resnet18"],
            error("--help", "mpiddp train: ", "--ark resnet18", '"--arch"', "mpiddp train --help"),
        ),
        (
            ["scaling", "-H", "localhost:2", "--ranks", "2,3"],
            error("available", "--ranks 3 ", " 2 "),
        ),
        (
            ["allreduce", "-H", "localhost:1"],
            error("an all-reduce", " 2 ranks", "-H localhost:2"),
        ),
    ],
)
def test_bad_bench_options_are_refused_in_one_sentence(options: list[str], sentence: str) -> None:
    done = bench(*options)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr


def test_an_error_of_the_ranks_ends_bench_without_an_output_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["scaling", "-H", "localhost:1", "--weights", "nowhere.pt", *SMALL]
    done = bench(*options, "--out", str(out))
    assert done.returncode == 2
    first, last = done.stderr.splitlines()
    sentence = error("--weights", "--weights nowhere.pt: No such file or directory ")
    assert re.fullmatch(sentence, first), first
    assert last == "mpiddp: bench scaling stopped: a job failed with exit code 2."
    assert not out.exists()


def test_sigterm_ends_the_benchmark_and_its_job(tmp_path: Path) -> None:
    seed = f"{os.getpid()}{time.time_ns() % 10_000:04}"
    options = ["scaling", "-H", "localhost:2", "--steps", "1000000", "--seed", seed, *SMALL]
    process = subprocess.Popen(
        [*BENCH, *options, "--out", str(tmp_path / "out")],
        env=clean_env(),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not any(line.startswith(" ".join(RANK)) for line in running(seed)):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stderr) == (130, "interrupted\n")
    assert running(seed) == []
