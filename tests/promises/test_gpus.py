"""GPUs: what `mpiddp launch` and `top` see of the GPUs of each host. No host of these tests has one.

A program on each host prints what a real nvidia-smi, or dmesg, has printed. tests/gpu has what needs a GPU.
Holds mpiddp/hosts/{gpus,gpu_health,gpu_faults}.py and mpiddp/launch/gate.py.
python -m pytest tests/promises/test_gpus.py
"""

import re
from collections.abc import Mapping

from tests.support.machine import GPU_ROW, nvidia_smi, tool
from tests.support.place import Hosts, program

ONE_EACH = ("launch", "-H", "node0:1,node1:1")
JOB = program("identity.py")
UUID = GPU_ROW["uuid"]


def tools(hosts: Hosts, name: str, texts: Mapping[str, str]) -> dict[str, str]:
    """Variables of a launcher whose hosts have this program, each with its own text."""
    cases = "".join(
        f"if [ $(hostname) = {host} ]; then {text}\nfi\n" for host, text in texts.items()
    )
    return {"PATH": tool(hosts.folder / "tools", name, cases)}


def test_a_host_with_a_broken_gpu(hosts):
    """A host whose GPU has memory errors is refused, or left out, or used with --no-check."""
    broken = nvidia_smi({"ecc.errors.uncorrected.volatile.total": "3"})
    env = tools(hosts, "nvidia-smi", {"node0": nvidia_smi({}), "node1": broken})
    sentence = (
        "node1: GPU 0 has 3 uncorrected memory errors (ECC). Reset it there: nvidia-smi -r -i 0. "
        "To start anyway: --no-check"
    )
    refused = hosts.run(*ONE_EACH, JOB, env=env)
    assert (refused.code, refused.stdout, refused.said) == (2, "", [sentence])
    done = hosts.run(*ONE_EACH, "--min-hosts", "1", JOB, env=env).assert_ok()
    assert [rank["host"] for rank in done.records] == ["node0"]
    assert f"leaving out a host: {sentence}" in done.said
    for options, more in ((("--no-check",), {}), ((), {"CUDA_VISIBLE_DEVICES": ""})):
        done = hosts.run(*ONE_EACH, *options, JOB, env={**env, **more}).assert_ok()
        assert (len(done.records), done.said) == (2, [])


def test_a_gpu_that_has_reported_an_error(hosts):
    """A host whose kernel's log has an Xid of the hardware in the last hour is refused."""
    env = tools(hosts, "nvidia-smi", dict.fromkeys(("node0", "node1"), nvidia_smi({})))
    log = """echo "[$(cut -d' ' -f1 /proc/uptime)] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off"""
    tools(hosts, "dmesg", {"node1": f'{log} the bus."'})
    refused = hosts.run(*ONE_EACH, JOB, env=env)
    assert refused.code == 2
    sentence = r"node1: GPU 0 reported Xid 79, it has fallen off the bus, \d+ s ago\. .*--no-check"
    (said,) = refused.said
    assert re.fullmatch(sentence, said)


def test_a_gpu_that_an_earlier_job_still_holds(hosts):
    """A process that an earlier job has left on a GPU is named before the start, with what ends it."""
    start = "MPIDDP_JOB=12ab setsid sleep 6000 </dev/null >/dev/null 2>&1 & echo $!"
    pid = hosts["node1"].run(["sh", "-c", start], check=True).stdout.strip()
    used = nvidia_smi({"memory.used": "1100"}, users=f"{UUID}, {pid}, 1014")
    env = tools(hosts, "nvidia-smi", {"node0": nvidia_smi({}), "node1": used})
    done = hosts.run(*ONE_EACH, JOB, env=env).assert_ok()
    (said,) = done.said
    fact, _, end = said.partition(" To end it: ")
    assert fact == (
        f"node1: pid {pid} of root (sleep 6000) of an earlier job still holds 1.1 GB of GPU 0."
    )
    assert end == f"ssh node1 kill -9 {pid}"
    hosts["node0"].run(["sh", "-c", end], check=True)
    assert hosts.processes("sleep 6000") == []


def test_the_gpus_of_this_machine(here, tmp_path):
    """Without hosts, the GPUs of this machine are looked at: those that the job sees."""
    slow = {"clocks_event_reasons.active": "0x0000000000000048", "temperature.gpu": "91"}
    env = {"PATH": tool(tmp_path / "tools", "nvidia-smi", nvidia_smi({}, slow))}
    done = here.run("launch", "-n", "1", JOB, env=env).assert_ok()
    slowed = "GPU 1 is slowed down at 91 °C: hardware slowdown and heat, by its hardware."
    assert f"localhost: {slowed}" in done.said
    done = here.run("launch", "-n", "1", JOB, env={**env, "CUDA_VISIBLE_DEVICES": "0"}).assert_ok()
    assert slowed not in done.stderr
