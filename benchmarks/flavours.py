"""Measures every MPI flavour against torchrun and prints docs/flavours.md's table.

    python -m tests.mpis install
    python -m benchmarks.flavours --rounds 7 > table.md       # some 5 minutes on 2 cores

The variants alternate within each round, so that what else the machine does meets all of them alike.
torchrun stands twice in the list: the ratio of the two is the noise.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from tests import cluster
from tests.mpis import find
from tests.ranks import ROOT, clean_env, find_mpirun

JOB = str(ROOT / "mpiddp" / "bench" / "ranks" / "first_all_reduce.py")
LAUNCH = [str(Path(sys.executable).with_name("mpiddp")), "launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
NAMES = {
    "openmpi": "Open MPI 5.0.11",
    "openmpi4": "Open MPI 4.1.8",
    "mpich": "MPICH 5.0.2",
    "intelmpi": "Intel MPI 2021.18.1",
    "torchrun": "torchrun",
    "torchrun-again": "torchrun again (noise)",
}


def mpirun_of(flavour: str) -> str:
    path = find_mpirun() if flavour == "openmpi" else find(flavour)
    assert path is not None, f"{flavour} is not installed: python -m tests.mpis install"
    return str(path)


def command(variant: str, ranks: int) -> list[str]:
    if variant.startswith("torchrun"):
        return [*TORCHRUN, f"--nproc-per-node={ranks}", JOB]
    return [*LAUNCH, "--mpirun", mpirun_of(variant), "-H", f"localhost:{ranks}", JOB]


def seconds_to_first_all_reduce(variant: str, ranks: int) -> float:
    start = time.time()
    done = subprocess.run(
        command(variant, ranks), env=clean_env(), capture_output=True, text=True, timeout=120
    )
    match = re.search(r"(\d+) ranks at ([\d.]+)", done.stdout)
    assert match is not None, done.stderr
    assert int(match[1]) == ranks
    return float(match[2]) - start


def first_all_reduce(ranks: int, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {variant: [] for variant in NAMES}
    for round_number in range(rounds + 1):
        for variant in NAMES:
            took = seconds_to_first_all_reduce(variant, ranks)
            if round_number > 0:  # the first one warms the page cache
                seconds[variant].append(took)
        print(f"{ranks} ranks, round {round_number} of {rounds}", file=sys.stderr)
    return seconds


def placement(hosts: cluster.Cluster, flavour: str) -> str:
    """Unequal slots, the launching host in the middle: the hosts of ranks 0 to 3."""
    show = "import os, socket; print(os.environ['RANK'], socket.gethostname())"
    script = hosts.shared / "where.py"
    script.write_text(show)
    done = hosts["node0"].run(
        [*LAUNCH, "--mpirun", mpirun_of(flavour), "-H", "node1:2,node0:1,node2:1", str(script)],
        cwd=ROOT,
        timeout_s=60,
    )
    places = [line.split()[1] for line in sorted(done.stdout.split("\n")) if line]
    return "yes" if places == ["node1", "node1", "node0", "node2"] else f"no: {places}"


def failure(hosts: cluster.Cluster, flavour: str) -> str:
    """A rank on another host raises while the others wait: launch's code and seconds to the end."""
    script = hosts.shared / "fails.py"
    script.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n    raise RuntimeError('on purpose')\n"
        "time.sleep(60)\n"
    )
    took = []
    for _ in range(3):
        start = time.monotonic()
        done = hosts["node0"].run(
            [*LAUNCH, "--mpirun", mpirun_of(flavour), "-H", "node0:1,node1:1", str(script)],
            cwd=ROOT,
            timeout_s=60,
        )
        took.append(time.monotonic() - start)
        line = "rank 1 on node1 failed first: RuntimeError: on purpose"
        assert done.stderr.count(line) == 1, done.stderr
    return f"{done.returncode}, after {median(took):.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    two, four = first_all_reduce(2, rounds), first_all_reduce(4, rounds)
    print(
        "| launcher | maps unequal slots | a failing rank | first all-reduce, 2 ranks | 4 ranks |"
    )
    print("|---|---|---|---|---|")
    with cluster.up(3) as hosts:
        for variant, name in NAMES.items():
            cells = ["-", "-"]
            if not variant.startswith("torchrun"):
                cells = [placement(hosts, variant), failure(hosts, variant)]
            for seconds in (two, four):
                own, theirs = seconds[variant], seconds["torchrun"]
                ratio = median(a / b for a, b in zip(own, theirs, strict=True))
                cells.append(f"{median(own):.2f} s, {ratio:.2f} of torchrun's")
            print(f"| {name} | {' | '.join(cells)} |")
    print(
        f"\nMedians of {rounds} alternating rounds on {os.cpu_count()} cores; the ratio is the "
        "median of the rounds' own ratios."
    )


if __name__ == "__main__":
    main()
