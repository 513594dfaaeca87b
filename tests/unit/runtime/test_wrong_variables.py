"""Environment variables with values that nobody should have set: one sentence each, and no traceback.

Tests mpiddp/runtime/ and mpiddp/hosts/sockets.py. test_world.py has the launchers' own variables.
"""

import pytest

from mpiddp.errors import UserError
from mpiddp.runtime.rendezvous.by_hand import address_of_rank_0
from mpiddp.runtime.reports import announce
from mpiddp.text import shown
from mpiddp.world import World
from tests.support.errors import error


@pytest.mark.parametrize("value", ["[1-]", ",", "", "n[0-999999999]"])
def test_a_list_of_nodes_that_slurm_never_writes(value):
    env = {"SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    env["SLURM_STEP_NODELIST"] = value
    sentence = error("not that of a Slurm", f'SLURM_STEP_NODELIST="{shown(value)}"')
    with pytest.raises(UserError, match=sentence):
        address_of_rank_0(World.from_env(env), env)


@pytest.mark.parametrize("arguments", [["x" * 100_000] * 6, "--resume last", ["a\0"]])
def test_an_announcement_that_is_no_command(arguments):
    with pytest.raises(ValueError, match=r"^mpiddp.announce: "):
        announce(resume_args=arguments)
