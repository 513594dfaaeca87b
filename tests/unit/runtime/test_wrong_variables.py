"""Environment variables with values that nobody should have set: one sentence each, and no traceback.

Tests mpiddp/runtime/ and mpiddp/hosts/sockets.py. test_world.py has the launchers' own variables.
python -m pytest tests/unit/runtime/test_wrong_variables.py
"""

from __future__ import annotations

import re

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.sockets import port_in
from mpiddp.runtime.rendezvous.address import slurm_address
from mpiddp.runtime.rendezvous.meet import joining_timeout_s
from mpiddp.runtime.rendezvous.placement import misplaced
from mpiddp.runtime.reports import announced
from mpiddp.text import shown
from tests.support.errors import error


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("SLURM_STEP_ID", each) for each in ("²", "9" * 5000)),
        *(("SLURM_STEP_NODELIST", each) for each in ("[1-]", ",", "", "n[0-999999999]")),
    ],
)
def test_variables_of_a_slurm_step_that_slurm_never_writes(name: str, value: str) -> None:
    env = {"SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "node1", name: value}
    with pytest.raises(UserError, match=error("not those of a Slurm", f"{name}=", shown(value))):
        slurm_address(env)


@pytest.mark.parametrize("port", ["9" * 5000, "65536", "²"])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(UserError, match=error("65535, or", f'MASTER_PORT="{shown(port)}"')):
        port_in({"MASTER_PORT": port})


@pytest.mark.parametrize("placement", ["a:x", "a:999999999", "a:999999,b:1", "", f"a:{'9' * 5000}"])
def test_a_placement_that_the_launcher_never_sets(placement: str) -> None:
    sentence = error("of hosts", f'MPIDDP_PLACEMENT="{shown(placement)}"')
    assert re.fullmatch(sentence, misplaced([], placement))


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "[" * 100_000, '{"global_batch_size": 0, "world_size": 2}', '{"world_size": 2}'],
)
def test_an_announcement_that_the_launcher_never_sets(text: str) -> None:
    with pytest.raises(UserError) as refused:
        announced({"MPIDDP_ANNOUNCED": text})
    sentence = error("not what", f'MPIDDP_ANNOUNCED="{shown(text)}"', "Unset it")
    assert re.fullmatch(sentence, str(refused.value))


@pytest.mark.parametrize("text", ["9" * 5000, "1e8", "nan", "x", "-1"])
def test_a_timeout_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDDP_TIMEOUT", text)
    sentence = error("a number", f'MPIDDP_TIMEOUT="{shown(text)}"', "100000000")
    with pytest.raises(UserError, match=sentence):
        joining_timeout_s()
