"""The hosts of an allocation, from the variables and files that each scheduler documents.

tests/promises/test_allocations.py has real ones.
Tests mpiddp/hosts/allocations.py, mpiddp/hosts/hostfile.py.
python -m pytest tests/unit/hosts/test_allocations.py
"""

import re
import subprocess
import sys

import pytest

from mpiddp.errors import UserError
from mpiddp.hosts.allocations import (
    SCHEDULERS,
    find_allocation,
    grants_hosts,
)
from mpiddp.hosts.hostfile import read_hostfile
from mpiddp.hosts.names import compress_names, expand_nodelist
from tests.support.allocations import (
    DRY_RUNS,
    FLUX,
    GRID_ENGINE,
    LSF,
    MPIJOB,
    PBS,
    SKYPILOT,
    SLURM,
    enter_folder,
    expected_dry_runs,
)
from tests.support.errors import error
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT

# Slurm, "Heterogeneous Job Support", "Environment Variables"
# (https://slurm.schedmd.com/heterogeneous_jobs.html#env_var). A batch script has the first one's as usual.
SLURM_HETEROGENEOUS = SLURM | {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "7",
    "SLURM_JOB_ID_HET_GROUP_1": "8",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[11-14]",
}


# Kubeflow's training operator, pkg/constants/constants.go: the number of nodes for torchrun.
# https://github.com/kubeflow/training-operator/blob/master/pkg/constants/constants.go
TRAIN_JOB = {"PET_NNODES": "2"}

# AWS Batch, "Multi-node parallel jobs", "Environment variables", of a node that is not the main one.
# https://docs.aws.amazon.com/batch/latest/userguide/mnp-env-vars.html
AWS_BATCH = {
    "AWS_BATCH_JOB_NUM_NODES": "2",
    "AWS_BATCH_JOB_NODE_INDEX": "1",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.4",
}


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    return enter_folder(tmp_path, monkeypatch)


def found(env):
    """The source, hosts and slots of the allocation in `env`."""
    allocation = find_allocation({"PATH": "/usr/bin:/bin"} | env)
    assert allocation is not None
    hosts = allocation.hosts
    names, slots = [host.name for host in hosts], [host.slots for host in hosts]
    return allocation.source, names, slots


def refusal(call):
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


CLUSTER_NAMES = ["n1.cluster", "n2.cluster"]
PODS = ["pi-worker-0.pi.default.svc", "pi-worker-1.pi.default.svc"]
IPS = ["10.0.0.4", "10.0.0.5"]
HINT = ("--hostfile", "-H", "-H localhost")  # the ways out, in the order of the sentences


@pytest.mark.parametrize(
    ("env", "source", "names", "slots"),
    [
        (PBS, "PBS job 1234.head", CLUSTER_NAMES, [2, 2]),
        (LSF, "LSF job 105", ["n1", "n2"], [5, 3]),
        (LSF | {"LSB_MCPU_HOSTS": ""}, "LSF job 105", CLUSTER_NAMES, [2, 2]),
        (GRID_ENGINE, "Grid Engine job 3", ["n1", "n2"], [3, 1]),
        (MPIJOB, "the hostfile of OMPI_MCA_orte_default_hostfile", PODS, [2, 2]),
        *(
            ({name: file}, f"the hostfile of {name}", PODS, [2, 2])
            for name, file in (
                ("PRTE_MCA_prte_default_hostfile", "mpi_hostfile"),
                ("I_MPI_HYDRA_HOST_FILE", "intel_hostfile"),
                ("HYDRA_HOST_FILE", "intel_hostfile"),
            )
        ),
        (SKYPILOT, "the SkyPilot task", IPS, [4, 4]),
        (SKYPILOT | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}, "the SkyPilot task", IPS, [None, None]),
        ({name: SKYPILOT[name] for name in SKYPILOT if name != "SKYPILOT_NODE_RANK"},
         "the SkyPilot task", IPS, [4, 4]),
    ],
)  # fmt: skip
def test_the_hosts_and_slots_of_an_allocation(in_folder, env, source, names, slots):
    assert found(env) == (source, names, slots)


def test_flux_knows_its_hosts(in_folder):
    env = FLUX | {"PATH": f"{in_folder}:/usr/bin:/bin"}
    assert found(env) == ("the Flux instance", ["n1", "n2"], [None, None])


def test_a_pbs_job_that_lists_each_host_once_takes_its_gpus(in_folder):
    (in_folder / "node_file").write_text("n1\nn2\n")
    assert found(PBS)[1:] == (["n1", "n2"], [None, None])


