"""The GPUs of each host: counted with the vendor's tool, chosen by the hostfile, and what is wrong with them.

No machine of the tests has a GPU: the tools print what real ones have printed.
tests/promises/test_variables.py has the variables of ranks.
"""

import os
import pwd
import re
import resource
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from mpiddp.hosts import gpus
from mpiddp.hosts.gpu_faults import faults, notes
from mpiddp.hosts.gpu_health import claim, read_health, who
from mpiddp.hosts.gpus import Gpu, chosen_gpus, read_gpus
from mpiddp.hosts.interfaces import machine
from mpiddp.protocol.channel import AGENT_NAME
from tests.support.machine import GPU_ROW, SECOND_GPU, TWO_GPUS, nvidia_smi, tool

# As `rocm-smi --showproductname --showbus --showuse --showmeminfo vram --showtemp --json` of an MI210.
ROCM = """
echo 'WARNING: a GPU is in a low-power state'
echo '{"card0": {"Temperature (Sensor edge) (C)": "N/A", "Temperature (Sensor junction) (C)": "41.0",'
echo ' "GPU use (%)": "97", "VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "10960896",'
echo ' "Card Series": "AMD Instinct MI210", "PCI Bus": "0000:C1:00.0"}, "system": {"Driver version": "6.7"}}'
"""
ECC = "ecc.errors.uncorrected.volatile.total"
CLOCKS = "clocks_event_reasons.active"
H100 = "NVIDIA H100 80GB HBM3"


def test_what_a_gpu_tells_of_itself(tmp_path):
    hot = {CLOCKS: "0x0000000000000068", "utilization.gpu": "97"}
    silent = {ECC: "[N/A]", "temperature.gpu": "[Unknown Error]"}
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
        recovery="None",
    )
    assert unknown == known._replace(use=0, temperature=None, slowed="", errors=None)
    (amd,) = read_gpus(tool(tmp_path / "amd", "rocm-smi", ROCM))
    assert (amd.name, amd.address) == ("AMD Instinct MI210", "0000:c1:00.0")
    measured = (amd.use, amd.memory, amd.memory_total, amd.temperature)
    assert measured == (97, 10960896, 68702699520, 41)


NO_ACTION = {"gpu_recovery_action": None}
RESET_STATUS = {**NO_ACTION, "reset_status.reset_required": "No"}
# What their nvidia-smi has in place of the newest fields, how many queries it refuses, and what it tells.
DRIVERS = {
    "550": (RESET_STATUS, 1, ("", 0, "No")),
    "530": (
        {**RESET_STATUS, CLOCKS: None, "clocks_throttle_reasons.active": "0x0000000000000008"},
        2,
        ("HW slowdown", 0, "No"),
    ),
    "450": ({**NO_ACTION, CLOCKS: None, ECC: None}, 5, ("", None, "")),
}


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_older_driver_tells_all_that_it_knows(tmp_path, driver):
    """One unknown field fails a query of nvidia-smi. It is asked again by the older name, or without it."""
    fields, refused, told = DRIVERS[driver]
    asked = tmp_path / "asked"
    path = tool(tmp_path, "nvidia-smi", f"echo >>{asked}\n{nvidia_smi(fields)}")
    for _ in range(2):
        (gpu,) = read_gpus(path)
    assert (gpu.name, gpu.memory_total, gpu.uuid) == (H100, 81559 << 20, GPU_ROW["uuid"])
    assert (gpu.slowed, gpu.errors, gpu.recovery) == told
    assert len(asked.read_text()) == refused + 2  # what it does not know is asked once


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
        ({"CUDA_VISIBLE_DEVICES": "GPU-9aac,MIG-aa01,7,0"}, None, [1, None]),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, None, [0]),
        ({"CUDA_VISIBLE_DEVICES": "1,GPU-77,0"}, None, [1]),
        ({}, ("MIG-a", "MIG-b"), [None, None]),
        ({"ROCR_VISIBLE_DEVICES": ""}, (0,), []),
    ],
)
def test_the_gpus_that_a_variable_chooses(tmp_path, env, numbers, chosen):
    found = read_gpus(tool(tmp_path, "nvidia-smi", TWO_GPUS))
    assert chosen_gpus(found, env, numbers) == chosen


def test_a_tool_is_read_with_more_than_1024_open_files(tmp_path):
    """select() cannot: a launcher of 340 ranks has so many."""
    path = tool(tmp_path, "nvidia-smi", TWO_GPUS)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        for _ in range(1100):
            stack.callback(os.close, os.dup(0))
        assert len(read_gpus(path)) == 2


FIRST, SECOND = GPU_ROW["uuid"], SECOND_GPU["uuid"]
LOST = """echo 'Unable to determine the device handle for {}: Unknown Error' >&2; exit 255"""
# As NVIDIA's driver and util-linux' dmesg write it, some seconds ago.
DMESG = """up=$(cut -d. -f1 /proc/uptime)
echo "[$((up - 3700)).000000] NVRM: Xid (PCI:0000:18:00): 48, pid=1, over an hour before"
echo "[$up.000001] NVRM: Xid (PCI:0000:{at}:00): {number}, pid='<unknown>', name=<unknown>, GPU 0"
"""


def log_of(number, at="9a"):
    return DMESG.replace("{at}", at).replace("{number}", str(number))


