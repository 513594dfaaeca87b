"""The cost of the network for a training, and a remedy: a table of docs/evidence/performance.md.

    python -m benchmarks.reference --rounds 3    # 10 minutes on 2 idle cores; as root

The hosts of the test cluster get equal shares of this machine's cores, so that one host computes as fast
beside three others as alone, and a loss is the network's. Their links are limited to 1 Gbit/s and to 100
Mbit/s in each direction, or not at all. Each job is a real training on synthetic images, with the same
batch on each rank (weak scaling): `benchmarks.ranks.training`. All variants alternate in every round.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median

from benchmarks import host_cores
from benchmarks.harness import ENV, markdown, option, ratios, run_script, turns, wholes
from mpiddp.arguments import whole
from mpiddp.bench.measured_jobs import (
    BenchJobFailed,
    Jobs,
    Result,
    launch_command,
    read_results,
    spread,
)
from mpiddp.errors import UserError, print_error
from mpiddp.text import counted
from mpiddp.train.trainer import STARTUP_STEPS
from tests.support import cluster
from tests.support.cluster import links
from tests.support.ranks import ROOT

LINKS = {"no limit": None, "1 Gbit/s": 1000, "100 Mbit/s": 100}
SLOWEST = "100 Mbit/s"
ALONE, SHARED, PLAIN = "1 host", "2 workers on 1 host", "plain"
REMEDIES = {
    "accumulate 4": ("--grad-accum-steps=4",),
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
    rounds: int = option("rounds; each variant runs once in each", parse=whole(1), default=3)
    sizes: tuple[int, ...] = option("numbers of hosts", parse=wholes(2), default="2,4")
    links: tuple[str, ...] = option(
        "their links", parse=lambda text: tuple(text.split(",")), default=",".join(LINKS)
    )
    cores: float = option("cores of each worker", parse=float, default=0.4)
    steps: int = option("steps to time in each job", parse=whole(1), default=20)
    arch: str = option("model", default="resnet20")
    batch_size: int = option("images per worker and pass", parse=whole(2), default=32)


def variants(sizes: tuple[int, ...], links: tuple[str, ...]) -> dict[str, Variant]:
    plain = {ALONE: Variant(1), SHARED: Variant(1, workers_per_host=2)}
    for link in links:
        plain |= {_name(hosts, link): Variant(hosts, mbit=LINKS[link]) for hosts in sizes}
    slowest = LINKS[SLOWEST]
    remedies = {name: Variant(sizes[-1], 1, slowest, args) for name, args in REMEDIES.items()}
    return {**plain, **remedies}


def _name(hosts: int, link: str) -> str:
    return f"{counted(hosts, 'host')}, {link}"


def measure(options: Options, jobs: Jobs) -> Result:
    if reason := cluster.why_not() or host_cores.why_not():
        raise UserError(f"{reason}.")
    every = variants(options.sizes, options.links)
    load = os.getloadavg()[0]
    runs: dict[str, list[Result]] = {name: [] for name in every}
    settings: Result = {}
    with cluster.up(max(options.sizes)) as hosts:
        for number, name in turns(list(every), options.rounds):
            run = _run(hosts, every[name], options, jobs.timeout_s)
            settings = run.pop("settings")
            runs[name].append(run)
            speed = f"{run['images_per_s']:,.0f} images/s"
            print_error(f"reference: {name}, round {number} of {options.rounds}: {speed}")
    return {
        "settings": settings,
        "load_before": load,
        "num_cores": os.cpu_count(),
        "cores_per_worker": options.cores,
        "sizes": options.sizes,
        "links": options.links,
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
    job = ["-m", "benchmarks.ranks.training", str(options.steps)]
    job += [f"--arch={options.arch}", f"--batch-size={options.batch_size}", "--backend=gloo"]
    command = [*launch_command("-H", variant.where), *job, *variant.training]
    with contextlib.ExitStack() as stack:
        for host in used:
            stack.enter_context(host_cores.limited(host, options.cores * variant.workers_per_host))
        if variant.mbit is not None:
            stack.enter_context(links.limited(used, mbit=variant.mbit))
        sent = [-links.sent_bytes(host) for host in used]
        started = time.monotonic()
        try:
            done = used[0].run(
                host_cores.within(used[0], command), cwd=ROOT, env=ENV, timeout_s=timeout_s
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
        "images_per_s": run["images_per_s"],
        "step_time_p50_s": run["step_time_p50_s"],
        "num_steps": STARTUP_STEPS + options.steps,
        "sent_bytes": sent,
        "wall_s": wall_s,
    }


def table(results: Result) -> str:
    sizes, load = results["sizes"], results["load_before"]
    shared = [ALONE, SHARED, *(_name(hosts, link) for hosts in sizes for link in results["links"])]
    head = ["workers", "images/s", "of the ideal", "step ms", "MB sent per host and all-reduce"]
    rows = [_row(name, results) for name in (*shared, *REMEDIES)]
    return (
        f"{_title(results)}; {', '.join(REMEDIES)}: {_plain(results)}\n\n{markdown(head, rows)}\n\n"
        f"Each worker has {results['cores_per_worker']:g} of this machine's {results['num_cores']} cores. "
        f"Load before the first job: {load:.1f}. MB include the start of the job."
    )


def _row(name: str, results: Result) -> list[str]:
    runs = results["runs"][name]
    workers = variants(tuple(results["sizes"]), tuple(results["links"]))[name]
    num_workers = workers.hosts * workers.workers_per_host
    speeds = [run["images_per_s"] / num_workers for run in runs]
    ideal = ratios(speeds, [run["images_per_s"] for run in results["runs"][ALONE]])
    step = [1000 * run["step_time_p50_s"] for run in runs]
    sent = [max(run["sent_bytes"]) / (run["num_steps"] + DISCARDED) / 1e6 for run in runs]
    return [
        name,
        spread([run["images_per_s"] for run in runs], ",.0f"),
        f"{median(ideal):.0%}",
        f"{median(step):.0f}",
        f"{median(sent):.2f}",
    ]


def _plain(results: Result) -> str:
    return _name(results["sizes"][-1], SLOWEST)


def _title(results: Result) -> str:
    settings = results["settings"]
    return (
        f"Weak scaling over hosts: {settings['arch']}, {settings['batch_size']} synthetic images per "
        f"worker and pass, amp {settings['amp']}, gloo"
    )


if __name__ == "__main__":
    os.environ.update(ENV)
    sys.exit(
        run_script("reference", "what the network costs, and what gives it back", takes_hosts=False)
    )
