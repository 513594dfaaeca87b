"""The hosts of an allocation, from the variables and files that each scheduler documents.

tests/promises/test_allocations.py has real ones, and tests/refusals those that cannot be read.
"""

import time

import pytest

from mpiddp.hosts.allocations import SCHEDULERS, find_allocation, seconds_left
from mpiddp.hosts.hostfile import read_hostfile
from mpiddp.hosts.names import compress_names, expand_nodelist
from tests.support.allocations import FLUX, PBS, SLURM, enter_folder
from tests.support.machine import tool


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    return enter_folder(tmp_path, monkeypatch)


ONCE = PBS | {"PBS_NODEFILE": "once"}
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.7\n", "SKYPILOT_NUM_NODES": "2"}
SIX_GPUS = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS": "6"}
OUTER = {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "batch1 1 n1 42 n2 42"}


@pytest.mark.parametrize(
    ("env", "source", "slots"),
    [
        # Hosts that are listed once have a slot for each of their GPUs.
        (ONCE, "PBS job 1234.head", [None, None]),
        (SIX_GPUS | {"SLURM_GPUS_ON_NODE": "3"}, "Slurm job 7", [3, 3]),
        (SIX_GPUS | {"SLURM_GPUS_PER_NODE": "3"}, "Slurm job 7", [3, 3]),
        # The first of two allocations counts.
        (SLURM | PBS, "Slurm job 7", [1, 1]),
        (SLURM | {"PBS_JOBID": "12"}, "Slurm job 7", [1, 1]),
        # As in `bsub … jsrun … flux start`: LSF also lists the host of the batch script.
        (OUTER | FLUX, "the Flux instance", [None, None]),
    ],
)
def test_the_hosts_of_an_allocation(in_folder, env, source, slots):
    """tests/data/command_lines.txt has plainer ones."""
    (in_folder / "once").write_text("n1\nn2\n")
    allocation = find_allocation({"PATH": f"{in_folder}:/usr/bin:/bin"} | env)
    hosts = [(host.name, host.slots) for host in allocation.hosts]
    assert (allocation.source, hosts) == (source, [*zip(("n1", "n2"), slots, strict=True)])


def test_gpus_that_slurm_divides_unevenly(in_folder):
    """The shell of salloc has only their sum. scontrol tells those of each host."""
    text = "JobId=7\n  TresPerJob=gres:gpu:6\n"
    text += "  Nodes=n1 CPU_IDs=0 Mem=0 GRES=gpu:a100:4(IDX:0-3)\n  Nodes=n2 CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0-1)"
    path = tool(in_folder, "scontrol", f"cat <<'END'\n{text}\nEND")
    assert [host.slots for host in find_allocation(SIX_GPUS | {"PATH": path}).hosts] == [4, 2]


def test_node_0_of_a_skypilot_task_starts_the_ranks_of_all_nodes():
    task = find_allocation(SKYPILOT | {"SKYPILOT_NODE_RANK": "0"})
    hosts = [(host.name, host.slots) for host in task.hosts]
    assert (task.source, hosts) == ("the SkyPilot task", [("10.0.0.4", None), ("10.0.0.7", None)])
    alone = {"SKYPILOT_NODE_IPS": "10.0.0.4", "SKYPILOT_NUM_NODES": "1"}
    assert find_allocation(alone | {"SKYPILOT_NODE_RANK": "0"}) is None


@pytest.mark.parametrize(
    ("file", "names", "slots"),
    [("node_file", ["n1.cluster", "n2.cluster"], [2, 2]), ("pe_hostfile", ["n1", "n2"], [3, 1])],
)
def test_the_hostfile_option_reads_the_files_of_schedulers(file, names, slots):
    hosts = read_hostfile(file).hosts
    assert ([host.name for host in hosts], [host.slots for host in hosts]) == (names, slots)


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1"},  # every pod has it, also a Slurm node in a pod
        {"SGE_TASK_ID": "undefined", "JOB_ID": "3", "NHOSTS": "1"},  # a job without -pe
        {"PET_NNODES": "1"},
        {"AWS_BATCH_JOB_NUM_NODES": "1"},
        {"NHOSTS": "2"},  # a variable of the user's own
        dict.fromkeys((name for row in SCHEDULERS for name in row.proof), ""),
    ],
)
def test_no_allocation(env):
    assert find_allocation(env) is None


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["login"], "login"),
        (["n5"], "n5"),
        (["n1", "n2", "n4", "n5", "n7"], "n[1-2,4-5,7]"),
        (["n9", "n10", "n11"], "n[9-11]"),
        (["n09", "n10", "n1"], "n[1,09-10]"),
        (["n2", "n1", "n2"], "n[1-2]"),
        (["n2", "gpu1", "n1", "login"], "n[1-2],gpu1,login"),
        (["n1.a.org", "n2.a.org", "n3.b.org"], "n[1-2].a.org,n3.b.org"),
        # Addresses are no names with a number.
        (["10.0.0.1", "11.0.0.1"], "10.0.0.1,11.0.0.1"),
        (["fe80::1", "fe80::2"], "fe80::1,fe80::2"),
    ],
)
def test_names_are_compressed(names, text):
    assert compress_names(names) == text
    if ":" not in text:
        assert sorted(expand_nodelist(text)) == sorted(set(names))


@pytest.mark.parametrize(
    "text", ["", "no such job", "Job Id: 1\n    Resource_List.walltime = soon\n"]
)
def test_without_a_time_limit_a_job_has_no_end(tmp_path, text):
    path = tool(tmp_path, "qstat", f"cat <<'END'\n{text}\nEND")
    assert seconds_left({"PATH": path, "PBS_JOBID": "1"})[0] == float("inf")
    assert seconds_left({"PATH": path, "PE_HOSTFILE": "x"})[0] == float("inf")
    assert seconds_left({"PATH": path}) == (float("inf"), "")


def test_the_end_of_an_allocation(tmp_path):
    """As sbatch's variable, squeue, qstat of PBS Pro and of Grid Engine, and bjobs tell it: in an hour."""
    began, end = (time.localtime(time.time() + seconds) for seconds in (-600, 3600))
    pbs = (
        f"    Resource_List.walltime = 01:10:00\n    stime = {time.asctime(began)}\n    project = x"
    )
    job = "<job_list><JB_job_number>{}</JB_job_number><JAT_start_time>{}</JAT_start_time>{}</job_list>"
    limit = '<hard_request name="h_rt" resource_contribution="0.000000">4200</hard_request>'
    sge = job.format(1, "", "") + job.format(12, time.strftime("%Y-%m-%dT%H:%M:%S", began), limit)
    for env, program, text in (
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_END_TIME": str(int(time.time()) + 3600)}, "none", ""),
        ({"SLURM_JOB_ID": "1"}, "squeue", time.strftime("%Y-%m-%dT%H:%M:%S", end)),
        ({"PBS_JOBID": "1.head"}, "qstat", pbs),
        ({"LSB_JOBID": "105"}, "bjobs", "1:00 L"),
        ({"PE_HOSTFILE": "x", "JOB_ID": "12"}, "qstat", sge),
    ):
        path = tool(tmp_path, program, f"cat <<'END'\n{text}\nEND")
        seconds, scheduler = seconds_left({"PATH": path, **env})
        assert 3590 < seconds <= 3601, scheduler
