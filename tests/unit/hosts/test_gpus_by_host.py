"""The GPUs of each host: counted with the vendor's tool, chosen by the hostfile, near the rank's cores.

No machine of the tests has a GPU: the tools are stubs that print what their documentation shows.

Tests mpiddp/hosts/gpus.py, mpiddp/launch/variables.py, mpiddp/runtime/gpu.py,
mpiddp/hosts/facts.py.
python -m pytest tests/unit/hosts/test_gpus_by_host.py
"""

import json
import os
import signal
import socket
import sys
import time

import pytest

from mpiddp.hosts import gpus
from mpiddp.hosts.gpus import gpu_addresses, gpu_names, hides_all_gpus
from mpiddp.hosts.hostfile import Host
from mpiddp.launch.variables import gpu_table
from mpiddp.runtime.gpu import bind_to_gpu, gpu_address, near_cores, prepare
from mpiddp.world import RANK_SOURCES, World
from tests.support.machine import NVIDIA, tool
from tests.support.patience import PATIENCE_S

HOST = socket.gethostname()

AMD = """
echo '[{"gpu": 0, "bdf": "0000:05:00.0", "uuid": "a"}, {"gpu": 1, "bdf": "0000:26:00.0", "uuid": "b"}]'
"""
INTEL = """
echo '{"device_list": [{"device_id": 0, "device_name": "Data Center GPU Max 1550",'
echo ' "pci_bdf_address": "0000:29:00.0"}, {"device_id": 1, "device_name": "Data Center GPU Max 1550",'
echo ' "pci_bdf_address": "0000:3a:00.0"}]}'
"""
NO_GPU = (
    "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9"
)

ASKED = {  # by the commands that print names and addresses
    "nvidia-smi": ["-L", "--query-gpu=pci.bus_id --format=csv,noheader"],
    "amd-smi": ["list --json"] * 2,
    "xpu-smi": ["discovery -j"] * 2,
}


@pytest.mark.parametrize(
    ("name", "text", "names", "addresses"),
    [
        ("nvidia-smi", NVIDIA, ["NVIDIA H200"] * 2, ["0000:18:00.0", "0000:9a:00.0"]),
        ("amd-smi", AMD, ["0000:05:00.0", "0000:26:00.0"], ["0000:05:00.0", "0000:26:00.0"]),
        ("xpu-smi", INTEL, ["Data Center GPU Max 1550"] * 2, ["0000:29:00.0", "0000:3a:00.0"]),
    ],
)
def test_each_vendors_tool(tmp_path, name, text, names, addresses):
    path = tool(tmp_path, name, f'echo "$@" >> {tmp_path}/arguments\n{text}')
    assert gpu_names(path) == names
    assert gpu_addresses(path) == addresses
    assert (tmp_path / "arguments").read_text().splitlines() == ASKED[name]


def test_a_container_without_nvidia_smi_counts_what_the_driver_lists(tmp_path, monkeypatch):
    """All containers of a host see the driver's list, but not every one has the devices."""
    addresses = ["0000:18:00.0", "0000:9a:00.0"]
    for address in addresses:
        (tmp_path / "gpus" / address).mkdir(parents=True)
    monkeypatch.setattr(gpus, "_LISTED", tmp_path / "gpus")
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path / "dev")
    assert gpu_names("/no/folder") == []
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert len(gpu_names("/no/folder") or []) == 2
    assert gpu_addresses("/no/folder") == addresses


@pytest.mark.parametrize(
    "name",
    ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"],
)
def test_a_variable_that_hides_all_gpus(name):
    assert [hides_all_gpus({name: value}) for value in ("", "-1", "0")] == [True, True, False]


def test_a_tool_without_gpus_and_one_that_hangs(tmp_path):
    path = tool(tmp_path, "nvidia-smi", NO_GPU)
    assert gpu_names(path) == []
    tool(tmp_path, "xpu-smi", INTEL)
    assert len(gpu_names(path) or []) == 2
    tool(tmp_path, "nvidia-smi", "exec sleep 600")
    assert gpu_names(path, timeout_s=0.1) is None


# Another process traces it, so that it stays even when it is killed, as one in a driver that hangs.
UNKILLABLE = f"""#!{sys.executable}
import ctypes, os, signal, sys, time
tool, libc = os.getpid(), ctypes.CDLL(None)
libc.prctl(0x59616d61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER, PR_SET_PTRACER_ANY
if os.fork() == 0:
    null = os.open(os.devnull, os.O_RDWR)
    for file in (1, 2):
        os.dup2(null, file)
    traces = libc.ptrace(0x4206, tool, None, None) == 0  # PTRACE_SEIZE
    with open(sys.argv[0] + ".part", "w") as file:
        file.write(str(os.getpid() if traces else 0))
    os.rename(sys.argv[0] + ".part", sys.argv[0] + ".tracer")
    time.sleep({2 * PATIENCE_S})
else:
    signal.pause()
"""


def test_a_tool_that_cannot_be_killed(tmp_path):
    path = tool(tmp_path, "nvidia-smi", "")
    (tmp_path / "nvidia-smi").write_text(UNKILLABLE)
    tracer = tmp_path / "nvidia-smi.tracer"
    began_at = time.monotonic()
    for timeout_s in (0.2, 1, 4, 16, 64):
        assert gpu_names(path, timeout_s=timeout_s) is None
        if tracer.exists():
            break
    assert time.monotonic() - began_at < PATIENCE_S
    if not int(tracer.read_text()):
        pytest.skip("no process may trace another here")
    os.kill(int(tracer.read_text()), signal.SIGKILL)


