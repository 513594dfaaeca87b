"""What a user does first with mpiddp, in one environment. Each check runs commands and reads their output."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mpiddp
from benchmarks.versions.environments import Environment, run, variables
from benchmarks.versions.results import SHOWN, Result
from tests.ranks import ROOT

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
from tests.tiny_data import image_folder
image_folder(Path(sys.argv[1]), 4, 2)
"""
TWO = ("-H", "localhost:2")
STEPS = 4
TRAIN = (
    *("-m", "mpiddp", "train", "--backend", "gloo", "--arch", "resnet20", "--batch-size", "2"),
    *("--epochs", "1", "--steps-per-epoch"),
)
VERSIONS = """
import json, platform
from importlib.metadata import distributions
found = {each.metadata["Name"].lower(): each.version for each in distributions()}
print(json.dumps([platform.python_version(), found]))
"""


class CheckFailed(Exception):
    """What a command did instead."""


@dataclass(frozen=True)
class Place:
    """An environment, an empty folder in which the commands run, and their time limit."""

    environment: Environment
    folder: Path
    timeout_s: float

    def run(self, *command: object, code: int = 0, cwd: Path | None = None) -> str:
        """Run a program of the environment, and return its stdout and stderr.

        Raises:
            CheckFailed: it does not end in time, or with another exit code.
        """
        program, *arguments = map(str, command)
        argv = [str(self.environment.bin / program), *arguments]
        env = variables(self.environment)
        done = run(argv, env=env, cwd=cwd or self.folder, timeout_s=self.timeout_s)
        shown = " ".join([program, *arguments[:4]])
        if done is None:
            raise CheckFailed(f"{shown} … did not end within {self.timeout_s:.0f} s")
        if done.returncode != code:
            last = [line for line in done.stderr.splitlines() if line.strip()][-3:]
            raise CheckFailed(f"{shown} … ended with exit code {done.returncode}: {' '.join(last)}")
        return done.stdout + done.stderr

    def script(self, text: str) -> Path:
        path = self.folder / "script.py"
        path.write_text(text)
        return path


def _expect(is_right: bool, output: str) -> None:
    if not is_right:
        raise CheckFailed(f"unexpected output: {' '.join(output.split())[-300:]}")


def _version(place: Place) -> None:
    output = place.run("mpiddp", "--version")
    _expect(output == f"mpiddp {mpiddp.__version__}\n", output)


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


def _verify_0_1_0(place: Place) -> None:
    """A checkpoint that another environment has written, as on a login node."""
    run_dir = place.folder / "run_of_0.1.0"
    shutil.copytree(ROOT / "tests/data/run_of_0.1.0", run_dir)
    _verify(place, run_dir)


def _verify(place: Place, run_dir: Path) -> None:
    output = place.run("mpiddp", "checkpoints", "verify", run_dir)
    _expect("valid" in output, output)
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
    command = (place.environment.bin / "python", place.script(ALL_REDUCE))
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
    """The workarounds of tests/test_still_needed.py are needed with these versions too."""
    options = ("-o", "addopts=", "-q", "-p", "no:cacheprovider")
    place.run("python", "-m", "pytest", *options, "tests/test_still_needed.py", cwd=ROOT)


Check = Callable[[Place], None]
_LAUNCHER: dict[str, Check] = {
    "version": _version,
    "hosts check": _hosts_check,
    "dry run": _dry_run,
    "verify": _verify_0_1_0,
}
_RANKS: dict[str, Check] = {
    "launch": _launch,
    "command": _command,
    "raw mpirun": _raw_mpirun,
    "train": _train,
    "images": _images,
}
_EXTRAS: dict[str, Check] = {"spawn": _spawn, "bench": _bench, "test": _still_needed}


def checks_of(environment: Environment) -> dict[str, Check]:
    """The checks that the extras of the environment are enough for."""
    extras = environment.kind.extras.split(",")
    ranks = _RANKS if "train" in extras else {}
    return {**_LAUNCHER, **ranks, **{name: _EXTRAS[name] for name in extras if name in _EXTRAS}}


def smoke(environment: Environment, timeout_s: float) -> Result:
    """All checks of the environment, up to the first that fails."""
    began = time.monotonic()
    seconds: dict[str, float] = {}
    full_python, packages = "", {}
    state, reason = "passed", ""
    name = "versions"
    try:
        with tempfile.TemporaryDirectory(prefix="mpiddp-versions-") as folder:
            here = Place(environment, Path(folder), timeout_s)
            full_python, found = json.loads(here.run("python", "-c", VERSIONS))
            packages = {each: found[each] for each in SHOWN.values() if each in found}
        for name, check in checks_of(environment).items():
            check_began = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="mpiddp-versions-") as folder:
                check(Place(environment, Path(folder), timeout_s))
            seconds[name] = round(time.monotonic() - check_began, 1)
    except CheckFailed as failure:
        state, reason = "failed", f"{name}: {failure}"
    total = round(time.monotonic() - began, 1)
    version, kind = environment.version, environment.kind.name
    return Result(version, kind, state, reason, full_python, packages, seconds, total)
