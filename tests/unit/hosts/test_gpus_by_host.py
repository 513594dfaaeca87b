"""The GPUs of each host: counted with the vendor's tool, chosen by the hostfile, near the rank's cores.

No machine of the tests has a GPU: the tools print what real ones have printed.

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
from mpiddp.hosts.gpus import Gpu, chosen_gpus, hides_all_gpus, read_gpus
from mpiddp.hosts.hostfile import Host
from mpiddp.launch.variables import gpu_table
from mpiddp.runtime.gpu import bind_to_gpu, gpu_address, near_cores, prepare
from mpiddp.world import RANK_SOURCES, World
from tests.support.machine import GPU_ROW, TWO_GPUS, nvidia_smi, tool
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
# As `rocm-smi --showproductname --showbus --showuse --showmeminfo vram --showtemp --json` of an MI210.
ROCM = """
echo 'WARNING: a GPU is in a low-power state'
echo '{"card0": {"Temperature (Sensor edge) (C)": "N/A", "Temperature (Sensor junction) (C)": "41.0",'
echo ' "GPU use (%)": "97", "VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "10960896",'
echo ' "Card Series": "AMD Instinct MI210", "PCI Bus": "0000:C1:00.0"}, "system": {"Driver version": "6.7"}}'
"""
NO_GPU = (
    "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.'; exit 9"
)
H100 = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("program", "text", "named", "addresses"),
    [
        ("nvidia-smi", TWO_GPUS, [H100] * 2, ["0000:18:00.0", "0000:9a:00.0"]),
        ("rocm-smi", ROCM, ["AMD Instinct MI210"], ["0000:c1:00.0"]),
        ("amd-smi", AMD, ["0000:05:00.0", "0000:26:00.0"], ["0000:05:00.0", "0000:26:00.0"]),
        ("xpu-smi", INTEL, ["Data Center GPU Max 1550"] * 2, ["0000:29:00.0", "0000:3a:00.0"]),
    ],
)
def test_each_vendors_tool_is_asked_once(tmp_path, program, text, named, addresses):
    path = tool(tmp_path, program, f'echo "$@" >> {tmp_path}/arguments\n{text}')
    found = read_gpus(path)
    assert [(gpu.name, gpu.address) for gpu in found] == [*zip(named, addresses, strict=True)]
    assert len((tmp_path / "arguments").read_text().splitlines()) == 1


def test_what_a_gpu_tells_of_itself(tmp_path):
    hot = {"clocks_event_reasons.active": "0x0000000000000068", "utilization.gpu": "97"}
    silent = {
        "ecc.errors.uncorrected.volatile.total": "[N/A]",
        "temperature.gpu": "[Unknown Error]",
    }
    known, unknown = read_gpus(tool(tmp_path, "nvidia-smi", nvidia_smi(hot, silent)))
    assert known == Gpu(
        name=H100,
        address="0000:18:00.0",
        uuid=GPU_ROW["uuid"],
        use=97,
        memory=0,
        memory_total=81559 << 20,
        temperature=31,
        slowed="HW slowdown, SW thermal slowdown, HW thermal slowdown",
        errors=0,
        driver="580.159.04",
        clock="1980",
    )
    assert unknown == known._replace(use=0, temperature=None, slowed="", errors=None)
    (amd,) = read_gpus(tool(tmp_path / "amd", "rocm-smi", ROCM))
    assert (amd.use, amd.memory, amd.memory_total, amd.temperature) == (
        97,
        10960896,
        68702699520,
        41,
    )


def test_an_older_driver_is_asked_without_the_field_that_it_refuses(tmp_path):
    field = "clocks_event_reasons.active"
    refuses = f"""case "$1" in *{field}*)
