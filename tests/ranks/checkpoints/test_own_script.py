"""examples/ddp_with_checkpoints.py resumes exactly, after a kill and after a stop.

Tests mpiddp/checkpoints/script.py under launchers.
python -m pytest tests/ranks/checkpoints/test_own_script.py
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mpiddp.hosts.sockets import bind
from tests.support.errors import error
from tests.support.own_script import DIES, STEPS, example, launch, model, steps_kept
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, clean_env, mpirun_command, own_lines, run_command, script
from tests.support.training import unequal

SLOW = """
        __import__("time").sleep(0.1)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run of two ranks."""
    job = example(tmp_path_factory.mktemp("whole"))
    done = launch(job, "-H", "localhost:2")
    assert done.returncode == 0, done.stderr
    assert steps_kept(job.parent / "runs/ddp") == [35, 40]
    return job.parent


def test_a_killed_job_restarts_and_ends_with_the_same_bits(tmp_path: Path, whole: Path) -> None:
    job = example(tmp_path / "killed", each_step=DIES)
    done = launch(job, "-H", "localhost:2", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert "was killed by SIGKILL" in done.stderr
    assert "resuming from runs/ddp/checkpoints/step_00000015: step 15\n" in done.stdout
    assert unequal(model(job.parent), model(whole)) == []


def test_a_stopped_job_saves_its_last_step_and_resumes_with_the_same_bits(
    tmp_path: Path, whole: Path
) -> None:
    job = example(tmp_path / "stopped", every=1000, each_step=SLOW)
    command = [*LAUNCH, "-H", "localhost:2", str(job)]
    with subprocess.Popen(
        command, env=clean_env(), cwd=job.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        wait_for(job.parent / "runs/ddp/owner.json")
        time.sleep(1)  # not at the first step
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 75, stderr
    (step,) = steps_kept(job.parent / "runs/ddp")
    assert 0 < step < STEPS
    assert "mpiddp: to resume: mpiddp launch -H localhost:2" in stderr
    assert not (job.parent / "model.pt").exists()
    done = launch(job, "-H", "localhost:2")
    assert done.returncode == 0, done.stderr
    assert f"step_{step:08d}: step {step}\n" in done.stdout
    assert unequal(model(job.parent), model(whole)) == []


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


LAUNCHERS = {
    "mpirun": [*mpirun_command(2), "-m", "mpiddp", "run"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_same_bits_under_other_launchers(tmp_path: Path, whole: Path, launcher: str) -> None:
    """Each resumes from step 35 of the whole run, which `mpiddp launch` has started."""
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    (folder / "model.pt").unlink()
    shutil.rmtree(folder / "runs/ddp/checkpoints/step_00000040")
    done = run_command([*LAUNCHERS[launcher], str(folder / "script.py")], folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("resuming from runs/ddp/checkpoints/step_00000035: step 35\n")
    assert unequal(model(folder), model(whole)) == []
    assert steps_kept(folder / "runs/ddp") == [35, 40]
    assert not (folder / "runs/ddp/owner.json").exists()


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_resumes(tmp_path: Path, whole: Path, ranks: int) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "runs/ddp/checkpoints/step_00000040")
    done = run_command([*LAUNCH, "-H", f"localhost:{ranks}", str(folder / "script.py")], folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "resuming from runs/ddp/checkpoints/step_00000035: step 35\n"
    assert unequal(model(folder), model(whole)) != []  # other batches
    state = json.loads((folder / "runs/ddp/checkpoints/step_00000040/state.json").read_text())
    assert (state["world_size"], state["step"]) == (ranks, 40)


# Prints what each rank resumes: its own state and its next random number.
PER_RANK = """
import sys, torch, mpiddp
world = mpiddp.init(backend="gloo")
torch.manual_seed(100 + world.rank)
checkpoints = mpiddp.Checkpoints(sys.argv[1])
saved = checkpoints.resume()
number = f"{torch.rand(()).item():.6f}"
facts = (saved.step, saved.per_rank, saved.world_size, saved.state) if saved else ()
sys.stdout.write(f"{world.rank} {number} {facts}\\n")
if saved is None:
    torch.manual_seed(world.rank)
    checkpoints.save(1, {"shared": 5}, per_rank={"position": world.rank * 10})
"""


def test_a_rank_gets_its_own_state_back_if_it_existed(tmp_path: Path) -> None:
    job = script(tmp_path, PER_RANK)
    for ranks in (2, 2, 3, 1):
        command = [*mpirun_command(ranks), job, str(tmp_path / "run")]
        done = run_command(command, tmp_path)
        assert (done.returncode, own_lines(done.stderr)) == (0, [])
        lines = {line.partition(" ")[0]: line for line in done.stdout.splitlines()}
        if (tmp_path / "first").exists():
            for rank in map(str, range(ranks)):
                existed = int(rank) < 2
                torch.manual_seed(int(rank) if existed else 100 + int(rank))
                own = {"position": int(rank) * 10} if existed else {}
                number = f"{torch.rand(()).item():.6f}"
                assert lines[rank] == f"{rank} {number} (1, {own}, 2, {{'shared': 5}})"
        (tmp_path / "first").touch()


# What goes wrong on one rank is an error of all ranks.
REFUSED = """
import os, sys, mpiddp
world = mpiddp.init(backend="gloo")
checkpoints = mpiddp.Checkpoints(sys.argv[1], config={"width": 1})
try:
    checkpoints.resume()
    checkpoints.save(1, {})
