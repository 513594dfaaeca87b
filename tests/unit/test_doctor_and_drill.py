"""Checks of `mpiddp doctor` as functions, and verdicts of `mpiddp drill` about what ranks have recorded.

tests/promises/test_doctor.py has the faults of real hosts. Tests mpiddp/doctor/ and mpiddp/drill/.
"""

import pytest

from mpiddp.doctor import main as doctor
from mpiddp.drill import main as drill
from mpiddp.drill.faults import FAULTS
from mpiddp.drill.findings import judge, last_error
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
    """It failed once the time for a second undisturbed run was short."""
    result = judge(UNDISTURBED, KILL, rehearsal((0, 3, "b"), (2, 4, "b")))
    assert (result.passed, result.weights_equal) == (True, None)
    sentence = drill.table([result]).splitlines()[-1]
    assert sentence.endswith("two runs without a fault differ from step 0.")


def test_a_run_that_begins_anew_fails_although_it_ends_equal():
    result = judge(UNDISTURBED, KILL, rehearsal((0, 3, "a"), (0, 4, "a")))
    assert (result.weights_equal, result.passed) == (True, False)
    assert result.cause == "begins anew, although it had saved at step 2"


def test_the_error_of_a_run_is_none_of_the_notes_around_it():
    verdict = "rank 0 on a ended first, with exit code 1: no data. The other ranks were stopped."
    stderr = f"mpiddp: no hosts given\n[rank 0] 3\nmpiddp: {verdict}\nmpiddp: not shown\n"
    assert last_error(Ended(1, stderr)) == verdict.rstrip(".")
    assert last_error(Ended(1, "mpiddp: no hosts given\nmpiddp: no route\n")) == "no route"


def test_this_machine_alone_needs_no_ssh(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Transport, "is_installed", False)
    mpirun = executable(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    assert doctor.main(["-H", "localhost:1", "--quick", "--mpirun", mpirun]) == 0
    assert "no other host was to be asked" in capsys.readouterr().out
    with pytest.raises(UserError, match=error("openssh-client")):
        doctor.main(["-H", "localhost:1,n1.invalid:1", "--quick", "--mpirun", mpirun])