echo 'Field "{field}" is not a valid field to query.'; exit 2
esac"""
    rest = ", ".join(value for name, value in GPU_ROW.items() if name != field)
    (gpu,) = read_gpus(tool(tmp_path, "nvidia-smi", f"{refuses}\necho '{rest}'"))
    assert (gpu.name, gpu.slowed, gpu.errors, gpu.clock) == (H100, "", 0, "1980")


def test_a_container_without_nvidia_smi_counts_what_the_driver_lists(tmp_path, monkeypatch):
    """All containers of a host see the driver's list, but not every one has the devices."""
    addresses = ["0000:18:00.0", "0000:9a:00.0"]
    for address in addresses:
        (tmp_path / "gpus" / address).mkdir(parents=True)
    monkeypatch.setattr(gpus, "_LISTED", tmp_path / "gpus")
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path / "dev")
    assert read_gpus("/no/folder") == []
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    assert [gpu.address for gpu in read_gpus("/no/folder")] == addresses


@pytest.mark.parametrize(
    ("env", "numbers", "chosen"),
    [
        ({}, None, [0, 1]),
        ({}, (1, 0), [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "1, 0"}, None, [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-9aac,7,MIG-aa01"}, None, [1, None, None]),
        ({"ROCR_VISIBLE_DEVICES": ""}, None, []),
    ],
)
def test_the_gpus_that_a_variable_chooses(tmp_path, env, numbers, chosen):
    found = read_gpus(tool(tmp_path, "nvidia-smi", TWO_GPUS))
    assert chosen_gpus(found, env, numbers) == chosen


@pytest.mark.parametrize(
    "name",
    ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"],
)
def test_a_variable_that_hides_all_gpus(name):
    assert [hides_all_gpus({name: value}) for value in ("", "-1", "0")] == [True, True, False]


def test_a_tool_without_gpus_and_one_that_hangs(tmp_path):
    path = tool(tmp_path, "nvidia-smi", NO_GPU)
    assert read_gpus(path) == []
    tool(tmp_path, "xpu-smi", INTEL)
    assert len(read_gpus(path)) == 2
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF")  # of another processor
    assert len(read_gpus(path)) == 2
    for hangs in ("exec sleep 600", "exec sleep 600 >/dev/null"):
        tool(tmp_path, "nvidia-smi", hangs)
        assert read_gpus(path, timeout_s=0.1) is None


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
        assert read_gpus(path, timeout_s=timeout_s) is None
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
        ({"CUDA_VISIBLE_DEVICES": "GPU-9aac"}, 0, SECOND),
    ],
)
def test_the_gpu_of_a_local_rank(tmp_path, env, local_rank, address):
    env = env | {"PATH": tool(tmp_path, "nvidia-smi", TWO_GPUS)}
    assert gpu_address(World(local_rank, 2, local_rank, 2), env) == address


@pytest.mark.parametrize("visible", ["7", "9" * 5000, "", "-1", "MIG-aa01"])
def test_a_gpu_that_no_tool_lists(tmp_path, visible):
    env = {"CUDA_VISIBLE_DEVICES": visible, "PATH": tool(tmp_path, "nvidia-smi", TWO_GPUS)}
    assert gpu_address(World(0, 2, 0, 2), env) == ""


def test_a_rank_that_sees_its_own_gpu_alone(tmp_path):
    """srun --gpus-per-task=1 shows each rank one GPU; mpirun shows the ranks of a host the same."""
    path = tool(tmp_path, "nvidia-smi", TWO_GPUS)
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
    monkeypatch.setenv("PATH", tool(tmp_path, "nvidia-smi", TWO_GPUS))
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
    row = nvidia_smi({"pci.bus_id": address})
    monkeypatch.setenv("PATH", tool(tmp_path, "nvidia-smi", row))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("MPIDDP_BIND", "gpu")
    bind_to_gpu(World(0, 1, 0, 1), sysfs)
    assert os.sched_getaffinity(0) == own
    sentence = "is not bound: no core near its GPU is known, or allowed to it"
    assert capsys.readouterr() == ("", f"rank 0 on {HOST} {sentence}\n")