except mpiddp.UserError as error:
    sys.stdout.write(f"{world.rank}: {error}\\n")
if sys.argv[2:]:
    checkpoints.close()
    mpiddp.Checkpoints(sys.argv[1], config={"width": 2}).resume()
"""


def test_all_ranks_raise_the_same_error(tmp_path: Path) -> None:
    job = script(tmp_path, REFUSED)
    file = tmp_path / "file"
    file.write_text("")
    done = run_command([*LAUNCH, "-H", "localhost:2", job, str(file)], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = sorted(done.stdout.splitlines())
    for rank, line in zip(range(2), lines, strict=True):
        assert re.fullmatch(error("Name another folder", f"{rank}: ", "file "), line), line


def test_an_error_that_is_not_caught_is_bad_input(tmp_path: Path) -> None:
    """One sentence, code 2, no restart."""
    job = script(tmp_path, REFUSED)
    first = run_command([*LAUNCH, "-H", "localhost:2", job, str(tmp_path / "run")], tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    command = [
        *LAUNCH,
        "-H",
        "localhost:2",
        "--max-restarts",
        "3",
        job,
        str(tmp_path / "run"),
        "again",
    ]
    done = run_command(command, tmp_path)
    assert done.returncode == 2, done.stderr
    sentence = error("same config", "width 1, now 2. ")
    assert len(re.findall(sentence, done.stderr)) == 1, done.stderr
    assert "restart" not in done.stderr
    assert steps_kept(tmp_path / "run") == [1]


LOST = """
import os, sys, mpiddp
import mpiddp.checkpoints.save as files
world = mpiddp.init(backend="gloo")
checkpoints = mpiddp.Checkpoints(sys.argv[1])
checkpoints.resume()
def write_files(*arguments):
    raise OSError(28, "No space left on device")
files.write_files = write_files
checkpoints.save(1, {})
sys.exit(0)
"""


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_that_loses_its_last_save_fails(tmp_path: Path, launcher: str) -> None:
    job = script(tmp_path, LOST)
    done = run_command([*LAUNCHERS[launcher], job, str(tmp_path / "run")], tmp_path)
    assert done.returncode == 1, done.stderr
    sentence = error(": step", f"{tmp_path}/run/checkpoints: step 1 ")
    assert re.search(sentence, done.stderr), done.stderr


WITHOUT_GROUP = """
import sys, mpiddp
checkpoints = mpiddp.Checkpoints(sys.argv[1])
checkpoints.resume()
"""


def test_several_ranks_need_a_process_group(tmp_path: Path) -> None:
    job = script(tmp_path, WITHOUT_GROUP)
    done = run_command([*LAUNCH, "-H", "localhost:2", job, str(tmp_path / "run")], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    values = ("2 ranks", "torch.distributed.init_process_group")
    assert re.match(error("mpiddp.Checkpoints needs", *values), done.stderr), done.stderr
    assert not (tmp_path / "run").exists()


RESTARTED = """
import os, sys, mpiddp
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
sys.stdout.write(f"{attempt} {os.environ.get('MPIDDP_RUN_DIR')}\\n")
sys.stdout.flush()
if attempt == "1":
    mpiddp.Checkpoints("run").resume()
sys.exit(3 if attempt < "2" else 0)
"""


def test_a_restart_knows_the_folder_that_an_earlier_attempt_created(tmp_path: Path) -> None:
    job = script(tmp_path, RESTARTED)
    done = run_command([*LAUNCH, "-H", "localhost:1", "--max-restarts", "2", job], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"0 None\n1 None\n2 {tmp_path}/run\n"


BY_HAND = """
import sys, torch.distributed as dist, mpiddp
if sys.argv[2] == "after":
    dist.init_process_group("gloo")
checkpoints = mpiddp.Checkpoints(sys.argv[1])
dist.init_process_group("gloo")
checkpoints.resume()
checkpoints.save(1, {})
"""


@pytest.mark.parametrize(("order", "code"), [("before", 0), ("after", 1)])
def test_variables_that_are_set_by_hand(tmp_path: Path, order: str, code: int) -> None:
    with bind("127.0.0.1", 0, "here") as listener:
        port = listener.getsockname()[1]
    variables = {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    done = subprocess.run(
        [sys.executable, script(tmp_path, BY_HAND), str(tmp_path / "run"), order],
        env=clean_env(variables), capture_output=True, text=True, timeout=PATIENCE_S
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    late = error("create mpiddp.Checkpoints", "init_process_group", "mpiddp run or torchrun")
    assert bool(re.search(late, done.stderr)) == bool(code)
    assert (tmp_path / "run/checkpoints/step_00000001").exists() != bool(code)


# Hosts that share nothing
