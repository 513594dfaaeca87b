"""One benchmark from its command line to its files: `mpiddp bench NAME`, `python -m benchmarks.NAME`."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from mpiddp.bench import charts
from mpiddp.bench.benchmark import Benchmark, Options, Results
from mpiddp.bench.jobs import BenchJobFailed, Jobs, note
from mpiddp.bench.machine import machine
from mpiddp.bench.options import SharedOptions, name_of, parse
from mpiddp.errors import BAD_INPUT, DONE, FAILED
from mpiddp.launch.options import parse_options
from mpiddp.launch.plan import make_plan
from mpiddp.launch.starters.environment import shell_line, without_value, without_values
from mpiddp.paths import cause_of, named_by
from mpiddp.train.options import check_options


def run_benchmark(prog: str, purpose: str, benchmark: Benchmark[Options], argv: list[str]) -> int:
    """Measure, print and write; return 0, or the exit code of a failed job: 1 or 2.

    Raises:
        UserError: bad input, found before the first measurement.
        JobFailed: a disk has failed or is full.
    """
    started_at = time.time()
    shared, options, training = parse(prog, purpose, benchmark, argv)
    if benchmark.chart:
        charts.need_matplotlib()
    name = name_of(prog)
    started = time.strftime("%Y%m%d-%H%M%S", time.localtime(started_at))
    folder = Path(shared.out or f"bench/{started}-{name}")
    _check_writable(folder)
    jobs = _jobs(shared, getattr(options, "backend", None), training, benchmark)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # end the job as on Ctrl-C
    try:
        results = benchmark.measure(options, jobs)
    except BenchJobFailed as failure:
        print(failure, file=sys.stderr)
        note(f"bench {name} stopped: a job failed with exit code {failure.code}.")
        return BAD_INPUT if failure.code == BAD_INPUT else FAILED
    print(benchmark.table(results))
    environment = {"mpi": jobs.starter, "hosts": results.pop("hosts", None) or [asdict(machine())]}
    exports = [without_value(export, {}) for export in shared.x]
    record = {
        "benchmark": name,
        "command": shell_line([*prog.split(), *without_values(argv, shared.x, {})]),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started_at)),
        "environment": environment,
        "options": {**asdict(shared), **asdict(options), "x": exports, "training": training},
        "results": results,
    }
    _write(folder, name, benchmark, record)
    return DONE


def _jobs(
    shared: SharedOptions,
    backend: str | None,
    training: list[str],
    benchmark: Benchmark[Options],
) -> Jobs:
    """Check the hosts once, as a launch does, so that their faults end the benchmark at once."""
    where = shared.launch_options()
    os.environ.update(shared.hidden_values())
    ranks = ["-n", str(shared.n)] if shared.n else []
    if not benchmark.takes_hosts:
        ranks = ["-H", "localhost:1"]
    backend = backend or check_options(training).backend
    if backend == "gloo":  # ranks may share a GPU
        where = [*where, "-x", "CUDA_VISIBLE_DEVICES="]
    launch_options = parse_options([*where, *ranks, "-m", "mpiddp", "bench-rank"])
    plan = make_plan(replace(launch_options, backend=backend), os.environ)
    slots = plan.request.world_size
    per_host = max(host.ranks for host in plan.request.hosts.hosts)
    return Jobs(tuple(where), slots, per_host, plan.starter.name, shared.timeout, tuple(training))


def _check_writable(folder: Path) -> None:
    """Check the permission before an hour of measuring."""
    with named_by("--out"):
        existing = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise cause_of(error)(
            f"--out {folder}: {existing} cannot be written ({error.strerror}). Name another folder."
        ) from None


def _write(folder: Path, name: str, benchmark: Benchmark[Options], record: Results) -> None:
    files = [f"{folder / name}.json"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        if benchmark.chart:
            chart = benchmark.chart(record["results"])
            charts.save(chart, folder / f"{name}.png", benchmark.size, _footnotes(record))
            files.append(f"{name}.png")
    except OSError as error:
        raise cause_of(error)(f"--out {folder} cannot be written: {error.strerror}.") from None
    print(f"\n{' and '.join(files)}")


def _footnotes(record: Results) -> list[str]:
    hosts = record["environment"]["hosts"]
    others = f" and {len(hosts) - 1} more" if len(hosts) > 1 else ""
    first = hosts[0]
    gpus = f", {len(first['gpus'])} × {first['gpus'][0]}" if first["gpus"] else ""
    hardware = f"{first['cores']} × {first['cpu']}{gpus}{others}"
    return [
        f"{hardware}, torch {first['torch']}, {record['environment']['mpi']}",
        record["command"].encode(errors="backslashreplace").decode(),  # a path may be any bytes
    ]