@pytest.fixture
def host(tmp_path):
    """A function that gives this machine two GPUs, with what differs, and tells what is wrong."""

    def wrong(*gpus, users="", dmesg="", chosen=(0, 1)):
        path = tool(tmp_path, "nvidia-smi", nvidia_smi(*(gpus or ({}, SECOND_GPU)), users=users))
        tool(tmp_path, "journalctl", "echo '-- No entries --'")
        tool(tmp_path, "dmesg", dmesg or "exit 1")
        gpus = read_health(path)
        return [*faults("a", gpus, chosen)], [*notes("a", gpus, chosen, "ssh a")]

    return wrong


def test_gpus_that_are_in_order(host):
    assert host() == ([], [])
    assert host(users=f"{FIRST}, {os.getpid()}, 60", dmesg=log_of(31)) == ([], [])
    assert host(dmesg=log_of(79, at="55")) == ([], [])  # of another container
    assert host({}, {**SECOND_GPU, ECC: "1"}, dmesg=log_of(79), chosen=(0,)) == ([], [])


LOADED = 'echo "[$up.000002] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.65.06"'
USABLE = [({}, "", True), (RESET_STATUS, "", True)]
USABLE += [({"gpu_recovery_action": "Reset"}, "", False), (NO_ACTION, "", False)]
USABLE += [({**NO_ACTION, "reset_status.reset_required": "Yes"}, "", False)]
USABLE += [(NO_ACTION, LOADED, True)]  # an old driver, after a restart of it


@pytest.mark.parametrize(("fields", "then", "is_usable"), USABLE)
def test_a_gpu_that_was_reset_since_its_error(host, fields, then, is_usable):
    """Its driver asks for no recovery any more, or has been loaded since: then the error is a note."""
    wrong, noted = host(fields, {**SECOND_GPU, **fields}, dmesg=f"{log_of(79)}\n{then}")
    (sentence,) = noted if is_usable else wrong
    assert len(wrong + noted) == 1
    assert sentence.startswith("a: GPU 1 reported Xid 79 (it has fallen off the bus) ")
    assert ("restart" in sentence) is not is_usable


@pytest.mark.parametrize("named", ["GPU0000:44:00.0", "GPU 0000:44:00.0", "GPU2: 0000:44:00.0"])
def test_a_gpu_that_the_driver_does_not_reach(tmp_path, named):
    gpus = read_health(tool(tmp_path, "nvidia-smi", LOST.format(named)))
    (sentence,) = faults("a", gpus, [0])
    assert sentence.startswith("a: its driver does not reach the GPU at 0000:44:00.0.\n")


def test_who_holds_memory(host):
    with subprocess.Popen(["sleep", "6000"]) as process, ExitStack() as stack:
        stack.callback(process.kill)
        pid = process.pid
        _, (note,) = host(users=f"{SECOND}, {pid}, 1014\n{FIRST}, {pid}, 30")
        since = r"since \d{4}-\d\d-\d\d \d\d:\d\d"
        assert re.fullmatch(
            rf"a: GPU 1 is in use: pid {pid} of \w+ \(sleep 6000, {since}\) holds 1\.1 GB\.", note
        )
        _, (note,) = host(users=f"{SECOND}, {pid}, [N/A]")
        assert note.endswith("holds some memory.")
    _, (note,) = host({"memory.used": "40000"}, users=f"{FIRST}, 999999, 40000")
    assert note == (
        "a: GPU 0 is in use: processes that are not listed (a desktop's, another container's) hold 41.9 GB."
    )


def test_since_when_a_process_runs():
    ps = partial(subprocess.check_output, ["ps", "-o", "etimes=", "-p", str(os.getpid())])
    assert (
        int(ps()) - 1 <= time.time() - who(str(os.getpid()))[2] <= int(ps()) + 1
    )  # in whole seconds there


CLAIMS = """
import ctypes, os, sys
from mpiddp.hosts.gpu_health import claim
claim({})  # loads what another user may not read
if os.getuid() == 0:
    os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: as a login of this user, it may read its own /proc
print(claim({sys.argv[1]: sys.argv[2:]}), flush=True)
input()
"""


def test_two_users_that_claim_a_gpu():
    """One gets all that it claims, as long as it lives, and may claim them again; the other gets none."""
    # Tests of another folder may run on this machine.
    gpu, another, key = f"{os.getpid()}:f1:00.0", f"{os.getpid()}:f2:00.0", machine("net", "pid")
    with subprocess.Popen(
        [sys.executable, "-c", CLAIMS, key, gpu], stdin=-1, stdout=-1, text=True
    ) as process:
        assert process.stdout.readline() == "\n"
        assert claim({key: [another, gpu]}) == pwd.getpwuid(os.getuid() or 65534).pw_name
        assert f"mpiddp-gpu-{another}" not in Path("/proc/net/unix").read_text(encoding="utf-8")
        process.communicate("\n")
    assert [
        claim({key: [another, gpu]}),
        claim({key: [gpu]}),
        claim({"another machine": [gpu]}),
    ] == ["", "", ""]


def test_a_process_of_a_job_that_runs_is_not_what_an_earlier_one_has_left(host):
    """It has an agent above it. tests/promises/test_gpus.py has one without."""
    agent = f"""
import subprocess
open("/proc/self/comm", "w").write("{AGENT_NAME}")
with subprocess.Popen(["sleep", "6000"]) as process:
    print(process.pid, flush=True)
    input()
    process.kill()
"""
    command, pipe = ["python3", "-c", agent], subprocess.PIPE
    env = {**os.environ, "MPIDDP_JOB": "12ab"}
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True) as process:
        pid = process.stdout.readline().strip()
        _, (note,) = host(users=f"{FIRST}, {pid}, 1014")
        process.stdin.write("\n")
        process.stdin.close()
    assert note.startswith(f"a: GPU 0 is in use: pid {pid} of ")
