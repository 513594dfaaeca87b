"""A child of a rank whose variables somebody changed gets one sentence, and no traceback.

Tests mpiddp/runtime/ and mpiddp/hosts/sockets.py. test_world.py has the launchers' own variables.
python -m pytest tests/integration/runtime/test_changed_variables.py
"""

from __future__ import annotations

import pytest

from mpiddp.errors import UserError
from mpiddp.runtime.job.session import Session
from mpiddp.runtime.join import _as_script
from mpiddp.world import World
from tests.support.errors import error


@pytest.mark.parametrize(
    "change", [{"MASTER_PORT": "9" * 5000}, {"GROUP_RANK": "²"}, {"GROUP_WORLD_SIZE": ""}]
)
def test_a_child_of_a_rank_with_changed_variables(
    change: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    for name, value in (env | change).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=error("MASTER_ADDR, MASTER_PORT", *change)):
        _as_script(World(0, 1, 0, 1), Session())
