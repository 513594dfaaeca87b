"""`mpiddp doctor` on this machine alone."""

import pytest

from mpiddp.doctor import main as doctor
from mpiddp.errors import UserError
from mpiddp.hosts.transport import Transport
from tests.support.errors import error
from tests.support.machine import an_mpirun


def test_this_machine_alone_needs_no_ssh(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Transport, "is_installed", False)
    mpirun = an_mpirun(tmp_path)
    assert doctor.main(["-H", "localhost:1", "--quick", "--mpirun", mpirun]) == 0
    assert "no other host was to be asked" in capsys.readouterr().out
    with pytest.raises(UserError, match=error("openssh-client")):
        doctor.main(["-H", "localhost:1,n1.invalid:1", "--quick", "--mpirun", mpirun])