NODES = (Host(HOST), Host("far.invalid"), Host("there.invalid", gpus=(0, 3)))


def test_the_table_has_this_hosts_own_value_and_the_hostfiles_numbers():
    there = dict.fromkeys(
        ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"), "0,3"
    )
    there["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    env = {"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}
    assert json.loads(gpu_table(NODES, env, {})) == [env, {}, there]
    exported = gpu_table(NODES, env, env)
    assert json.loads(exported) == [{}, {}, there]
    assert gpu_table(NODES[:2], {}, {}) == ""
    assert gpu_table(NODES[:2], {"CUDA_VISIBLE_DEVICES": ""}, {}) == ""  # it travels by name
    assert gpu_table(NODES, {"CUDA_VISIBLE_DEVICES": ""}, {}) == ""  # a job without GPUs


@pytest.mark.parametrize(("rank", "gpus"), [(0, "1"), (1, "1"), (2, None), (3, "0,2")])
def test_a_rank_takes_the_variables_of_its_host(monkeypatch, rank, gpus):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("MPIDDP_PLACEMENT", "a:2,b:1,c:1")
    choices = [{"CUDA_VISIBLE_DEVICES": "1"}, {}, {"CUDA_VISIBLE_DEVICES": "0,2"}]
    monkeypatch.setenv("MPIDDP_GPUS", json.dumps(choices))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    prepare(World(rank, 4, 0, 1))
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == gpus


FIRST, SECOND = "0000:18:00.0", "0000:9a:00.0"


@pytest.fixture
def sysfs(tmp_path):
    """Two GPUs on two NUMA nodes."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    for address, cores in ((FIRST, f"{first},70-71"), (SECOND, f"{second},72-73")):
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "local_cpulist").write_text(f"{cores}\n")
    return tmp_path / "sys"


@pytest.fixture
def affinity():
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("one core: nothing to bind to")
    yield before
    os.sched_setaffinity(0, before)


def test_cores_near_a_gpu(affinity, sysfs):
    assert near_cores("0000:18:00.0", sysfs) == {min(affinity), 70, 71}
    assert near_cores("0000:ff:00.0", sysfs) == set()


@pytest.mark.parametrize(
    ("env", "local_rank", "address"),
    [
        ({}, 1, SECOND),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, 0, SECOND),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, 1, FIRST),
        ({"HIP_VISIBLE_DEVICES": "1"}, 0, SECOND),
    ],
)
def test_the_gpu_of_a_local_rank(tmp_path, env, local_rank, address):
    env = env | {"PATH": tool(tmp_path, "nvidia-smi", NVIDIA)}
    assert gpu_address(World(local_rank, 2, local_rank, 2), env) == address


@pytest.mark.parametrize("visible", ["7", "9" * 5000, "", "-1", "GPU-18ac"])
def test_a_gpu_that_no_tool_lists(tmp_path, visible):
    env = {"CUDA_VISIBLE_DEVICES": visible, "PATH": tool(tmp_path, "nvidia-smi", NVIDIA)}
    assert gpu_address(World(0, 2, 0, 2), env) == ""


def test_a_rank_that_sees_its_own_gpu_alone(tmp_path):
    """srun --gpus-per-task=1 shows each rank one GPU; mpirun shows the ranks of a host the same."""
    path = tool(tmp_path, "nvidia-smi", NVIDIA)
    env = {"CUDA_VISIBLE_DEVICES": "1", "PATH": path}
    srun = next(launcher for launcher in RANK_SOURCES if launcher.name == "slurm")
    assert gpu_address(World(1, 2, 1, 2, srun), env) == SECOND
    assert gpu_address(World(1, 2, 1, 2), env) == ""
    assert (
        gpu_address(World(1, 2, None, None), {"PATH": path}) == ""
    )  # before the ranks are counted


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"), [(None, 0, 0), (None, 1, 1), ("1,0", 0, 1)]
)
def test_bind_gpu_binds_a_rank_to_the_cores_near_its_gpu(
    affinity, sysfs, monkeypatch, tmp_path, visible, local_rank, index
):
    monkeypatch.setenv("PATH", tool(tmp_path, "nvidia-smi", NVIDIA))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    bind_to_gpu(World(local_rank, 2, local_rank, 2), sysfs)
    assert os.sched_getaffinity(0) == affinity  # not without --bind gpu
    monkeypatch.setenv("MPIDDP_BIND", "gpu")
    bind_to_gpu(World(local_rank, 2, local_rank, 2), sysfs)
    assert os.sched_getaffinity(0) == {sorted(affinity)[index]}


@pytest.mark.parametrize(
    ("visible", "address"),
    [("GPU-77", SECOND), ("0", SECOND), ("0", "0000:bb:00.0")],
)
def test_a_rank_that_cannot_be_bound_says_so(
    affinity, sysfs, monkeypatch, tmp_path, capsys, visible, address
):
    """It stays where it is, which is here the core near the other GPU."""
    own = {min(affinity)}
    os.sched_setaffinity(0, own)
    monkeypatch.setenv("PATH", tool(tmp_path, "nvidia-smi", f"echo {address}"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("MPIDDP_BIND", "gpu")
    bind_to_gpu(World(0, 1, 0, 1), sysfs)
    assert os.sched_getaffinity(0) == own
    sentence = "is not bound: no core near its GPU is known, or allowed to it"
    assert capsys.readouterr() == ("", f"rank 0 on {HOST} {sentence}\n")
