"""Ranks started by srun or torchrun, two on each of two hosts with a difficult network.

Each host's own name resolves to 127.0.1.1, one of its networks is dead, and the interface names differ.

Tests mpiddp/runtime/rendezvous/address.py; run_command.py under srun.
python -m pytest tests/cluster/schedulers/test_slurm_job.py
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import cluster
from tests.support.cluster import Cluster, Layout
from tests.support.cluster.slurm import Slurm
from tests.support.errors import error
from tests.support.mpis import mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT
from tests.support.stand_ins import NO_SSH

MPIDDP = str(Path(sys.executable).with_name("mpiddp"))
TRAIN = shlex.split(
    "-m mpiddp train --use-syn --backend=gloo --arch=resnet20 --batch-size=4 --epochs=1 "
    "--steps-per-epoch=2 --out"
)
SHOW = """
import os, socket, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "GLOO_SOCKET_IFNAME", "MASTER_ADDR")
print("shown", *(os.environ[name] for name in names), flush=True)
dist.destroy_process_group()
"""
SHOW_INIT = """
import mpiddp, torch, torch.distributed as dist
world = mpiddp.init(backend="gloo")
total = torch.tensor([world.rank])
dist.all_reduce(total)
print("shown", world.rank, world.local_rank, world.node_rank, total.item(), flush=True)
"""
TWO_EACH = ("-N2", "--ntasks-per-node=2")
PLACEMENT = "4 on 2 hosts (node0 2, node1 2)"
ENV = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    layout = Layout(interfaces=("eth0", "ens5"), own_name_is_loopback=True, dead_network=True)
    with cluster.up_or_skip(3, layout=layout) as standing:
        (standing.shared / "show.py").write_text(SHOW)
        (standing.shared / "show_init.py").write_text(SHOW_INIT)
        yield standing


def launch(batch: Slurm, *options: str) -> subprocess.CompletedProcess[str]:
    """`mpiddp launch` in a batch script with two tasks on each host."""
    command = shlex.join([MPIDDP, "launch", *options])
    script = f"#!/bin/sh\n{command}\n"
    return batch.sbatch(script, *TWO_EACH, cwd=ROOT, env=ENV)


def shown(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if line.startswith("shown"))


def test_srun_starts_two_ranks_on_each_host(batch: Slurm) -> None:
    out = batch.cluster.shared / "srun"
    command = ["srun", *TWO_EACH, "--mpi=none", sys.executable, *TRAIN, str(out)]
    done = batch.cluster["node0"].run(command, cwd=ROOT, env=ENV)
    assert done.returncode == 0, done.stderr
    assert PLACEMENT in done.stdout


def test_launch_starts_two_ranks_on_each_host(batch: Slurm) -> None:
    done = launch(batch, *TRAIN, str(batch.cluster.shared / "launch"))
    assert done.returncode == 0, done.stdout
    assert PLACEMENT in done.stdout


@pytest.mark.parametrize("option", ["--spares=1", "--grow=10m", "--min-hosts=1", "--min-ranks=1"])
def test_an_option_that_needs_the_preflight_is_refused(batch: Slurm, option: str) -> None:
    done = launch(batch, option, "-m", "platform")
    assert done.returncode == 2, done.stdout
    name = option.partition("=")[0]
    assert re.match(error("inside a", f"{name}: ", "--mpirun PATH"), done.stdout)


def test_ranks_that_end_by_os_exit_0_lose_no_output(batch: Slurm) -> None:
    """Slurm kills a rank's output process once the tasks of the step have ended."""
    script = batch.cluster.shared / "exit.py"
    script.write_text(
        "import os\nos.write(1, f\"shown {os.environ['RANK']}\\n\".encode())\nos._exit(0)\n"
    )
    done = launch(batch, "--log-ranks=all", "--prefix=never", str(script))
    assert done.returncode == 0, done.stdout
    assert shown(done.stdout) == [f"shown {rank}" for rank in range(4)]


