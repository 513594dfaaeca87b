"""Checks of `mpiddp doctor` as functions, and verdicts of `mpiddp drill` about what ranks have recorded.

tests/promises/test_doctor.py has the faults of real hosts. Tests mpiddp/doctor/ and mpiddp/drill/.
"""

import pytest

from mpiddp.doctor import main as doctor
from mpiddp.drill import main as drill
from mpiddp.drill.faults import FAULTS
from mpiddp.drill.findings import judge
from mpiddp.drill.history import History, RecordedAttempt, State
from mpiddp.drill.rehearse import Ended, Rehearsal
from mpiddp.errors import UserError
from mpiddp.hosts.transport import Transport
from tests.support.errors import error
from tests.support.machine import executable

KILL, *_ = FAULTS


def state(step: int, run: str) -> State:
    """After a step of a run that makes other random choices than one of another name."""
    return {"weights": f"{step} {run}", "entries": {"net": f"{step} {run}"}}


def rehearsal(*spans: tuple[int, int, str]) -> Rehearsal:
    """Attempts, each with its first and last step. Each has saved step 2."""
    save = {"step": 2, "path": "/x/a.pt"}
    attempts = [
        RecordedAttempt([state(step, run) for step in range(first, last + 1)], [save])
        for first, last, run in spans
    ]
    ended = [Ended(1, "")] * (len(spans) - 1) + [Ended(0, "")]
    return Rehearsal(True, ended, 1.0, [History(attempts)])


UNDISTURBED = rehearsal((0, 4, "a"))


def test_a_script_that_does_not_repeat_itself_is_not_compared():
    result = judge(UNDISTURBED, KILL, rehearsal((0, 3, "b"), (2, 4, "b")))
    assert (result.passed, result.weights_equal) == (None, None)
    sentence = drill.table([result]).splitlines()[-1]
    assert "differ from step 0. Call torch.manual_seed(0)" in sentence


def test_a_run_that_begins_anew_fails_although_it_ends_equal():
    result = judge(UNDISTURBED, KILL, rehearsal((0, 3, "a"), (0, 4, "a")))
    assert (result.weights_equal, result.passed) == (True, False)
    assert result.cause == "begins anew, although it had saved at step 2"


def test_this_machine_alone_needs_no_ssh(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Transport, "is_installed", False)
    mpirun = executable(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    assert doctor.main(["-H", "localhost:1", "--quick", "--mpirun", mpirun]) == 0
    assert "no other host was to be asked" in capsys.readouterr().out
    with pytest.raises(UserError, match=error("openssh-client")):
        doctor.main(["-H", "localhost:1,n1.invalid:1", "--quick", "--mpirun", mpirun])
