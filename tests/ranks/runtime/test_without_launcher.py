"""Ranks that no launcher and no MPI watches: they end each other, and a script may go on after an error.

Tests mpiddp/runtime/job/failure.py, mpiddp/runtime/job/stop.py.
python -m pytest tests/ranks/runtime/test_without_launcher.py
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env, script


def run(path: str) -> list[tuple[int, str, str]]:
    """Run a script as two ranks that know nothing but their variables: each rank's code, stdout, stderr."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    of_all = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, path],
            env=clean_env({**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            | {"LOCAL_WORLD_SIZE": "2"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=PATIENCE_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *each) for rank, each in zip(ranks, outputs, strict=True)]


@pytest.mark.parametrize(
    ("code", "own", "of_others"), [("3", 3, 3), ("-1", 255, 255), ("300", 44, 44), ("256", 0, 1)]
)
def test_an_exit_code_of_any_size_ends_the_others(
    tmp_path: Path, code: str, own: int, of_others: int
) -> None:
    """Without a launcher nothing else would end rank 0."""
    text = (
        "import os, sys, time, mpiddp\n"
        'with mpiddp.process_group(backend="gloo") as world:\n'
        "    if world.rank == 0:\n"
        f"        open({str(tmp_path / 'formed')!r}, 'w').close()\n"
        "        time.sleep(1000)\n"
        f"    while not os.path.exists({str(tmp_path / 'formed')!r}):\n"
        "        time.sleep(0.01)\n"
        f"    sys.exit({code})\n"
    )
    first, second = run(script(tmp_path, text))
    assert (first[0], second[0]) == (of_others, own)
    assert f"rank 1 on {socket.gethostname()} ended with exit code {of_others}\n" in second[2]


STOPS = """
import os, signal, time, mpiddp
with mpiddp.process_group(backend="gloo"):
    for _ in range(5):
        assert not mpiddp.should_stop()
with mpiddp.process_group(backend="gloo") as world:
    step = 0
    while True:
        step += 1
        if world.rank == 0 and step == 20:
            os.kill(os.getpid(), signal.SIGUSR1)
        if mpiddp.should_stop():
            break
        time.sleep(0.01 + 0.02 * world.rank)
print(step)
"""


def test_the_ranks_stop_at_the_same_step_of_a_second_group(tmp_path: Path) -> None:
    """They have proposed a step when they left the first one."""
    first, second = run(script(tmp_path, STOPS))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert first[1] == second[1]
    assert int(first[1]) >= 20


CAUGHT = """
import time, torch, torch.distributed as dist, mpiddp
from pathlib import Path
try:
    with mpiddp.process_group(backend="gloo") as world:
        # The news of one's error arrives while the other is leaving with its own.
        Path({folder!r}, f"formed{{world.rank}}").touch()
        while len(list(Path({folder!r}).glob("formed?"))) < 2:
            time.sleep(0.01)
        raise ValueError("for a second try")
except ValueError:
    time.sleep(2)  # the error would end it in 1.5 s
with mpiddp.process_group(backend="gloo") as world:
    time.sleep(2)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(int(total))
    if {fails} and world.rank == 1:
        raise RuntimeError("a bug")
    if {fails}:
        time.sleep(1000)
"""


def test_a_caught_error_ends_neither_the_script_nor_its_next_group(tmp_path: Path) -> None:
    ends = run(script(tmp_path, CAUGHT.format(fails=False, folder=str(tmp_path))))
    assert [end[:2] for end in ends] == [(0, "2\n")] * 2, ends


def test_an_error_after_a_caught_one_is_named(tmp_path: Path) -> None:
    first, second = run(script(tmp_path, CAUGHT.format(fails=True, folder=str(tmp_path))))
    assert (first[0], second[0]) == (1, 1)
    assert second[2].endswith(f"rank 1 on {socket.gethostname()} failed: RuntimeError: a bug\n")
    assert second[2].count("Traceback") == 1
    assert first[2] == ""


LATE = """
import time, mpiddp
for _ in range(2):
    try:
        with mpiddp.process_group(backend="gloo") as world:
            time.sleep({delay_s} * world.rank)
            raise ValueError("for a second try")
    except ValueError:
        time.sleep(2)  # the other's error would end it meanwhile
print("done")
"""


def test_a_rank_may_leave_with_its_error_later_than_another(tmp_path: Path) -> None:
    ends = run(script(tmp_path, LATE.format(delay_s=0.1)))
    assert ends == [(0, "done\n", "")] * 2, ends


def test_a_rank_that_stays_in_a_group_that_another_left_ends_the_next_group(tmp_path: Path) -> None:
    first, second = run(script(tmp_path, LATE.format(delay_s=1000)))
    assert first[:2] == second[:2] == (1, "")
    assert first[2].startswith(f"rank 0 on {socket.gethostname()} caught an error and went on")
    assert (first[2].count("\n"), second[2]) == (1, "")


HANGS = """
import time, mpiddp
try:
    with mpiddp.process_group(backend="gloo") as world:
        raise ValueError("a bug")
except ValueError:
    if world.rank == 0:
        time.sleep(1000)
    raise
"""


def test_an_error_that_one_rank_does_not_catch_ends_the_others(tmp_path: Path) -> None:
    """Also those that hang after an error of their own."""
    first, second = run(script(tmp_path, HANGS))
    assert (first[0], second[0]) == (1, 1)
    assert "ValueError: a bug" in second[2]
