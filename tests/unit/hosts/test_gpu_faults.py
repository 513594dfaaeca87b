"""What is wrong with a host's GPUs, from what its tools print and its processes are.

Tests mpiddp/hosts/{gpu_health,gpu_faults}.py.
"""

import os
import re
import subprocess
from contextlib import contextmanager

import pytest

from mpiddp.hosts.gpu_faults import faults, notes
from mpiddp.hosts.gpu_health import read_health
from mpiddp.protocol.channel import OUTPUT_PROCESS
from tests.support.machine import GPU_ROW, SECOND_GPU, nvidia_smi, tool

FIRST, SECOND = GPU_ROW["uuid"], SECOND_GPU["uuid"]
ECC = "ecc.errors.uncorrected.volatile.total"
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


def test_faults_of_the_chosen_gpus(host):
    (ecc,), _ = host({}, {**SECOND_GPU, ECC: "1"})
    assert ecc == (
        "a: GPU 1 has 1 uncorrected memory error (ECC). Reset it there: nvidia-smi -r -i 1."
    )
    (xid,), _ = host(dmesg=log_of(79))
    assert re.fullmatch(
        r"a: GPU 1 reported Xid 79 \(it has fallen off the bus\) \d s ago\. Restart the host\.", xid
    )
    assert host({}, {**SECOND_GPU, ECC: "1"}, dmesg=log_of(79), chosen=(0,)) == ([], [])
    assert host(dmesg=log_of(79, at="55")) == ([], [])  # of another container


@pytest.mark.parametrize("named", ["GPU0000:44:00.0", "GPU 0000:44:00.0", "GPU2: 0000:44:00.0"])
def test_a_gpu_that_the_driver_does_not_reach(tmp_path, named):
    gpus = read_health(tool(tmp_path, "nvidia-smi", LOST.format(named)))
    (sentence,) = faults("a", gpus, [0])
    assert sentence.startswith("a: its driver does not reach the GPU at 0000:44:00.0. ")


@contextmanager
def sleeping(**env):
    with subprocess.Popen(["sleep", "6000"], env={**os.environ, **env}) as process:
        yield process.pid
        process.kill()


def test_who_holds_memory(host):
    with sleeping() as pid:
        _, (note,) = host(users=f"{SECOND}, {pid}, 1014\n{FIRST}, {pid}, 30")
        assert re.fullmatch(
            rf"a: GPU 1 is in use: pid {pid} of \w+ \(sleep 6000\) holds 1\.1 GB\.", note
        )
        _, (note,) = host(users=f"{SECOND}, {pid}, [N/A]")
        assert note.endswith("holds some memory.")
    _, (note,) = host({"memory.used": "40000"}, users=f"{FIRST}, 999999, 40000")
    assert note == (
        "a: GPU 0 is in use: processes that are not listed (a desktop's, another container's) hold 41.9 GB."
    )


def test_a_process_of_a_job_that_runs_is_not_what_an_earlier_one_has_left(host):
    """It has an agent above it. tests/promises/test_gpus.py has one without."""
    agent = f"""
import subprocess
open("/proc/self/comm", "w").write("{OUTPUT_PROCESS}")
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