@pytest.mark.parametrize(
    ("file", "names", "slots"),
    [("node_file", CLUSTER_NAMES, [2, 2]), ("pe_hostfile", ["n1", "n2"], [3, 1])],
)
def test_the_hostfile_option_reads_the_files_of_schedulers(in_folder, file, names, slots):
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
    ("env", "words"),
    [
        ({"LSB_JOBID": "9"}, "LSB_JOBID=9 is set but LSB_DJOB_HOSTFILE is not"),
        ({"LSB_MCPU_HOSTS": "n1 4 n2"}, 'LSB_MCPU_HOSTS: "slots=" is not a positive integer'),
        ({"SGE_TASK_ID": "1", "NHOSTS": "2"}, "NHOSTS=2 is set but PE_HOSTFILE is not"),
        ({"K_MPI_JOB_ROLE": "worker"}, "Write mpiddp launch in the command of the Launcher"),
        ({"K_MPI_JOB_ROLE": "launcher"}, "launcher is set but OMPI_MCA_orte_default_hostfile or I_MPI_"),
        (SKYPILOT | {"SKYPILOT_NODE_RANK": "1"}, "this is node 1 of a SkyPilot task"),
        (TRAIN_JOB, "PET_NNODES=2: a PyTorchJob or TrainJob has started this process on one of"),
        (AWS_BATCH, "AWS_BATCH_JOB_NUM_NODES=2: AWS Batch has started this process on one of"),
        (SLURM | {"SLURM_NTASKS": "12", "SLURM_TASKS_PER_NODE": "4(x3)"},
         "SLURM_TASKS_PER_NODE=4(x3) does not fit SLURM_JOB_NODELIST=n[1-2]"),
        (SLURM_HETEROGENEOUS, "SLURM_HET_SIZE=2: Slurm job 7 is heterogeneous"),
        ({"SKYPILOT_NODE_IPS": "-oProxyCommand=x"}, 'SKYPILOT_NODE_IPS: "-oProxyCommand=x" is not a name'),
        ({"SKYPILOT_NODE_IPS": "\n"}, "SKYPILOT_NODE_IPS lists no host"),
    ],
)  # fmt: skip
def test_an_allocation_that_cannot_be_read_is_refused(env, words):
    """tests/refusals has more of them, with their whole sentences."""
    assert words in refusal(lambda: find_allocation({"PATH": "/nowhere"} | env))


@pytest.mark.parametrize(
    ("env", "is_granted"),
    [({}, False), ({"PET_NNODES": "1"}, False), (TRAIN_JOB, True), (SLURM, True)],
)
def test_hosts_are_granted_even_if_they_cannot_be_read(env, is_granted):
    assert grants_hosts(env) == is_granted


def test_flux_without_its_program(tmp_path):
    said = refusal(lambda: find_allocation(FLUX | {"PATH": str(tmp_path)}))
    assert re.fullmatch(error("FLUX_URI is", "FLUX_URI", "flux getattr hostlist", *HINT), said)


# Several allocations


@pytest.mark.parametrize("stale", [PBS | {"PBS_NODEFILE": "others"}, {"PBS_JOBID": "12"}])
def test_the_first_of_two_allocations_counts(in_folder, stale):
    (in_folder / "others").write_text("x1\nx1\nx2\nx2\n")
    assert found(SLURM | stale) == ("Slurm job 7", ["n1", "n2"], [1, 1])


def test_the_inner_of_two_allocations_counts(in_folder):
    """`bsub … jsrun … flux start`: LSF also lists the host of the batch script."""
    env = FLUX | {"PATH": f"{in_folder}:/usr/bin:/bin"}
    outer = {"LSB_JOBID": "5", "LSB_MCPU_HOSTS": "batch1 1 n1 42 n2 42"}
    assert found(outer | env)[0] == "the Flux instance"


# The command


def test_each_environment_has_its_dry_run():
    assert expected_dry_runs().keys() == DRY_RUNS.keys()


UNEVEN = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS": "6"}


@pytest.mark.parametrize(
    ("env", "slots"),
    [
        ({"SLURM_GPUS_ON_NODE": "4"}, [4, 2]),
        ({"SLURM_GPUS_ON_NODE": "2", "SLURMD_NODENAME": "n2"}, [4, 2]),
        ({"SLURM_GPUS_ON_NODE": "3"}, [3, 3]),
        ({"SLURM_GPUS_PER_NODE": "3"}, [3, 3]),
    ],
)
def test_gpus_that_slurm_has_divided_unevenly(env, slots):
    """SLURM_GPUS_ON_NODE is of the script's own host alone."""
    hosts = find_allocation({**UNEVEN, **env})
    assert hosts is not None
    assert [host.slots for host in hosts.hosts] == slots


def test_gpus_of_three_hosts_that_nobody_knows():
    env = {**UNEVEN, "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_GPUS_ON_NODE": "4"}
    with pytest.raises(UserError, match=error("which of", "SLURM_GPUS=6 ", "3 hosts", "-H")):
        find_allocation(env)


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


def test_in_a_container_the_process_itself_is_asked():
    """The task may have another pid there. No process has this one: Linux counts to 2**22."""
    task = {"SLURM_PTY_PORT": "33333", "SLURM_PROCID": "0", "SLURM_TASK_PID": str(2**22 + 1)}
    text = f"import mpiddp.hosts.allocations as s; print(s.in_slurm_terminal({task}))"
    without = [sys.executable, "-c", text]
    on_terminal = [sys.executable, "-c", f"import pty; pty.spawn({without})"]
    for command, answer in ((on_terminal, "True"), (without, "False")):
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            timeout=PATIENCE_S,
        )
        assert done.stdout.strip() == answer, done.stderr
