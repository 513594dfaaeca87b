"""The commands of a stage: those of `mpiddp`, with their exit code, output and time."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.stage import Context, Failed
from mpiddp.bench.result_lines import read_results

ROOT = Path(__file__).resolve().parents[2]
RANKS = Path(__file__).with_name("ranks")
MODULE = "benchmarks.gpu.ranks"
PIDS = "MPIDDP_GPU_PIDS"  # a folder: each rank of shared_gpu.py writes its pid there
_SHOWN_CHARS = 3000  # of a failed command's output


@dataclass(frozen=True)
class Ended:
    """A command that has ended. `output` has its stdout and stderr in one."""

    code: int
    output: str
    seconds: float

    @property
    def results(self) -> list[dict[str, Any]]:
        """What its ranks sent with `mpiddp.bench.result_lines.emit`."""
        return read_results(self.output.splitlines())


def run(
    context: Context,
    command: Sequence[str],
    *,
    codes: Sequence[int] | None = (0,),
    env: Mapping[str, str] | None = None,
    while_running: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> Ended:
    """Run a command to its end. The record lists it, and the stage's log has its output.

    Args:
        codes: the exit codes that are right; None for any.
        env: variables beside those of this process.
        while_running: called once with the running process.

    Raises:
        Failed: another exit code.
    """
    file = context.folder / f"output-{len(context.record.commands)}.txt"
    since = time.monotonic()
    entry: dict[str, Any] = {"command": readable(command, env or {})}
    context.record.commands.append(entry)
    context.write()
    with file.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            if while_running is not None:
                while_running(process)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait()
    ended = Ended(code, file.read_text(errors="replace"), round(time.monotonic() - since, 2))
    print(f"$ {entry['command']}\n{ended.output}", flush=True)
    entry |= {"code": code, "seconds": ended.seconds}
    if codes is not None and code not in codes:
        entry["output"] = ended.output[-_SHOWN_CHARS:]
        expected = " or ".join(map(str, codes))
        raise Failed(f"exit code {code} instead of {expected}: {_last_line(ended.output)}")
    context.write()
    return ended


def readable(command: Sequence[str], env: Mapping[str, str]) -> str:
    """The command line without the paths of this machine."""
    names = {sys.executable: "python"}
    words = [names.get(word, word).replace(f"{ROOT}{os.sep}", "") for word in command]
    return shlex.join([*(f"{name}={value}" for name, value in env.items()), *words])


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip(" -*")]
    return lines[-1][:300] if lines else "no output"


def mpiddp(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mpiddp", *arguments]


def launch(ranks: int, *job: str) -> list[str]:
    """`mpiddp launch` of a job on this machine: a script, or -m and a module. Ranks may share the GPU."""
    shares: list[str] = []
    return mpiddp("launch", "-H", f"localhost:{ranks}", *shares, "--grace", "2s", *job)


def train(ranks: int, out: Path, *options: str) -> list[str]:
    """`mpiddp launch` of a training. Two ranks share the GPU, and NCCL takes them for two hosts."""
    job = ["-m", "mpiddp", "train"]
    if ranks > 1:
        job = [str(RANKS / "shared_gpu.py"), "train"]
    return launch(ranks, *job, f"--out={out}", *options)


def mpirun(ranks: int, *job: str) -> list[str]:
    """A plain mpirun of Python, without `mpiddp launch`.

    Raises:
        Failed: there is none beside this Python, and none on PATH.
    """
    found = shutil.which(str(Path(sys.executable).with_name("mpirun"))) or shutil.which("mpirun")
    if found is None:
        raise Failed("no mpirun beside this python and none on PATH")
    flags = ["--allow-run-as-root", "--bind-to", "none", "--oversubscribe"]
    return [found, *flags, "-np", str(ranks), sys.executable, *job]


def summary(run_folder: Path) -> dict[str, Any]:
    """summary.json of a training."""
    found: dict[str, Any] = json.loads((run_folder / "summary.json").read_text())
    return found


def records(run_folder: Path) -> list[dict[str, Any]]:
    """The complete lines of a training's metrics.jsonl; [] before its first one."""
    file = run_folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_step(process: subprocess.Popen[bytes], run_folder: Path, step: int) -> None:
    """Return once the training has logged this step, or has ended."""
    while process.poll() is None:
        if any(record["step"] >= step for record in records(run_folder)):
            return
        time.sleep(0.05)


def watched(context: Context, *arguments: str) -> Ended:
    """A verb of `mpiddp` alone, without a launcher, watched from inside."""
    return run(context, [sys.executable, "-m", f"{MODULE}.watched", *arguments])


def require_equal_checkpoints(context: Context, one: Path, other: Path, step: int) -> None:
    """Raise Failed unless both runs' checkpoints of this step have the same tensors, bit by bit."""
    folders = [str(out / "checkpoints" / f"step_{step:08d}") for out in (one, other)]
    ended = run(context, [sys.executable, "-m", f"{MODULE}.same_tensors", *folders])
    [found] = ended.results
    context.figure(**{f"tensors compared at step {step}": found["compared"]})
    different = found["different"]
    context.require(not different, f"step {step} of {one.name} and {other.name}: {different[:5]}")


def make_images(context: Context, count: int) -> Path:
    """A folder with train/ and val/ of small JPEGs."""
    folder = context.folder / "images"
    run(context, [sys.executable, "-m", f"{MODULE}.make_images", str(folder), str(count)])
    return folder
