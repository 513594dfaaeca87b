"""No variable of an MPI reaches a command, and a script that needs no torch does not wait for it.

Tests mpiddp/runtime/child.py.
python -m pytest tests/unit/runtime/test_command_variables.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mpiddp.protocol.variables import RUN_ID
from mpiddp.runtime.child import SCRIPT, Program, command_environment
from mpiddp.world import RANK_SOURCES, RankSource, World

OF_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "launcher", [each for each in RANK_SOURCES if each.mpis], ids=lambda each: each.name
)
def test_no_variable_of_an_mpi_reaches_the_command(launcher: RankSource) -> None:
    """A script in it is a rank by torchrun's variables. Its GPU may be the only one that it sees."""
    kept = {**OF_TORCHRUN, "PATH": "/bin", "TORCHELASTIC_RUN_ID": "a"}
    of_mpi = dict.fromkeys((*launcher.variables, *launcher.proof), "0")
    found = command_environment(of_mpi | kept)
    assert found == {**kept, RUN_ID: "a"}
    world = World.from_env(found)
    assert (world.rank, world.local_rank, world.launcher.hides_gpus) == (1, 1, True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import os, sys\nfrom pathlib import Path\nprint(os.environ['RANK'])", False),
        ("import mpiddp\nmpiddp.should_stop()", False),
        ("import os\nimport torch", True),
        ("import lightning as L", True),
        ("from model import Net", True),
        ("import multiprocessing.pool", True),
        ("import runpy\nrunpy.run_path('train.py')", True),
    ],
)
def test_what_may_use_torch(tmp_path: Path, text: str, expected: bool) -> None:
    """A script of Python's own modules alone begins without it."""
    (tmp_path / "train.py").write_text(text)
    assert Program(SCRIPT, str(tmp_path / "train.py")).may_use_torch is expected
