"""What the network costs a training, and what gives it back: the chart of docs/evidence/performance.md.

    python -m benchmarks.reference --rounds 3        # about 10 minutes on 2 idle cores; as root

The hosts of the test cluster get equal shares of this machine's cores, so that one host computes as fast
beside three others as alone, and a loss is the network's. Their links are limited to 1 Gbit/s and to 100
Mbit/s in each direction, or not at all. Each job is one of `mpiddp bench scaling`: weak scaling of a real
training on synthetic images. All variants alternate in every round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.harness import ENV, start_benchmark
from mpiddp.arguments import whole
from mpiddp.bench.benchmark import Benchmark, Results
from mpiddp.bench.charts import Chart, Panel
from mpiddp.bench.jobs import BenchJobFailed, Jobs, launch_command, note
from mpiddp.bench.options import add_rounds, counts
from mpiddp.bench.report import Spread, markdown, shown, spread
from mpiddp.bench.result_lines import Result, read_results
from mpiddp.bench.rounds import ratios, turns
from mpiddp.errors import UserError
from mpiddp.text import counted
from mpiddp.train.options import ARCHS
from tests.support import cluster
from tests.support.cluster import cpus, links
from tests.support.ranks import ROOT

LINKS = {"no limit": None, "1 Gbit/s": 1000, "100 Mbit/s": 100}
SLOWEST = "100 Mbit/s"
ALONE, SHARED = "1 host", "2 workers on 1 host"
PLAIN = "plain"
REMEDIES = {
    "accumulate 4": ("--grad-accum-steps=4",),
    "bf16": ("--grad-compression=bf16",),
    "accumulate 4, bf16": ("--grad-accum-steps=4", "--grad-compression=bf16"),
}
DISCARDED = 2  # all-reduces before the first step, which fix DDP's buckets


@dataclass(frozen=True)
class Variant:
    """One kind of job. `mbit` limits the links of its hosts; None: no limit."""

    hosts: int
    workers_per_host: int = 1
    mbit: int | None = None
    training: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        return ",".join(f"node{index}:{self.workers_per_host}" for index in range(self.hosts))


@dataclass(frozen=True)
class Options:
    rounds: int
    hosts: tuple[int, ...]
    cores: float
    steps: int
    warmup: int
    arch: str
    batch_size: int


def _add_options(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, default=3)
    parser.add_argument(
        "--hosts", type=counts(2), default="2,4", metavar="2,4", help="numbers of hosts"
    )
    parser.add_argument(
        "--cores", type=float, default=0.4, metavar="C", help="cores of each worker"
    )
    parser.add_argument(
        "--steps", type=whole(1), default=20, metavar="K", help="steps to time in each job"
    )
    parser.add_argument(
        "--warmup", type=whole(0), default=5, metavar="K", help="steps before the timed ones"
    )
    parser.add_argument("--arch", default="resnet20", choices=ARCHS, metavar="ARCH", help="model")
    parser.add_argument(
        "--batch-size", type=whole(2), default=32, metavar="K", help="images per worker and pass"
    )


def variants(sizes: tuple[int, ...]) -> dict[str, Variant]:
    found = {ALONE: Variant(1), SHARED: Variant(1, workers_per_host=2)}
    for link, mbit in LINKS.items():
        found |= {_name(hosts, link): Variant(hosts, mbit=mbit) for hosts in sizes}
    slowest = LINKS[SLOWEST]
    remedies = {name: Variant(sizes[-1], 1, slowest, each) for name, each in REMEDIES.items()}
    return {**found, **remedies}


def _name(hosts: int, link: str) -> str:
    return f"{counted(hosts, 'host')}, {link}"


def measure(options: Options, jobs: Jobs) -> Results:
    if reason := cluster.why_not() or cpus.why_not():
        raise UserError(f"{reason}.")
    every = variants(options.hosts)
    load = os.getloadavg()[0]
    runs: dict[str, list[Result]] = {name: [] for name in every}
    settings: Result = {}
    with cluster.up(max(options.hosts)) as hosts:
        for number, name in turns(list(every), options.rounds):
            run = _run(hosts, every[name], options, jobs.timeout_s)
            found = run.pop("settings")
            settings = found if name == ALONE else settings
            runs[name].append(run)
            speed = f"{run['images_per_s']:,.0f} images/s"
            note(f"reference: {name}, round {number} of {options.rounds}: {speed}")
    return {
        "settings": settings,
        "load_before": load,
        "num_cores": os.cpu_count(),
        "cores_per_worker": options.cores,
        "sizes": options.hosts,
        "runs": runs,
    }


def _run(hosts: cluster.Cluster, variant: Variant, options: Options, timeout_s: float) -> Result:
    """One job on the first hosts of the cluster.

    Returns:
        Its speed, its settings, and the bytes that each host sent during `wall_s`.

    Raises:
        BenchJobFailed: it did not succeed within `timeout_s`.
    """
    used = hosts.hosts[: variant.hosts]
    job = ["-m", "mpiddp", "bench-rank", "scaling", f"--steps={options.steps}"]
    job += [
        f"--warmup={options.warmup}",
        f"--arch={options.arch}",
        f"--batch-size={options.batch_size}",
    ]
    command = [*launch_command("-H", variant.where), *job, "--backend=gloo", *variant.training]
    with contextlib.ExitStack() as stack:
        for host in used:
            stack.enter_context(cpus.limited(host, options.cores * variant.workers_per_host))
        if variant.mbit is not None:
            stack.enter_context(links.limited(used, mbit=variant.mbit))
        sent = [-links.sent_bytes(host) for host in used]
        started = time.monotonic()
        try:
            done = used[0].run(
                cpus.within(used[0], command), cwd=ROOT, env=ENV, timeout_s=timeout_s
            )
        except subprocess.TimeoutExpired:
            raise BenchJobFailed(1, f"a job did not end within {timeout_s:g} s.") from None
        wall_s = time.monotonic() - started
        sent = [before + links.sent_bytes(host) for before, host in zip(sent, used, strict=True)]
    if done.returncode != 0:
        raise BenchJobFailed(done.returncode, done.stderr)
    [run] = read_results(done.stdout.splitlines())
    return {
        "settings": run["settings"],
        "images_per_s": run["global_batch_size"] * options.steps / run["total_s"],
        "step_s": run["step_s"],
        "num_steps": options.warmup + options.steps,
        "sent_bytes": sent,
        "wall_s": wall_s,
    }


def table(results: Results) -> str:
    sizes, load = results["sizes"], results["load_before"]
    shared = [ALONE, SHARED, *(_name(hosts, link) for hosts in sizes for link in LINKS)]
    head = ["workers", "images/s", "of the ideal", "step ms", "MB sent per host and all-reduce"]
    remedies = {PLAIN: _name(sizes[-1], SLOWEST), **{name: name for name in REMEDIES}}
    second = [f"{sizes[-1]} hosts, {SLOWEST}", "images/s", "of the ideal", "of plain", head[-1]]
    return (
        f"{_title(results)}\n\n"
        f"{markdown(head, [_row(name, name, results) for name in shared])}\n\n"
        f"{markdown(second, [_remedy(label, name, results) for label, name in remedies.items()])}\n\n"
        f"Each worker has {results['cores_per_worker']:g} of this machine's {results['num_cores']} cores. "
        f"Load before the first job: {load:.1f}. MB include the start of the job."
    )


def _row(label: str, name: str, results: Results) -> list[str]:
    runs = results["runs"][name]
    step = spread([1000 * sum(run["step_s"]) / len(run["step_s"]) for run in runs])
    return [
        label,
        shown(_speed(name, results), ",.0f"),
        f"{_efficiency(name, results)['median']:.0%}",
        f"{step['median']:.0f}",
        _megabytes(name, results),
    ]


def _remedy(label: str, name: str, results: Results) -> list[str]:
    runs = results["runs"]
    speeds = [[run["images_per_s"] for run in runs[each]] for each in (name, _plain(results))]
    row = _row(label, name, results)
    gain = spread(ratios(*speeds))["median"]
    return [*row[:3], f"{gain:.2f}", row[4]]


def _plain(results: Results) -> str:
    return _name(results["sizes"][-1], SLOWEST)


def _speed(name: str, results: Results) -> Spread:
    return spread([run["images_per_s"] for run in results["runs"][name]])


def _efficiency(name: str, results: Results) -> Spread:
    """The speed per worker, by that of a worker alone in the same round."""
    workers = variants(tuple(results["sizes"]))[name]
    num_workers = workers.hosts * workers.workers_per_host
    own = [run["images_per_s"] / num_workers for run in results["runs"][name]]
    return spread(ratios(own, [run["images_per_s"] for run in results["runs"][ALONE]]))


def _megabytes(name: str, results: Results) -> str:
    """What a host sends for an all-reduce."""
    runs = results["runs"][name]
    sent = [max(run["sent_bytes"]) / (run["num_steps"] + DISCARDED) / 1e6 for run in runs]
    return f"{spread(sent)['median']:.2f}"


def _title(results: Results) -> str:
    settings: Mapping[str, object] = results["settings"]
    return (
        f"Weak scaling over hosts: {settings['arch']}, {settings['batch_size']} synthetic images per "
        f"worker and pass, amp {settings['amp']}, gloo"
    )


def chart(results: Results) -> Chart:
    sizes = [1, *results["sizes"]]
    alone = _speed(ALONE, results)
    scaling = {
        link: {
            hosts: alone if hosts == 1 else _speed(_name(hosts, link), results) for hosts in sizes
        }
        for link in LINKS
    }
    scaling |= {
        SHARED: {2: _speed(SHARED, results)},
        "ideal": {hosts: spread([alone["median"] * hosts]) for hosts in sizes},
    }
    names = {PLAIN: _plain(results), **{name: name for name in REMEDIES}}
    reached = {shown.replace(", ", ",\n"): _speed(name, results) for shown, name in names.items()}
    panels = (
        Panel("images/s over all workers", "hosts with one worker each", scaling),
        Panel(
            f"images/s over {sizes[-1]} hosts at {SLOWEST}",
            f"without loss: {alone['median'] * sizes[-1]:,.0f} images/s",
            {"reached": reached},
            "bars",
        ),
    )
    title = (
        f"{_title(results)}\n{results['cores_per_worker']:g} cores for each worker; load of this machine "
        f"before: {results['load_before']:.1f}"
    )
    return Chart(title, panels)


BENCHMARK = Benchmark(
    Options, _add_options, measure, table, chart, size=(11, 4.8), takes_hosts=False
)

if __name__ == "__main__":
    start_benchmark("reference", "what the network costs, and what gives it back", BENCHMARK)
