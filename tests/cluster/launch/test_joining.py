"""The verdict names ranks that do not join, with the line of Python that they execute.

Tests mpiddp/runtime/start/join.py.
python -m pytest tests/cluster/launch/test_joining.py
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, needs, slurm
from tests.support.errors import error
from tests.support.mpis import mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

# Puts the folder `trouble` first on rank 1's sys.path. Its modules hang, like a disk that does not answer.
SITECUSTOMIZE = """
import os, sys
for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
    if os.environ.get(name) == "1":
        sys.path.insert(1, os.path.join(os.path.dirname(__file__), "trouble"))
        import trouble
"""
SLEEP = "import time\ntime.sleep(6000)\n"
BY_MPIRUN = ("-H", "node0:1,node1:1")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster.up_or_skip(2) as standing:
        (standing.shared / "script.py").write_text("print('ran', flush=True)")
        yield standing


@pytest.fixture
def trouble(hosts: Cluster) -> Path:
    """The folder of modules that only rank 1 imports. It imports `trouble.py` when its Python starts."""
    folder = hosts.shared / "site"
    subprocess.run(["rm", "-rf", str(folder)], check=True, timeout=PATIENCE_S)
    (folder / "trouble").mkdir(parents=True)
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    (folder / "trouble" / "trouble.py").write_text("")
    return folder / "trouble"


def command(hosts: Cluster, *options: str) -> list[str]:
    launch = [sys.executable, "-m", "mpiddp", "launch", *options]
    return [*launch, str(hosts.shared / "script.py")]


def env(trouble: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{trouble.parent}:{ROOT}"}


def launch(hosts: Cluster, trouble: Path, *options: str) -> subprocess.CompletedProcess[str]:
    argv = command(hosts, *BY_MPIRUN, *options)
    done = hosts["node0"].run(argv, cwd=ROOT, env=env(trouble))
    deadline = time.monotonic() + PATIENCE_S
    while (left := ranks(hosts)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
    return done


def ranks(hosts: Cluster) -> list[str]:
    return [p.command for host in hosts.hosts for p in host.processes() if "python" in p.command]


def sentences(text: str) -> list[str]:
    """The launcher's sentences, except those about leftover processes, which may be ranks that were ending.

    Sentences of the ranks are left out: if the launcher is slow, a rank prints that its join has timed out.
    """
    return re.findall(r"mpiddp: (?!.*\bleftover process).*", text)


def only_1_of_2(last_words: str) -> list[str]:
    sentence = "only 1 of 2 ranks joined in 4 s. Missing: rank 1 on node1."
    return [f"mpiddp: {sentence} Its last words: {last_words}"]


@pytest.mark.parametrize("mpi", ["openmpi5", "intelmpi"])
def test_a_rank_that_is_still_importing_is_named_with_its_line(
    hosts: Cluster, trouble: Path, mpi: str
) -> None:
    mpirun = mpirun_of(mpi)
    (trouble / "torch.py").write_text(SLEEP)
    done = launch(hosts, trouble, "--timeout", "4", "--mpirun", mpirun)
    line = f"in {trouble}/torch.py, line 2, in <module>: time.sleep(6000)"
    assert sentences(done.stderr) == only_1_of_2(line)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_rank_whose_python_never_started(hosts: Cluster, trouble: Path) -> None:
    (trouble / "trouble.py").write_text(SLEEP)
    done = launch(hosts, trouble, "--timeout", "4")
    assert sentences(done.stderr) == only_1_of_2("none; its Python has not started.")


def test_a_rank_stopped_by_sigstop(hosts: Cluster, trouble: Path) -> None:
    (trouble / "torch.py").write_text("import os\nos.kill(os.getpid(), 19)\n")
    done = launch(hosts, trouble, "--timeout", "4")
    (sentence,) = sentences(done.stderr)
    last_words = r"none; it started \(pid \d+\) but does not answer: it is stopped, or stuck in native code\."
    assert re.fullmatch(re.escape(only_1_of_2("")[0]) + last_words, sentence)


def test_the_ranks_report_a_rendezvous_over_mpi_that_hangs(hosts: Cluster, trouble: Path) -> None:
    (trouble / "mpi4py.py").write_text(SLEEP)
    done = launch(hosts, trouble, "--timeout", "15")
    late = [
        error("rendezvous over", f"rank {n} on node{n}: ", "30 s", "--timeout 300") for n in (0, 1)
    ]
    assert re.search("|".join(late), done.stderr), done.stderr
    assert "joined" not in "".join(sentences(done.stderr))
    assert done.returncode == 1


def test_a_restart_after_a_missing_rank(hosts: Cluster, trouble: Path) -> None:
    once = f"import os\nos.rename(__file__, {str(trouble / 'gone')!r})\n"
    (trouble / "torch.py").write_text(once + SLEEP)
    done = launch(hosts, trouble, "--timeout", "20", "--max-restarts", "1")
    missing, restarted = sentences(done.stderr)
    assert missing.startswith("mpiddp: only 1 of 2 ranks joined in 20 s. Missing: rank 1 on node1.")
    assert restarted == "mpiddp: restarting on node0 and node1 (restart 1 of 1)."
    assert (done.returncode, done.stdout) == (0, "ran\nran\n")


def test_a_missing_rank_under_srun(hosts: Cluster, trouble: Path) -> None:
    if reason := needs.why_no_slurm():
        pytest.skip(reason)
    (trouble / "torch.py").write_text(SLEEP)
    launch = shlex.join(command(hosts, "--timeout", "4"))
    with slurm.up(hosts) as batch:
        options = ("-N2", "--ntasks-per-node=1")
        done = batch.sbatch(f"#!/bin/sh\n{launch}\n", *options, cwd=ROOT, env=env(trouble))
    line = f"in {trouble}/torch.py, line 2, in <module>: time.sleep(6000)"
    notice, *verdict = sentences(done.stdout)
    assert notice.startswith("mpiddp: no hosts given: using Slurm job ")
    assert (verdict, done.returncode) == (only_1_of_2(line), 1)
