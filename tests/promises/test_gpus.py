"""GPUs: what `mpiddp launch` and `top` see of the GPUs of each host. No host of these tests has one.

A program on each host prints what a real nvidia-smi, or dmesg, has printed. tests/gpu has what needs a GPU.
"""

import json
import re
import signal
from collections.abc import Mapping

from tests.support.machine import GPU_ROW, SECOND_GPU, nvidia_smi, tool
from tests.support.patience import eventually, within
from tests.support.place import Hosts, program
from tests.support.ranks import ROOT

ONE_EACH = ("launch", "-H", "node0:1,node1:1")
JOB = program("identity.py")
UUID = GPU_ROW["uuid"]
BUSY = {"utilization.gpu": "97", "memory.used": "40000", "temperature.gpu": "61"}
OUT_OF_MEMORY = (ROOT / "tests/data/failures/cuda-out-of-memory.txt").read_text().strip()
FILLS = f"""
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
raise MemoryError({OUT_OF_MEMORY!r})
"""
STEPS = """
import time
import mpiddp
mpiddp.init(backend="gloo")
checkpoints = mpiddp.Checkpoints("runs/a")
checkpoints.resume()
while not mpiddp.should_stop():
    time.sleep(0.1)
"""


def tools(hosts: Hosts, name: str, texts: Mapping[str, str]) -> dict[str, str]:
    """Variables of a launcher whose hosts have this program, each with its own text."""
    cases = [f"if [ $(hostname) = {host} ]; then {text}\nfi\n" for host, text in texts.items()]
    return {"PATH": tool(hosts.folder / "tools", name, "".join(cases))}


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


BREAKS = """
import os, pathlib, sys
import torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
print(f"{size} ranks", flush=True)
if size == 2:
    dist.barrier()
    if rank == 1:
        pathlib.Path(sys.argv[1]).touch()
        sys.exit(3)
    dist.barrier()
"""


def test_a_gpu_that_breaks(hosts):
    """Before a restart, each host looks at its GPUs. One with a broken GPU is named, and left out."""
    mark = hosts.folder / "broken"
    errors = nvidia_smi({"ecc.errors.uncorrected.volatile.total": "3"})
    text = f"if [ -e {mark} ]; then\n{errors}\nelse\n{nvidia_smi({})}\nfi"
    env = tools(hosts, "nvidia-smi", {"node0": nvidia_smi({}), "node1": text})
    options = (*ONE_EACH, "--max-restarts", "1", "--min-hosts", "1")
    done = hosts.run(*options, hosts.script(BREAKS), str(mark), env=env).assert_ok()
    assert done.lines == ["2 ranks"] * 2 + ["1 ranks"]
    broken = "node1: GPU 0 has 3 uncorrected memory errors (ECC)."
    assert done.stderr.count(broken) == 2  # by its agent, and by the preflight that follows
    assert "restarting on node0 (restart 1 of 1)." in done.stderr


def test_a_gpu_that_has_reported_an_error(hosts):
    """A host whose kernel's log has an Xid of the hardware is refused, until the GPU was reset."""
    needs_reset = nvidia_smi({"gpu_recovery_action": "Reset"})
    env = tools(hosts, "nvidia-smi", {"node0": nvidia_smi({}), "node1": needs_reset})
    log = """echo "[$(cut -d' ' -f1 /proc/uptime)] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off"""
    tools(hosts, "dmesg", {"node1": f'{log} the bus."'})
    refused = hosts.run(*ONE_EACH, JOB, env=env)
    assert refused.code == 2
    (said,) = refused.said
    xid = r"node1: GPU 0 reported Xid 79 \(it has fallen off the bus\) \d+ s ago\. "
    assert re.fullmatch(f"{xid}.*--no-check", said)
    tools(hosts, "nvidia-smi", {"node0": nvidia_smi({}), "node1": nvidia_smi({})})  # it was reset
    (said,) = hosts.run(*ONE_EACH, JOB, env=env).assert_ok().said
    assert re.fullmatch(f"{xid}Its driver has started since, or calls it usable\\.", said)


def test_a_gpu_that_an_earlier_job_still_holds(hosts):
    """A process that an earlier job has left on a GPU is named before the start, with what ends it."""
    start = "MPIDDP_JOB=12ab setsid sleep 6000 </dev/null >/dev/null 2>&1 & echo $!"
    pid = hosts["node1"].run(["sh", "-c", start], check=True).stdout.strip()
    used = nvidia_smi({"memory.used": "1100"}, users=f"{UUID}, {pid}, 1014")
    env = tools(hosts, "nvidia-smi", {"node0": nvidia_smi({}), "node1": used})
    done = hosts.run(*ONE_EACH, JOB, env=env).assert_ok()
    (said,) = done.said
    fact, _, end = said.partition(" To end it: ")
    holder = f"node1: pid {pid} of root (sleep 6000) of an earlier job"
    assert fact == f"{holder} still holds 1.1 GB of GPU 0."
    assert end == f"ssh node1 kill -9 {pid}"
    hosts["node0"].run(["sh", "-c", end], check=True)
    eventually(lambda: not hosts.processes("sleep 6000"))


