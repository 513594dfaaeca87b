"""A rank that does not answer in an agreement is named, ends the job with code 1, and is restarted.

Tests mpiddp/runtime/job/coordinator.py, mpiddp/runtime/start/join.py.
python -m pytest tests/ranks/launch/test_no_answer.py
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from socket import gethostname

from tests.support.errors import error
from tests.support.ranks import launch, mpirun, own_lines, script

# In the first attempt, rank 1 hangs before an agreement within an agreement.
HANGS = """
import os, sys, time
from mpiddp.errors import JobFailed
from mpiddp.runtime.join import join
with join() as coordinator:
    if coordinator.world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        time.sleep(1000)
    with coordinator.all_or_none(timeout_s=600):
        values = coordinator.all_gather_json(coordinator.world.rank, timeout_s=2)
print(f"{values}\\n", end="", flush=True)
"""
ONE_RANK_FAILS = """
from mpiddp.errors import JobFailed, UserError
from mpiddp.runtime.join import join
with join() as coordinator:
    with coordinator.all_or_none():
        if coordinator.world.rank == 1:
            raise JobFailed("the disk of this host failed.")
"""
# In the first attempt, rank 1 hangs before the second save, while rank 0 waits for it there.
HANGS_IN_A_SAVE = """
import os, sys, time, mpiddp
with mpiddp.process_group() as world:
    checkpoints = mpiddp.Checkpoints(sys.argv[1], every=1, timeout_s=2)
    resumed = checkpoints.resume()
    first = resumed.step + 1 if resumed else 1
    for step in (first, first + 1):
        if step == 2 and world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            time.sleep(1000)
        checkpoints.save(step, {"step": step})
print(f"saved {first + 1}\\n", end="", flush=True)
"""
WHO, OTHERS = f"rank 1 on {gethostname()} ", " The other ranks were stopped."
VERDICT = error("did not answer", f"mpiddp: {WHO}", " 2 s", OTHERS)


def test_it_is_restarted_within_one_timeout_although_agreements_nest(tmp_path: Path) -> None:
    since = time.monotonic()
    done = launch("-H", "localhost:2", "--max-restarts=1", script(tmp_path, HANGS))
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n[0, 1]\n"), done.stderr
    assert re.search(f"{VERDICT}\n", done.stderr), done.stderr
    assert time.monotonic() - since < 300  # of the 600 s of the outer agreement


def test_a_rank_that_hangs_before_a_save_is_named_and_restarted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = (script(tmp_path, HANGS_IN_A_SAVE), str(run))
    done = launch("-H", "localhost:2", "--max-restarts=1", *job)
    resumed = f"resuming from {run}/checkpoints/step_00000001: step 1\n"
    assert (done.returncode, done.stdout) == (0, resumed + "saved 3\n" * 2), done.stderr
    assert re.search(f"{VERDICT}\n", done.stderr), done.stderr


def test_without_restarts_the_exit_code_is_1(tmp_path: Path) -> None:
    done = launch("-H", "localhost:2", script(tmp_path, HANGS))
    assert done.returncode == 1
    assert re.search(rf"{VERDICT}\n\Z", done.stderr), done.stderr
    assert done.stderr.count("") == 1


def test_under_a_raw_mpirun_one_rank_prints_the_sentence(tmp_path: Path) -> None:
    done = mpirun(2, "-m", "mpiddp", "run", script(tmp_path, HANGS))
    assert done.returncode == 1
    (line,) = own_lines(done.stderr)
    assert re.fullmatch(error("did not answer", WHO, " 2 s"), line), line


def test_a_failed_machine_ends_all_ranks_with_code_1(tmp_path: Path) -> None:
    path = script(tmp_path, ONE_RANK_FAILS)
    sentence = f"rank 1 on {gethostname()}: the disk of this host failed."
    done = launch("-H", "localhost:2", path)
    assert done.returncode == 1
    assert done.stderr.endswith(f"mpiddp: {sentence} The other ranks were stopped.\n")
    assert done.stderr.count(sentence) == 1
    done = mpirun(2, "-m", "mpiddp", "run", path)
    assert (done.returncode, own_lines(done.stderr)) == (1, [sentence])


def test_a_rank_that_cannot_reach_its_launcher_is_no_bad_input(tmp_path: Path) -> None:
    """A launcher that does not answer is what a machine or a network did."""
    unreachable = {"MPIDDP_CONTROL": "127.0.0.1:1", "MPIDDP_CONTROL_SECRET": "00"}
    done = mpirun(1, "-m", "mpiddp", "run", script(tmp_path, ""), env=unreachable)
    assert done.returncode == 1
    (line,) = own_lines(done.stderr)
    values = (f"rank 0 on {gethostname()} ", "127.0.0.1 port 1 ", "Connection refused")
    assert re.fullmatch(error("reach the launcher", *values), line), line
