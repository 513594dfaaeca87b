"""No variable of an MPI reaches a command, and a script that needs no torch does not wait for it.

Tests mpiddp/runtime/{program,reports}.py.
"""

import pytest

from mpiddp.protocol.variables import RUN_ID
from mpiddp.runtime.program import SCRIPT, Program, command_environment
from mpiddp.runtime.reports import announce
from mpiddp.world import RANK_SOURCES, World

OF_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "launcher", [each for each in RANK_SOURCES if each.mpis], ids=lambda each: each.name
)
def test_no_variable_of_an_mpi_reaches_the_command(launcher):
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
        ("import torch\nrank = int(os.environ['RANK'])\nif 'X' in os.environ: pass", True),
        ("import torch\nd = os.environ.get('X') == 1 and os.environ['Y'] == '='", True),
        ("import os\nos.environ['OMP_NUM_THREADS'] = '3'\nimport torch", False),
        ("import os\nos.environ.setdefault('X', '1')\nimport torch", False),
        ("from os import environ as e\ne['X'] = '1'\nimport torch", False),
        ("import os\ndel os.environ['X']\nimport torch", False),
        ("import os\nos.putenv('X', '1')\nimport torch", False),
        ("from dotenv import load_dotenv\nload_dotenv()\nimport torch", False),
        ("import settings\nimport torch", False),
    ],
)
def test_for_what_torch_is_imported_ahead(tmp_path, text, expected):
    """Not for a script of Python's own modules, nor for one that sets a variable, in any of its files."""
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "settings.py").write_text("import os\nos.environ.update(TORCH_LOGS='+dynamo')")
    assert Program(SCRIPT, str(tmp_path / "train.py")).imports_torch is expected


@pytest.mark.parametrize("arguments", [["x" * 100_000] * 6, "--resume last", ["a\0"]])
def test_an_announcement_that_is_no_command(arguments):
    with pytest.raises(ValueError, match=r"^mpiddp.announce: "):
        announce(resume_args=arguments)
