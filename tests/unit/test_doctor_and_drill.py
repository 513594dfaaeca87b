"""Checks of `mpiddp doctor` as functions, and verdicts of `mpiddp drill` about what ranks have recorded.

tests/promises/test_doctor.py has the faults of real hosts. Tests mpiddp/doctor/ and mpiddp/drill/.
"""

import pytest

from mpiddp import text
from mpiddp.doctor import compare
from mpiddp.doctor import main as doctor
from mpiddp.doctor.compare import FAIL, UNKNOWN
from mpiddp.drill import main as drill
from mpiddp.drill.faults import FAULTS
from mpiddp.drill.records import Attempt, History, Recording, State
from mpiddp.drill.rehearse import Ended, Rehearsal
from mpiddp.drill.verdict import judge, last_error
from mpiddp.errors import UserError
from mpiddp.hosts.transport import Transport
from tests.support.errors import error
from tests.support.machine import an_mpirun

KILL = FAULTS[0]
SAVE = {"step": 2, "in_handler": False, "path": "/x/a.pt"}


def state(step: int, run: str, samples: list[int] | None = None) -> State:
    """After a step of a run that makes other random choices than one of another name."""
    same = {"optimizer": "", "buffers": "", "rates": [0.1], "samples": samples or [step]}
    return {"weights": f"{step} {run}", "random": f"{step} {run}", **same}


def attempt(first: int, last: int, run: str, resumed: str = "") -> Attempt:
    before = state(first, run) | {"is_of_model": True}
    steps = [state(step, resumed or run) for step in range(first + 1, last + 1)]
    return Attempt(before, steps, [SAVE])


def rehearsal(*attempts: Attempt) -> Rehearsal:
    ended = [Ended(1, "")] * (len(attempts) - 1) + [Ended(0, "")]
    return Rehearsal(True, ended, 1.0, Recording([History([*attempts])]))


UNDISTURBED = rehearsal(attempt(0, 4, "a"))


def test_a_script_that_does_not_repeat_itself_is_not_compared():
    """It failed once the time for a second undisturbed run was short."""
    killed = rehearsal(attempt(0, 3, "b"), attempt(2, 4, "b"))
    result = judge(UNDISTURBED, KILL, killed)
    assert (result.passed, result.cause, result.weights_equal) == (True, "", None)
    assert result.differs_from == 0
    assert (result.steps_lost, result.checkpoint_lost) == (1, False)
    _, row, sentence = drill.table([result]).splitlines()
    assert row.split() == ["kill", "pass", "1", "no", "-", "0"]
    assert sentence.endswith("are not compared: two runs differ from step 0.")


def test_a_run_that_resumes_from_an_older_save_has_lost_a_checkpoint():
    anew = rehearsal(attempt(0, 3, "a"), attempt(0, 4, "a"))
    result = judge(UNDISTURBED, KILL, anew)
    assert result.checkpoint_lost
    assert result.cause.startswith("the run begins anew, although it had saved at step 2")


def test_what_a_flipped_bit_breaks_is_no_fault_of_the_classes():
    """torch blames the pickle for the bit."""
    flip = next(fault for fault in FAULTS if fault.name == "flip")
    failed = rehearsal(attempt(0, 3, "a"), Attempt(None, [], []))
    failed.ended[-1] = Ended(1, "_pickle.UnpicklingError: Weights only load failed. This file")
    assert "keep two checkpoints" in judge(UNDISTURBED, flip, failed).cause


def test_the_error_of_a_run_is_none_of_the_notes_around_it():
    verdict = "rank 0 on a ended first, with exit code 1: no data. The other ranks were stopped."
    said = f"mpiddp: no hosts given\n[rank 0] 3\nmpiddp: {verdict}\nmpiddp: not shown\n"
    assert last_error(Ended(1, said)) == verdict.rstrip(".")
    assert last_error(Ended(1, "mpiddp: no hosts given\nmpiddp: no route\n")) == "no route"


def test_without_a_majority_each_value_has_its_hosts():
    assert text.differences("torch", {"a": 1, "b": 2}) == "torch differs: 1 on a, 2 on b"


def test_what_loads_nowhere_has_one_line():
    everywhere = {name: {"mpi4py": "broken: cannot load MPI library"} for name in ("a", "b")}
    fact = "mpi4py does not load on a and b: cannot load MPI library"
    assert [*compare.stacks(everywhere)] == [(FAIL, fact, "install mpi4py again")]


def test_what_was_not_tried_is_unknown():
    """As between hosts that did not answer in time."""
    ((status, fact, _),) = compare.reach({}, {}, 41)
    assert (status, fact) == (UNKNOWN, "no direction between the hosts was tried")


def test_this_machine_alone_needs_no_ssh(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Transport, "is_installed", False)
    mpirun = an_mpirun(tmp_path)
    assert doctor.main(["-H", "localhost:1", "--quick", "--mpirun", mpirun]) == 0
    assert "no other host was to be asked" in capsys.readouterr().out
    with pytest.raises(UserError, match=error("openssh-client")):
        doctor.main(["-H", "localhost:1,n1.invalid:1", "--quick", "--mpirun", mpirun])