def test_no_job_waits_for_slurms_hosts(batch: Slurm) -> None:
    """srun needs no ssh, and Slurm starts a job when its nodes are up."""
    folder = batch.cluster.shared / "without_ssh"
    folder.mkdir()
    (folder / "ssh").write_text(NO_SSH)
    (folder / "ssh").chmod(0o755)
    command = [MPIDDP, "launch", "--wait-for-hosts=1h", "--", "sh", "-c", "echo shown $RANK"]
    script = f"#!/bin/sh\nPATH={folder}:$PATH {shlex.join(command)}\n"
    done = batch.sbatch(script, *TWO_EACH, cwd=ROOT, env=ENV)
    assert done.returncode == 0, done.stdout
    assert shown(done.stdout) == [f"shown {rank}" for rank in range(4)]


def test_slurms_signal_before_the_time_limit_stops_the_job(batch: Slurm) -> None:
    """`#SBATCH --signal=B:USR1@60` sends it to the batch script, which has become the launcher."""
    out = batch.cluster.shared / "stopped"
    job = [arg for arg in TRAIN if arg != "--steps-per-epoch=2"]
    arguments = ["launch", "--grace", "600", *job]
    command = shlex.join([MPIDDP, *arguments, str(out), "--log-every=5"])
    script = (
        f"#!/bin/sh\n(until grep -qs train_loss {out}/metrics.jsonl; do sleep 0.2; done\n"
        f'scancel --batch --signal=USR1 "$SLURM_JOB_ID") &\nexec {command}\n'
    )
    done = batch.sbatch(script, *TWO_EACH, cwd=ROOT, env=ENV)
    assert done.returncode == 75, done.stdout
    assert "mpiddp: stopped on request." in done.stdout
    assert f"mpiddp: to resume: mpiddp {shlex.join(arguments)} {out}" in done.stdout
    assert len(list((out / "checkpoints").iterdir())) == 1


def test_scancel_lets_the_ranks_save(batch: Slurm) -> None:
    """It sends SIGTERM to every process of the job, and SIGKILL after Slurm's KillWait (30 s)."""
    out = batch.cluster.shared / "cancelled"
    job = [arg for arg in TRAIN if arg != "--steps-per-epoch=2"]
    command = shlex.join([MPIDDP, "launch", *job, str(out), "--log-every=5"])
    script = (
        f"#!/bin/sh\n(until grep -qs train_loss {out}/metrics.jsonl; do sleep 0.2; done\n"
        f'exec scancel "$SLURM_JOB_ID") &\ntrap : TERM\n{command}\necho "code $?"\n'
    )
    done = batch.sbatch(script, *TWO_EACH, cwd=ROOT, env=ENV)
    assert done.stdout.endswith("\ncode 75\n"), done.stdout  # Slurm reports the signal
    assert "stopped at step" in done.stdout
    assert len(list((out / "checkpoints").glob("step_*"))) == 1


def test_a_raw_srun_saves_at_scancels_sigusr1(batch: Slurm) -> None:
    """Without a launcher, nobody limits the time of a save, so a plain scancel ends the ranks at once."""
    out = batch.cluster.shared / "raw"
    job = [arg for arg in TRAIN if arg != "--steps-per-epoch=2"]
    command = shlex.join(["srun", "--mpi=none", sys.executable, *job, str(out), "--log-every=5"])
    script = (
        f"#!/bin/sh\n(until grep -qs train_loss {out}/metrics.jsonl; do sleep 0.2; done\n"
        f'exec scancel --signal=USR1 "$SLURM_JOB_ID") &\n{command}\n'
    )
    done = batch.sbatch(script, *TWO_EACH, cwd=ROOT, env=ENV)
    assert done.returncode == 75, done.stdout
    assert "stopped at step" in done.stdout
    assert len(list((out / "checkpoints").glob("step_*"))) == 1


# --- any command ---


