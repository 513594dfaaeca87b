"""`mpiddp.spawn` on one host: results by rank, the first failure, limits, restarts, and no process left.

Tests mpiddp/spawning/, mpiddp/launch/launch_function.py, mpiddp/runtime/start/function.py.
python -m pytest tests/ranks/launch/test_spawn.py
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import mpiddp
from mpiddp import spawn
from mpiddp.checkpoints import folder as directory
from mpiddp.errors import JobFailed, RankFailed, UserError
from mpiddp.hosts.processes import descendants
from tests.support.errors import error
from tests.support.mpis import mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ALL_OUTPUT, ROOT, clean_env, script

HERE = socket.gethostname()
TWO: dict[str, Any] = {"hosts": "localhost:2"}
ONE: dict[str, Any] = {"hosts": ["localhost:1"]}


@pytest.fixture(autouse=True)
def _as_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell without a launcher's variables. The launcher shows what it shows to users."""
    env = clean_env()
    for name in os.environ.keys() - env.keys():
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for name in ALL_OUTPUT:
        monkeypatch.delenv(name)


@dataclass(frozen=True)
class Seen:
    """A result of a class that only the caller's own module has."""

    rank: int
    total: float
    mode: str
    is_on_a_command_line: bool


class Trouble(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def all_reduce(scale: float) -> Seen:
    import torch
    import torch.distributed as dist

    with mpiddp.process_group(backend="gloo") as world:
        total = torch.tensor(world.rank + 1.0)
        dist.all_reduce(total)
        print(f"out {world.rank}")
        print(f"err {world.rank}", file=sys.stderr)
    mode = os.environ["MY_TOKEN"]
    return Seen(world.rank, scale * total.item(), mode, on_a_command_line(mode))


def on_a_command_line(text: str) -> bool:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text.encode() in path.read_bytes():
                return True
    return False


def test_every_rank_returns_its_result_and_its_lines_reach_the_streams(
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_all_reduce("openmpi5", capsys)


def test_under_mpich(capsys: pytest.CaptureFixture[str]) -> None:
    check_all_reduce("mpich", capsys)


def check_all_reduce(mpi: str, capsys: pytest.CaptureFixture[str]) -> None:
    mode = f"private {os.getpid()}"
    found = spawn(all_reduce, 2.0, **TWO, mpirun=mpirun_of(mpi), env={"MY_TOKEN": mode})
    assert found == [Seen(rank, 6.0, mode, False) for rank in range(2)]
    out, err = capsys.readouterr()
    assert out == f"[rank 0 {HERE}] out 0\n"
    lines = [f"[rank {rank} {HERE}] err {rank}" for rank in range(2)]
    assert [line for line in sorted(err.splitlines()) if "] err " in line] == lines


def fails(failing: int) -> None:
    import torch.distributed as dist

    world = mpiddp.init(backend="gloo")
    if world.rank == failing:
        raise Trouble(7)
    dist.barrier()


def test_the_exception_of_the_first_rank_is_raised_here() -> None:
    own = Trouble.__init__
    with pytest.raises(RankFailed) as raised:
        spawn(fails, 1, **TWO)
    error = raised.value
    assert (error.rank, error.hostname) == (1, HERE)
    assert isinstance(error.__cause__, Trouble)
    assert error.__cause__.code == 7
    assert Trouble.__init__ is own  # the class is this one, and not changed either
    first, *lines, last = error.traceback.splitlines()
    assert (first, last) == ("Traceback (most recent call last):", f"{__name__}.Trouble: 7")
    assert "raise Trouble(7)" in [line.strip() for line in lines]
    assert "run_function.py" not in error.traceback
    sentence = f"rank 1 on {HERE} failed first: Trouble: 7. The other ranks were stopped."
    assert str(error) == f"{sentence}\n\n{error.traceback.rstrip()}"


def ends(how: str) -> None:
    if os.environ["RANK"] == "1":
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "exits":
            sys.exit(3)
        raise ValueError(threading.Lock())
    time.sleep(1000)


@pytest.mark.parametrize(
    ("how", "sentence", "has_traceback"),
    [
        ("killed", "was killed by SIGKILL. The other ranks were stopped.", False),
        ("exits", "ended first, with exit code 3. The other ranks were stopped.", False),
        ("raises", "failed first: ValueError: <unlocked _thread.lock object at ", True),
    ],
)
def test_a_rank_that_ends_without_a_pickled_exception(
    how: str, sentence: str, has_traceback: bool
) -> None:
    with pytest.raises(RankFailed) as raised:
        spawn(ends, how, **TWO)
    assert str(raised.value).startswith(f"rank 1 on {HERE} {sentence}")
    assert raised.value.__cause__ is None
    assert bool(raised.value.traceback) is has_traceback


@pytest.mark.parametrize(
    ("function", "refusal"),
    [
        (
            lambda: bytes(1000),
            error("Return less", "<lambda> ", " bytes", "max_result_bytes=900"),
        ),
        (lambda: (x for x in [1]), error("has returned", "<lambda> ", " generator ")),
        (lambda: spawn(len, "ab", ranks=2), error("mpiddp. Call", "mpiddp.spawn")),
        (lambda: mpiddp.init(backend="nccl"), error("Use --backend", "--backend nccl ")),
    ],
)
def test_a_refusal_of_a_rank_is_a_user_error(function: Callable[[], Any], refusal: str) -> None:
    with pytest.raises(UserError) as raised:
        spawn(function, **ONE, max_result_bytes=900, env={"CUDA_VISIBLE_DEVICES": ""})
    assert re.search(refusal, str(raised.value)), raised.value


def test_a_rank_without_cloudpickle(tmp_path: Path) -> None:
    text = "raise ModuleNotFoundError('hidden by a test', name='cloudpickle')\n"
    (tmp_path / "cloudpickle.py").write_text(text)
    with pytest.raises(UserError) as raised:
        spawn(len, "ab", **ONE, env={"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    values = ("cloudpickle", f"{sys.executable} ", "-m pip install '", "[spawn]'")
    sentence = error("have. Run", f"mpiddp.spawn on {HERE} ", *values)
    assert re.fullmatch(sentence, str(raised.value))


def fails_once() -> tuple[str, list[str]]:
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    mpiddp.announce(resume_args=["--resume", "last"])
    if attempt == "0" and os.environ["RANK"] == "1":
        raise RuntimeError("in the first attempt")
    return attempt, sys.argv


def test_a_restart_runs_the_function_again(capsys: pytest.CaptureFixture[str]) -> None:
    again = ("1", ["fails_once", "--resume", "last"])
    assert spawn(fails_once, **TWO, max_restarts=1) == [again, again]
    assert "(restart 1 of 1)." in capsys.readouterr().err


def stops() -> int:
    for step in count(1):
        if mpiddp.should_stop():
            return step
        if step == 5 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.01)
    raise AssertionError


def test_a_stop_on_request_returns_what_the_function_returns() -> None:
    first, second = spawn(stops, **TWO)
    assert first == second > 5


def saves(folder: str) -> tuple[int, str]:
    import torch

    checkpoints = mpiddp.Checkpoints(folder)
    saved = checkpoints.resume()
    step = saved.step if saved else 0
    checkpoints.save(step + 1, {"weights": torch.zeros(2)})
    return step, str(Path.cwd())


def test_checkpoints_and_the_working_folder(tmp_path: Path) -> None:
    for step in range(2):
        assert spawn(saves, "run", **ONE, cwd=tmp_path) == [(step, str(tmp_path))]
    assert len(directory.list_steps(tmp_path / "run" / "checkpoints")) == 2


class Unpicklable:
    """Its pickling fails, and says whether a checkpoint was complete by then."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def __reduce__(self) -> str:
        raise TypeError(f"saved: {self.checkpoint.is_dir()}")


def saves_and_returns_what_cannot_be_pickled(folder: str) -> object:
    import torch

    world = mpiddp.init(backend="gloo")
    checkpoints = mpiddp.Checkpoints(folder)
    checkpoints.save(1, {"weights": torch.zeros(10_000_000)})  # rank 0 writes
    return Unpicklable(checkpoint_of(folder)) if world.rank == 1 else None


def checkpoint_of(folder: str) -> Path:
    return Path(folder, "checkpoints", "step_00000001")


def test_a_refused_result_does_not_lose_the_last_save(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=error("has returned", "TypeError: saved: True")):
        spawn(saves_and_returns_what_cannot_be_pickled, str(tmp_path), **TWO)
    directory.verify(checkpoint_of(str(tmp_path)))


# Scripts that call it


def run(path: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, path],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """Its ranks do not run it again, nor do their processes of multiprocessing. The caller's own do."""
    text = """
import multiprocessing
import mpiddp

def work():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.map(abs, [-4])

try:
    print(mpiddp.spawn(work, hosts="localhost:1"))
except mpiddp.UserError as refusal:
    print(refusal)
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=print)
    child.start()
    child.join()
"""
    done = run(script(tmp_path, text))
    result, refusal = sorted(line for line in done.stdout.splitlines() if line)
    assert result == "[[4]]", done.stderr
    sentence = error("mpiddp.spawn is", "mpiddp.spawn ", 'if __name__ == "__main__":')
    assert re.fullmatch(sentence, refusal), refusal


def test_the_example_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs/your-own-script.md").read_text()
    section = page.partition("\n## From Python, or a notebook\n")[2]
    code = section.partition("```python\n")[2].partition("```")[0]
    assert code.count("node1:4,node2:4") == 1
    code = code.replace("node1:4,node2:4", "localhost:2").replace("range(100)", "range(3)")
    done = run(script(tmp_path, f"{code}print(len(losses))\n"))
    assert done.stdout == "2\n", done.stderr


SLEEPS = """
import os, time
import mpiddp

def work():
    print("pid", os.getpid())
    time.sleep(1000)

try:
    mpiddp.spawn(work, hosts="localhost:2", log_ranks="all")
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_caller_ends_the_job(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, script(tmp_path, SLEEPS)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as caller:
        assert caller.stdout is not None
        lines = [caller.stdout.readline() for _ in range(2)]
        pids = [int(re.sub(r"^\[rank \d .*\] pid ", "", line)) for line in lines]
        launcher = [pid for pid in descendants(caller.pid) if pid not in pids]
        caller.send_signal(number)
        out, err = caller.communicate(timeout=PATIENCE_S)
    assert out == ("interrupted\n" if number == signal.SIGINT else ""), err
    deadline = time.monotonic() + PATIENCE_S
    while left := [pid for pid in (*pids, *launcher) if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=error("launcher ended", "-9")):
        spawn(kills_its_launcher, **ONE)


def kills_its_launcher() -> None:
    os.kill(launcher_of_this_rank(), signal.SIGKILL)
    time.sleep(1000)


def launcher_of_this_rank() -> int:
    """The launcher is the parent of mpirun, which is this rank's."""
    pid = os.getpid()
    while b"launch-function" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        status = Path(f"/proc/{pid}/status").read_text()
        pid = int(re.search(r"^PPid:\s+(\d+)", status, re.MULTILINE)[1])  # type: ignore[index]
    return pid
