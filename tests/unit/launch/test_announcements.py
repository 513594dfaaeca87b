"""What the launcher keeps of the ranks' announcements, and the address that srun's ranks get.

Tests mpiddp/launch/ranks.py, variables.py and starters/table.py.
python -m pytest tests/unit/launch/test_announcements.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.hosts.interfaces import Interface
from mpiddp.launch.ranks import Announcement, Ranks
from mpiddp.launch.starters.command import JobNetwork, RankStarter
from mpiddp.launch.starters.table import STARTERS, find_starter
from mpiddp.launch.variables import variables_of_ranks
from mpiddp.protocol.server import Message
from tests.support.an_mpirun import an_mpirun

(SRUN,) = (kind for kind in STARTERS if kind.has_scheduler)
OPEN_MPI = next(kind for kind in STARTERS if kind.library)


def announced(*messages: tuple[str, dict[str, Any]]) -> Announcement:
    ranks = Ranks(("a",))
    for kind, facts in messages:
        ranks.note(Message(0, kind, facts, 1.0))
    return ranks.announcement


def test_a_folder_and_an_announcement_come_in_either_order() -> None:
    facts = {"resume_args": ["--resume"], "global_batch_size": 8, "max_ranks": 4}
    announce, folder = ("announce", facts), ("run_dir", {"path": "/runs/x"})
    expected = Announcement(("--resume",), 8, 4, "/runs/x", 1)
    assert announced(announce, folder) == announced(folder, announce) == expected


@pytest.mark.parametrize(
    ("kind", "names", "env", "address"),
    [
        (SRUN, ("localhost", "far.invalid"), {}, "10.0.0.5"),
        (SRUN, ("localhost", "far.invalid"), {"MASTER_ADDR": "10.0.0.9"}, "10.0.0.9"),
        (SRUN, ("far.invalid", "localhost"), {}, None),  # rank 0 is elsewhere
        (SRUN, ("localhost",), {}, None),
        (OPEN_MPI, ("localhost", "far.invalid"), {}, None),
    ],
)
def test_only_srun_has_to_be_told_the_address_of_rank_0(
    kind: Any, names: tuple[str, ...], env: dict[str, str], address: str | None
) -> None:
    network = JobNetwork(Interface("eth0", "10.0.0.5", "10.0.0.0/24"), ("eth0",))
    placed = Hosts("", tuple(Host(name, ranks=1) for name in names))
    starter = RankStarter(kind, "1", Path("/mpi/bin/starter"))
    found = variables_of_ranks({}, {"UNSET": None}, starter, placed, network, env)
    assert found.get("MASTER_ADDR") == address
    assert found["MPIDDP_NETWORKS"] == "eth0"
    assert "UNSET" not in found
    without = variables_of_ranks({}, {}, starter, placed, JobNetwork(), env)
    assert without.get("MASTER_ADDR") == env.get("MASTER_ADDR")


def test_mpi4py_gets_the_library_of_the_mpirun_in_use(tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libmpi.so.40"
    for folder in ("lib", "bin"):
        (tmp_path / folder).mkdir()
    library.touch()
    mpirun = an_mpirun(tmp_path / "bin")
    env = {"PATH": f"{tmp_path}/bin:/bin", "MPI4PY_LIBMPI": "/my/libmpi.so"}
    python = Path("/venv/bin/python")

    def found(explicit: str | None, env: dict[str, str], python: Path = python) -> str:
        return str(find_starter("mpirun", explicit, python, env).libmpi)

    assert found(None, env) == "/my/libmpi.so"
    assert found(mpirun, env) == found(None, {"PATH": env["PATH"]}) == str(library)
    # mpi4py finds a library beside Python by itself.
    assert found(None, env, tmp_path / "bin" / "python") == "None"