def test_the_variables_of_a_command(batch: Slurm) -> None:
    """torchrun's, and none by which an MPI program would join the job step."""
    text = "echo shown $RANK $LOCAL_RANK $GROUP_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE; env"
    done = launch(batch, "--", "sh", "-c", text)
    assert done.returncode == 0, done.stdout
    assert shown(done.stdout) == [f"shown {n} {n % 2} {n // 2} 4 2" for n in range(4)]
    assert not re.search(r"^(OMPI|PMI|PMIX)\w*=", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("script", ["show.py", "show_init.py"])
def test_a_script_within_a_command(batch: Slurm, script: str) -> None:
    """It forms a process group by itself, or with mpiddp.init()."""
    command = f"{shlex.join([sys.executable, str(batch.cluster.shared / script)])}; exit $?"
    done = launch(batch, "--", "bash", "-c", command)
    assert done.returncode == 0, done.stdout
    placed = [line.split()[1:4] for line in shown(done.stdout)]
    assert placed == [[str(n), str(n % 2), str(n // 2)] for n in range(4)]
    if script == "show_init.py":
        assert all(line.endswith(" 6") for line in shown(done.stdout))


def test_the_end_of_one_command_ends_the_job(batch: Slurm) -> None:
    done = launch(batch, "--", "sh", "-c", "[ $RANK = 3 ] && exit 5; sleep 1014")
    assert done.returncode == 1, done.stdout
    assert "mpiddp: rank 3 on node1 ended first, with exit code 5." in done.stdout
    left = [each.command for host in batch.cluster.hosts for each in host.processes()]
    assert "sleep 1014" not in left


def test_a_stop_is_one_sigterm_for_a_command(batch: Slurm) -> None:
    folder = batch.cluster.shared / "ready"
    folder.mkdir()
    text = (
        f'trap "echo shown $RANK TERM; exit 75" TERM; touch {folder}/$RANK; '
        "while :; do sleep 0.1; done"
    )
    command = shlex.join([MPIDDP, "launch", "--grace", "600", "--", "bash", "-c", text])
    are_ready = " && ".join(f"[ -e {folder}/{rank} ]" for rank in range(4))
    script = (
        f"#!/bin/sh\n(until {are_ready}; do sleep 0.2; done\n"
        f'scancel --batch --signal=USR1 "$SLURM_JOB_ID") &\nexec {command}\n'
    )
    done = batch.sbatch(script, *TWO_EACH, cwd=ROOT, env=ENV)
    assert done.returncode == 75, done.stdout
    assert shown(done.stdout) == [f"shown {rank} TERM" for rank in range(4)]
    assert "mpiddp: to resume: mpiddp launch " in done.stdout


# --- other starts inside of an allocation ---


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4", "mpich", "intelmpi"])
def test_an_mpirun_inside_of_an_allocation_uses_ssh(batch: Slurm, mpi: str) -> None:
    """Left to itself, Open MPI refuses the ranks that Slurm has not counted, and calls srun."""
    options = ("--mpirun", mpirun_of(mpi), "-H", "node1:1,node0:3")
    done = launch(batch, *options, str(batch.cluster.shared / "show.py"))
    assert done.returncode == 0, done.stdout
    placed = [line.split()[1:4] for line in shown(done.stdout)]
    assert placed == [["0", "0", "0"], ["1", "0", "1"], ["2", "1", "1"], ["3", "2", "1"]]


def test_local_inside_of_an_allocation(batch: Slurm) -> None:
    done = launch(batch, "--local", "-n", "2", str(batch.cluster.shared / "show.py"))
    assert done.returncode == 0, done.stdout
    assert [line.split()[1:4] for line in shown(done.stdout)] == [
        [str(rank), str(rank), "0"] for rank in range(2)
    ]


def test_launch_inside_of_a_task_is_refused(batch: Slurm) -> None:
    script = f"#!/bin/sh\nsrun --mpi=none {MPIDDP} launch {batch.cluster.shared}/show.py\n"
    done = batch.sbatch(script, *TWO_EACH, cwd=ROOT, env=ENV)
    values = ("SLURM_PROCID=", "4 ranks (slurm)", "mpiddp run")
    assert re.search(error("launch starts", *values), done.stdout), done.stdout
    assert done.returncode == 2


def test_only_the_shell_of_srun_pty_may_launch(batch: Slurm) -> None:
    """The tasks that srun starts in that shell get its SLURM_PTY_PORT, too."""
    show = batch.cluster.shared / "show.py"
    inner = f"srun --overlap --mpi=none -N2 -n4 {MPIDDP} launch {show}; echo inner $?"
    first = "[ $SLURM_PROCID = 0 ] || exit 0"
    shell = f"{first}; {MPIDDP} launch --dry-run {show} | grep -o -- --ntasks=4 | head -1; {inner}"
    outer = ["srun", *TWO_EACH, "--mpi=none", "--pty", "sh", "-c", shell]
    on_terminal = [sys.executable, "-c", "import pty, sys; pty.spawn(sys.argv[1:])", *outer]
    done = batch.cluster["node0"].run(on_terminal, cwd=ROOT, env=ENV)
    lines = done.stdout.splitlines()
    assert "--ntasks=4" in lines, done.stdout
    assert "inner 2" in lines, done.stdout
    for rank in range(4):
        sentence = error("launch starts", f"SLURM_PROCID={rank} ", "4 ranks")
        assert re.search(sentence, done.stdout), done.stdout


def test_the_requested_interface_is_used(batch: Slurm) -> None:
    option = ("--interface", "10.77.0.0/24")
    done = launch(batch, *option, str(batch.cluster.shared / "show.py"))
    assert done.returncode == 0, done.stdout
    master = batch.cluster["node0"].address
    assert shown(done.stdout) == [
        f"shown 0 0 0 eth0 {master}",
        f"shown 1 1 0 eth0 {master}",
        f"shown 2 0 1 ens5 {master}",
        f"shown 3 1 1 ens5 {master}",
    ]


def test_a_launch_from_a_login_node(batch: Slurm) -> None:
    """Rank 0 runs on another host, so the launcher does not know its address."""
    login, first = batch.cluster["node0"], batch.cluster["node1"]
    command = ["salloc", "-N2", "--nodelist=node1,node2", "--ntasks-per-node=1"]
    command += [MPIDDP, "launch", "--interface", "10.77.0.0/24"]
    command.append(str(batch.cluster.shared / "show.py"))
    done = login.run(command, cwd=ROOT, env=ENV)
    assert done.returncode == 0, done.stderr
    assert shown(done.stdout) == [
        f"shown 0 0 0 ens5 {first.address}",
        f"shown 1 0 1 eth0 {first.address}",
    ]


def test_an_interface_that_one_host_lacks(batch: Slurm) -> None:
    done = launch(batch, "--interface", "eth0", str(batch.cluster.shared / "show.py"))
    (sentence,) = [line for line in done.stdout.splitlines() if "interface" in line]
    values = ('"eth0"', "node1", "lo and ens5 and eth1")
    assert re.fullmatch(error("interface", *values), sentence), sentence
    assert done.returncode == 2


@pytest.mark.parametrize(
    "rendezvous",
    [
        "--node-rank={node} --master-addr=node0 --master-port=29512",
        "--rdzv-backend=c10d --rdzv-endpoint=node0:29514 --rdzv-id=job",
    ],
    ids=["static", "c10d"],
)
def test_torchrun_with_a_hostname_as_master_addr(hosts: Cluster, rendezvous: str) -> None:
    """On node0 itself, this name resolves to 127.0.1.1."""
    run = hosts.shared / f"torchrun{len(rendezvous)}"
    agents = [
        hosts[name].popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2"),
                *("--nproc-per-node=2", *rendezvous.format(node=node).split()),
                *(*TRAIN, str(run)),
            ],
            cwd=ROOT,
            env=ENV,
        )
        for node, name in enumerate(("node0", "node1"))
    ]
    outputs = [agent.communicate(timeout=PATIENCE_S) for agent in agents]
    # The agents' exit codes are ignored: on a busy machine node0's was 1 once. The run's files count.
    assert PLACEMENT in "".join(out for out, _ in outputs), outputs
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["world_size"], summary["hosts"], summary["steps"]) == (
        4,
        {"node0": 2, "node1": 2},
        2,
    )
