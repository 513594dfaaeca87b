"""A job of PBS without ssh, which cannot run here: a stand-in of pbs_tmrsh that behaves as its source does.

It starts a program with its arguments, without a shell. The program has no stdin, its output goes to the
job's files, and pbs_tmrsh ends with its exit code (pbs_tmrsh(8B), src/cmds/pbs_tmrsh.c of OpenPBS).
Tests docs/allocations.md.
python -m pytest tests/test_pbs_tmrsh.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import cluster
from tests.cluster import Cluster
from tests.mpis import mpirun_of
from tests.ranks import ROOT

PBS_TMRSH = f"""\
#!{sys.executable}
import os, shlex, subprocess, sys
host, *program = [each for each in sys.argv[1:] if each != "-n"]
assert os.environ["PBS_JOBID"]
folder = os.path.dirname(sys.argv[0])
with open(os.path.join(folder, "calls"), "a") as calls, open(os.path.join(folder, "output"), "a") as output:
    print(host, file=calls)
    ssh = ["/usr/bin/ssh", "-n", host, "exec " + shlex.join(program)]
    sys.exit(subprocess.run(ssh, stdout=output, stderr=output).returncode)
"""
NO_SSH = "#!/bin/sh\necho 'ssh is not allowed here' >&2; exit 1\n"
SHOW = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print("shown", os.environ["RANK"], socket.gethostname(), total.item(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        folder = standing.shared / "bin"
        folder.mkdir()
        for name, text in (("pbs_tmrsh", PBS_TMRSH), ("ssh", NO_SSH)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (standing.shared / "show.py").write_text(SHOW)
        (standing.shared / "nodes").write_text("node0\nnode1\n")
        yield standing


def variables(hosts: Cluster) -> dict[str, str]:
    return {
        "PATH": f"{hosts.shared / 'bin'}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PBS_JOBID": "1234.head",
        "PBS_NODEFILE": str(hosts.shared / "nodes"),
    }


# A raw mpirun of each MPI whose daemon starts over pbs_tmrsh, and the variables of its ranks.
HYDRA = {
    "intelmpi": ("-bootstrap", "rsh", "-bootstrap-exec"),
    "mpich": ("-launcher", "rsh", "-launcher-exec"),
}


@pytest.mark.parametrize("mpi", HYDRA)
def test_a_raw_mpirun_starts_its_ranks_over_pbs_tmrsh(hosts: Cluster, mpi: str) -> None:
    mpirun = Path(mpirun_of(mpi))
    folder = hosts.shared / "bin"
    (folder / "calls").write_text("")
    options = [*HYDRA[mpi], str(folder / "pbs_tmrsh"), "-hosts", "node0,node1", "-ppn", "1"]
    rank = [sys.executable, "-m", "mpiddp", "run", str(hosts.shared / "show.py")]
    env = variables(hosts) | {
        "MPI4PY_LIBMPI": str(mpirun.parent.parent / "lib/libmpi.so.12"),
        "UCX_TLS": "tcp,self",
        "FI_PROVIDER": "tcp",
    }
    env["PATH"] = f"{mpirun.parent}:{env['PATH']}"
    done = hosts["node0"].run([mpirun, *options, "-n", "2", *rank], env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr + (folder / "output").read_text()
    shown = sorted(line for line in done.stdout.splitlines() if line.startswith("shown"))
    assert shown == ["shown 0 node0 3", "shown 1 node1 3"]
    assert "node1" in (folder / "calls").read_text()


def test_mpiddp_launch_needs_ssh(hosts: Cluster) -> None:
    """Its preflight sends a program to each host on stdin and reads the answer."""
    command = [sys.executable, "-m", "mpiddp", "launch", hosts.shared / "show.py"]
    done = hosts["node0"].run(command, env=variables(hosts), cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert "ssh node1: ssh is not allowed here" in done.stderr
