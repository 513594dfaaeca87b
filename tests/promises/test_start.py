"""Start: one command starts every rank, wherever the hosts are named."""

from __future__ import annotations

import json

from tests.support.place import Place, every_mpi, here_and_on_hosts, program


@every_mpi
@here_and_on_hosts
def test_each_slot_gets_a_rank(place: Place, mpi: str) -> None:
    """One command starts a rank on every slot, with the script's arguments and the launcher's folder."""
    done = place.run("launch", *place.where(3), program("identity.py"), "-n", "5", mpi=mpi)
    done.assert_ok()
    ranks = sorted((json.loads(line) for line in done.lines), key=lambda rank: rank["RANK"])
    assert [rank["host"] for rank in ranks] == place.hosts_of(3)
    assert all(rank["argv"] == ["-n", "5"] for rank in ranks)
    assert all(rank["cwd"] == str(place.folder) for rank in ranks)
