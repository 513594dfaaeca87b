"""The GPUs of each host: counted with the vendor's tool, chosen by the hostfile.

No machine of the tests has a GPU: the tools print what real ones have printed.

Tests mpiddp/hosts/gpus.py and mpiddp/runtime/gpu.py. The promises have the variables of ranks.
"""

import pytest

from mpiddp.hosts import gpus
from mpiddp.hosts.gpus import Gpu, chosen_gpus, read_gpus
from mpiddp.hosts.processes import marked
from tests.support.machine import GPU_ROW, TWO_GPUS, nvidia_smi, tool
from tests.support.patience import eventually

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
    )
    assert unknown == known._replace(use=0, temperature=None, slowed="", errors=None)
    (amd,) = read_gpus(tool(tmp_path / "amd", "rocm-smi", ROCM))
    assert (amd.use, amd.memory, amd.memory_total, amd.temperature) == (
        97,
        10960896,
        68702699520,
        41,
    )


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


def test_a_tool_without_gpus_and_one_for_another_processor(tmp_path):
    path = tool(tmp_path, "nvidia-smi", NO_GPU)
    assert read_gpus(path) == []
    tool(tmp_path, "rocm-smi", ROCM)
    assert len(read_gpus(path)) == 1
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF")
    assert len(read_gpus(path)) == 1


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("sleep 600 & wait", None),
        ("sleep 600 & exec sleep 600 >/dev/null", None),
        ("sleep 600 & exec yes", []),  # its output is too long
    ],
)
def test_a_tool_that_does_not_end_is_killed_with_its_children(tmp_path, monkeypatch, script, found):
    monkeypatch.setenv("STARTED_BY", str(tmp_path))
    monkeypatch.setattr(gpus, "_MOST_BYTES", 1 << 20)
    path = tool(tmp_path, "nvidia-smi", script)
    assert read_gpus(path, timeout_s=20.0 if found == [] else 0.5) == found
    eventually(lambda: not marked(f"STARTED_BY={tmp_path}".encode()))