def test_the_gpus_of_this_machine(here, tmp_path):
    """Without hosts, the GPUs of this machine are looked at, and get ranks: those that the job sees."""
    slow = {"clocks_event_reasons.active": "0x0000000000000048", "temperature.gpu": "91"}
    env = {"PATH": tool(tmp_path / "tools", "nvidia-smi", nvidia_smi({}, slow))}
    done = here.run("launch", "-n", "1", JOB, env=env).assert_ok()
    slowed = "GPU 1 is slowed down at 91 °C: HW slowdown, HW thermal slowdown."
    assert f"localhost: {slowed}" in done.said
    env["CUDA_VISIBLE_DEVICES"] = "0"
    done = here.run("launch", JOB, env=env).assert_ok()
    assert (len(done.records), slowed in done.stderr) == (1, False)
    done = here.run("launch", "-x", "CUDA_VISIBLE_DEVICES-", JOB, env=env).assert_ok()
    assert (len(done.records), slowed in done.stderr) == (2, True)


def test_top_shows_what_the_gpus_do(hosts):
    """`mpiddp top` shows use, memory and temperature of each rank's GPU, and names the rank whose GPU idles.

    The report of the launch has them as well.
    """
    starts = hosts.folder / "starts"
    log = f'echo "$(hostname) $1 $PPID" >>{starts}\n'
    idle = nvidia_smi({**BUSY, "utilization.gpu": "2"}, SECOND_GPU)
    texts = {"node0": log + nvidia_smi(BUSY, {**SECOND_GPU, **BUSY}), "node1": log + idle}
    report = hosts.folder / "report.json"
    launch = ("launch", "-H", "node0:2,node1:1", "--report", report)
    script = hosts.script(STEPS, "gpu_steps.py")
    job = hosts.start(*launch, script, env=tools(hosts, "nvidia-smi", texts))
    top = ("top", "gpu_steps.py", "--once")
    eventually(lambda: "idles" in hosts.run(*top).stdout)
    shown = hosts.run(*top).assert_ok().stdout
    sentence = "the GPU of rank 2 on node1 idles, and those of the others are in use (97%)."
    assert sentence in shown.splitlines()
    rows = re.findall(r"(?m)^ +\d+ +node.* (\d+%) +41\.9 GB +61 °C ", shown)
    assert rows == ["97%", "97%", "2%"]
    job.signal(signal.SIGINT)
    assert job.wait().code == 75
    (attempt,) = json.loads(report.read_text())["attempts"]
    assert [(each["rank"], each["use"]) for each in attempt["gpus"]] == [(0, 97), (1, 97), (2, 2)]
    queries = {line for line in starts.read_text().splitlines() if "query-gpu" in line}
    hosts_of_askers = sorted(line.split()[0] for line in queries)
    assert hosts_of_askers == [
        "node0",
        "node0",
        "node1",
        "node1",
    ]  # the preflight, and one agent a host


def test_a_gpu_whose_memory_is_full(here):
    """A full GPU is told once, in a short line: what was asked for, what is free, who holds the rest."""
    done = here.run("launch", "-n", "2", here.script(FILLS))
    assert done.code == 1
    line, cause = (each for each in done.said if "out of memory" in each)
    said = (
        "Tried to allocate 22.00 MiB: GPU 0 has 11.06 MiB of 23.65 GiB free; this process holds 23.60 GiB. "
        "The other ranks were stopped."
    )
    assert line.endswith(said)
    assert cause.startswith('"CUDA out of memory. Tried to allocate" has a known cause. CUDA: ')


WAITS = """
import pathlib, time
while pathlib.Path({starts!r}).read_text().count("query-gpu") < 2:
    time.sleep(0.01)
"""


def test_a_reading_while_the_script_ends(here, tmp_path):
    """A reading of the GPUs that is under way when the script ends is no process that the script has left."""
    starts = tmp_path / "starts"
    text = f'echo "$1" >>{starts}\nsleep 1\n{nvidia_smi({})}'  # the gate is the first to ask
    env = {"PATH": tool(tmp_path / "tools", "nvidia-smi", text)}
    done = here.run("launch", "-n", "1", here.script(WAITS.format(starts=str(starts))), env=env)
    done.assert_ok()
    assert "left behind" not in done.stderr


def test_a_tool_that_ignores_sigterm(here, tmp_path):
    """A hanging nvidia-smi that ignores SIGTERM keeps no job from going on, or from ending within 20 s."""
    starts = tmp_path / "starts"
    hangs = f"trap '' TERM\necho \"$1\" >>{starts}\nsleep 6000\necho"  # not by exec: its child has its pipe
    text = f'[ -s {starts} ] && {{\n{hangs}\n}}\necho "$1" >>{starts}\n{nvidia_smi({})}'
    env = {"PATH": tool(tmp_path / "tools", "nvidia-smi", text)}
    waits = WAITS.format(starts=str(starts)) + "print('the end', flush=True)\n"
    job = here.start("launch", "-n", "1", here.script(waits), env=env).until("the end")
    with within(20):  # the tool would take 6000 s
        job.wait().assert_ok()
