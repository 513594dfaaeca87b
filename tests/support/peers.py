"""Run torch's own DistributedTest under `mpiddp launch` and under torchrun, and print the tests that differ.

    ./run.sh test peers                        # two ranks; about 2 minutes
    .venv/bin/python -m tests.support.peers 4  # four ranks

A test of which a rank has another result under mpiddp is a difference, and makes the exit code 1. A test that fails
under both is none: some need as many GPUs as ranks, or other versions.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.support.ranks import ROOT, clean_env

PROGRAM = ROOT / "tests" / "programs" / "torchs_own_tests.py"
_LIMIT_S = 1200
Results = dict[str, list[str]]  # of each test, by rank


def results(command: list[str], ranks: int) -> Results:
    """What each test gives under this command."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, str(PROGRAM), folder],
            env=clean_env(),
            cwd=ROOT,
            timeout=_LIMIT_S,
            capture_output=True,
            text=True,
        )
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        if done.returncode or not all(file.exists() for file in files):
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        of_ranks = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return {name: [one[name] for one in of_ranks] for name in of_ranks[0]}


def differences(ours: Results, theirs: Results) -> list[str]:
    """A line for each rank of each test whose result is not the same."""
    return [
        f"{name}, rank {rank}: {one or 'not run'!r} under mpiddp, {other or 'not run'!r} under torchrun"
        for name in sorted({*ours, *theirs})
        for rank, (one, other) in enumerate(
            zip(ours.get(name, [""] * 2), theirs.get(name, [""] * 2), strict=False)
        )
        if one != other
    ]


def main(ranks: int = 2) -> int:
    """Run both, and print how they compare. Returns the exit code."""
    programs = Path(sys.executable).parent
    torchrun = [str(programs / "torchrun"), "--nproc-per-node", str(ranks)]
    mpiddp = [str(programs / "mpiddp"), "launch", "-H", f"localhost:{ranks}"]
    theirs, ours = results(torchrun, ranks), results(mpiddp, ranks)
    kinds = Counter(
        one if one in ("ok", "skip") else "failed" for all_ in ours.values() for one in all_
    )
    print(
        f"{len(ours)} tests on {ranks} ranks under mpiddp: "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    )
    lines = differences(ours, theirs)
    print(*lines, f"{len(lines)} results differ from those under torchrun.", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
