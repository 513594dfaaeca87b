"""Checks of `mpiddp doctor` as functions. tests/promises/test_doctor.py has the faults of real hosts.

Tests mpiddp/doctor/{main,compare}.py.
"""

import pytest

from mpiddp.doctor import compare
from mpiddp.doctor.compare import FAIL, UNKNOWN
from mpiddp.doctor.main import main
from mpiddp.errors import UserError
from mpiddp.hosts.transport import Transport
from tests.support.errors import error
from tests.support.machine import an_mpirun


def test_without_a_majority_each_value_has_its_hosts():
    assert compare.differences("torch", {"a": 1, "b": 2}) == "torch differs: 1 on a, 2 on b"


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
    assert main(["-H", "localhost:1", "--quick", "--mpirun", mpirun]) == 0
    assert "no other host was to be asked" in capsys.readouterr().out
    with pytest.raises(UserError, match=error("openssh-client")):
        main(["-H", "localhost:1,n1.invalid:1", "--quick", "--mpirun", mpirun])
