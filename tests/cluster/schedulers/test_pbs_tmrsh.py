"""A job of PBS without ssh, which cannot run here: a stand-in of pbs_tmrsh that behaves as its source does.

It starts a program with its arguments, without a shell. The program has no stdin, its output goes to the
job's files, and pbs_tmrsh ends with its exit code (pbs_tmrsh(8B), src/cmds/pbs_tmrsh.c of OpenPBS).
Tests docs/clusters.md.
python -m pytest tests/cluster/schedulers/test_pbs_tmrsh.py
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.hosts.transport import SSH_IN_PBS
from tests.support.cluster import Cluster
from tests.support.errors import error
from tests.support.mpis import mpirun_of
from tests.support.ranks import ROOT
from tests.support.stand_ins import two_hosts_with

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
    with two_hosts_with("pbs_tmrsh", PBS_TMRSH, SHOW) as standing:
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


def run(hosts: Cluster, mpi: str, *options: str) -> tuple[int, str, str]:
    """The exit code, stdout and errors of a raw mpirun that starts its daemons over pbs_tmrsh."""
    mpirun = Path(mpirun_of(mpi))
    folder = hosts.shared / "bin"
    env = variables(hosts) | {
        "MPI4PY_LIBMPI": str(mpirun.parent.parent / "lib/libmpi.so.12"),
        "FI_PROVIDER": "tcp",
    }
    env["PATH"] = f"{mpirun.parent}:{env['PATH']}"
    rank = [sys.executable, "-m", "mpiddp", "run", str(hosts.shared / "show.py")]
    where = ["-hosts", "node0,node1", "-ppn", "1", "-n", "2"]
    command = [mpirun, *options, str(folder / "pbs_tmrsh"), *where, *rank]
    done = hosts["node0"].run(command, env=env, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr + (folder / "output").read_text()


def test_intel_mpi_starts_its_ranks_over_pbs_tmrsh(hosts: Cluster) -> None:
    code, stdout, errors = run(hosts, "intelmpi", "-bootstrap", "rsh", "-bootstrap-exec")
    assert code == 0, errors
    shown = sorted(line for line in stdout.splitlines() if line.startswith("shown"))
    assert shown == ["shown 0 node0 3", "shown 1 node1 3"]
    assert "node1" in (hosts.shared / "bin/calls").read_text()


def test_mpich_needs_a_shell_there(hosts: Cluster) -> None:
    """Its daemon's path stands in quotes, which pbs_tmrsh passes on."""
    code, _, errors = run(hosts, "mpich", "-launcher", "rsh", "-launcher-exec")
    assert code != 0
    assert 'hydra_pmi_proxy": No such file or directory' in errors


def test_mpiddp_launch_needs_ssh(hosts: Cluster) -> None:
    """Its preflight sends a program to each host on stdin and reads the answer."""
    command = [sys.executable, "-m", "mpiddp", "launch", hosts.shared / "show.py"]
    done = hosts["node0"].run(command, env=variables(hosts), cwd=ROOT)
    assert done.returncode == 2, done.stderr
    first, hint = done.stderr.splitlines()
    assert re.fullmatch(error("failed:", "ssh node1 ", "ssh is not allowed here"), first), first
    assert hint == SSH_IN_PBS.hint
    assert hint.endswith("start the ranks: mpirun python -m mpiddp run …")
