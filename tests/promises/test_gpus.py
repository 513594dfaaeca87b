"""GPUs: what `mpiddp launch` and `top` see of the GPUs of each host. No host of these tests has one.

A program on each host prints what a real nvidia-smi, or dmesg, has printed. tests/gpu has what needs a GPU.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Mapping
from functools import partial

import pytest

from tests.support.machine import GPU_ROW, SECOND_GPU, nvidia_smi, tool
from tests.support.patience import eventually, within
from tests.support.place import Hosts, program
from tests.support.ranks import ROOT

ONE_EACH = ("launch", "-H", "node0:1,node1:1")
JOB = program("identity.py")
BROKEN = nvidia_smi({"ecc.errors.uncorrected.volatile.total": "3"})
BUSY = {"utilization.gpu": "97", "memory.used": "40000", "temperature.gpu": "61"}


def tools(hosts: Hosts, name: str, texts: Mapping[str, str]) -> dict[str, str]:
    """Variables of a launcher whose hosts have this program, each with its own text."""
    cases = [f"if [ $(hostname) = {host} ]; then {text}\nfi\n" for host, text in texts.items()]
    return {"PATH": tool(hosts.folder / "tools", name, "".join(cases))}


def test_a_host_with_a_broken_gpu(hosts):
    """A host whose GPU has memory errors is refused, or left out, or used with --no-check."""
    env = tools(hosts, "nvidia-smi", {"node0": nvidia_smi({}), "node1": BROKEN})
    sentence = "node1: GPU 0 has 3 uncorrected memory errors (ECC)."
    fixes = ["nvidia-smi -r -i 0, on node1", "--no-check, to start anyway"]
    refused = hosts.run(*ONE_EACH, JOB, env=env)
    assert (refused.code, refused.stdout, refused.said) == (2, "", [sentence])
    assert refused.fixes == fixes
    done = hosts.run(*ONE_EACH, "--min-hosts", "1", JOB, env=env).assert_ok()
    assert [rank["host"] for rank in done.records] == ["node0"]
    assert f"leaving out a host: {sentence}" in done.said
    for options, more in ((("--no-check",), {}), ((), {"CUDA_VISIBLE_DEVICES": ""})):
        done = hosts.run(*ONE_EACH, *options, JOB, env={**env, **more}).assert_ok()
        assert (len(done.records), done.said) == (2, [])


BREAKS = """
echo "$WORLD_SIZE ranks"
if [ $WORLD_SIZE = 2 ]; then
    [ $RANK = 0 ] && { touch begun; exec sleep 6000; }
    until [ -e begun ]; do sleep 0.02; done
    touch broken
    exit 3
fi
"""


def test_a_gpu_that_breaks(hosts):
    """Before a restart, each host looks at its GPUs. One with a broken GPU is named, and left out."""
    mark = hosts.folder / "broken"
    text = f"if [ -e {mark} ]; then\n{BROKEN}\nelse\n{nvidia_smi({})}\nfi"
    env = tools(hosts, "nvidia-smi", {"node0": nvidia_smi({}), "node1": text})
    options = (*ONE_EACH, "--max-restarts", "1", "--min-hosts", "1")
    done = hosts.run(*options, "--", "sh", "-c", BREAKS, env=env).assert_ok()
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
    (sentence,) = refused.said
    xid = r"node1: GPU 0 reported Xid 79 \(it has fallen off the bus\) \d+ s ago\."
    assert re.fullmatch(xid, sentence)
    assert refused.fixes == ["restart the host", "--no-check, to start anyway"]
    tools(hosts, "nvidia-smi", {"node0": nvidia_smi({}), "node1": nvidia_smi({})})  # it was reset
    (sentence,) = hosts.run(*ONE_EACH, JOB, env=env).assert_ok().said
    assert re.fullmatch(f"{xid} Its driver has started since, or calls it usable\\.", sentence)


def test_a_gpu_that_an_earlier_job_still_holds(hosts):
    """A process that an earlier job has left on a GPU is named before the start, with what ends it."""
    start = "MPIDDP_JOB=12ab setsid sleep 6000 </dev/null >/dev/null 2>&1 & echo $!"
    pid = hosts["node1"].run(["sh", "-c", start], check=True).stdout.strip()
    used = nvidia_smi({"memory.used": "1100"}, users=f"{GPU_ROW['uuid']}, {pid}, 1014")
    env = tools(hosts, "nvidia-smi", {"node0": nvidia_smi({}), "node1": used})
    done = hosts.run(*ONE_EACH, JOB, env=env).assert_ok()
    (fact,), (end,) = done.said, done.fixes
    holder = rf"node1: pid {pid} of root \(sleep 6000, since [-\d]+ [:\d]+\) of an earlier job"
    assert re.fullmatch(rf"{holder} still holds 1\.1 GB of GPU 0\.", fact)
    assert end == f"ssh node1 kill -9 {pid}"
    hosts["node0"].run(["sh", "-c", end], check=True)
    eventually(lambda: not hosts.processes("sleep 6000"))


HOLDS = f"""
echo "$1 begins" >>log
until [ -e "$1 holds" ]; do sleep 0.05; done
echo "{GPU_ROW["uuid"]}, $$, 60000" >users-$(hostname)
until [ -e "$1 ends" ]; do sleep 0.05; done
: >users-$(hostname)
"""


def test_launches_that_wait_for_gpus(hosts):
    """--wait-for-hosts also waits for GPUs that other processes hold, and `mpiddp ps` shows them.

    Launches that wait for the same GPUs begin one after the other, with --detach as well.
    """
    folder = hosts.folder
    asked = nvidia_smi({}).replace("cat <<'END'\n\nEND", f"cat {folder}/users-$(hostname)")
    env = tools(hosts, "nvidia-smi", {"node0": asked, "node1": asked})
    env["XDG_STATE_HOME"] = str(folder / "state")
    begun = partial((folder / "log").read_text, encoding="utf-8")
    launch = (*ONE_EACH, "--wait-for-hosts", "10m")
    job = ("--", "sh", "-c", HOLDS, "-")
    (folder / "a holds").touch()
    first = hosts.start(*launch, *job, "a", env=env)
    eventually(lambda: (folder / "users-node1").exists() and begun() == "a begins\n" * 2)
    second = hosts.start(*launch, *job, "b", env=env).until("node0: GPU 0 is in use: pid ")
    third = hosts.run(*launch, "--detach", *job, "c", env=env).assert_ok().stdout.strip()
    waits = (
        rf"(?m)^\d+ \({third}\) waits: node0: GPU 0 is in use: pid \d+ of root \(.+ node1: GPU 0 .+"
    )
    assert re.search(waits, hosts.run("ps", env=env).stdout)
    (folder / "a ends").touch()
    eventually(lambda: len(begun().splitlines()) == 4)
    # The one that has begun holds no GPU yet, and the other one knows.
    refused = "node0: another launch, of root, begins on its GPUs."
    eventually(lambda: refused in f"{second.stderr} {hosts.run('ps', env=env).stdout}")
    assert len(begun().splitlines()) == 4
    for name in "bc":
        (folder / f"{name} holds").touch()
        (folder / f"{name} ends").touch()
    first.wait().assert_ok()
    second.wait().assert_ok()
    hosts.run("wait", third, env=env).assert_ok()
    assert begun().split()[::2] in ([*"aabbcc"], [*"aaccbb"])


def test_a_gpu_that_is_taken_while_a_launch_waits_for_another(hosts):
    """A launch begins only once the GPUs of all its hosts are free at the same time."""
    asked = nvidia_smi({}).replace("cat <<'END'\n\nEND", f"cat {hosts.folder}/users-$(hostname)")
    env = tools(hosts, "nvidia-smi", {"node0": asked, "node1": asked})
    node0, node1 = (hosts.folder / f"users-{host}" for host in ("node0", "node1"))
    node0.touch()
    node1.write_text(f"{GPU_ROW['uuid']}, 1, 60000\n")
    job = hosts.start(*ONE_EACH, "--wait-for-hosts", "10m", JOB, env=env)
    job.until("node1: GPU 0 is in use: pid 1 of root")
    node0.write_text(node1.read_text())
    node1.write_text("")
    job.until("node0: GPU 0 is in use: pid 1 of root")
    node0.write_text("")
    assert len(job.wait().assert_ok().records) == 2


def test_a_wait_for_gpus_that_is_over(here, tmp_path):
    """GPUs that are still held after the time of --wait-for-hosts are refused. Without it, they are only named."""
    used = nvidia_smi({"memory.used": "1100"}, users=f"{GPU_ROW['uuid']}, {os.getpid()}, 1014")
    env = {"PATH": tool(tmp_path / "tools", "nvidia-smi", used)}
    refused = here.run("launch", "--wait-for-hosts", "1s", JOB, env=env).assert_code(2)
    sentence = f"localhost: GPU 0 is in use: pid {os.getpid()} of "
    assert refused.said[-1].startswith(sentence)
    assert refused.fixes[-1] == "--no-check, to start anyway"
    assert any(
        line.startswith(sentence) for line in here.run("launch", JOB, env=env).assert_ok().said
    )


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


def test_more_ranks_than_gpus_run_on_cpus(here, tmp_path):
    """If -n is more than the GPUs of this machine, the error has the options with which the job runs."""
    env = {"PATH": tool(tmp_path / "tools", "nvidia-smi", nvidia_smi({}))}
    refused = here.run("launch", "-n", "2", JOB, env=env).assert_code(2)
    assert refused.said[-1] == "-n 2 is more than the 1 slots of this machine (localhost=1)."
    (options,) = re.findall(r"^  fix: on CPUs: (.+)$", refused.stderr, re.M)
    assert len(here.run("launch", *options.split(), JOB, env=env).assert_ok().records) == 2


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
    env = tools(hosts, "nvidia-smi", texts)
    script = shutil.copy(program("alone.py"), hosts.folder / "gpu_steps.py")
    job = hosts.start(*launch, script, "never", env=env)
    top = ("top", "gpu_steps.py", "--once")
    eventually(lambda: "idles" in hosts.run(*top).stdout)
    shown = hosts.run(*top).assert_ok().stdout
    sentence = "the GPU of rank 2 on node1 idles, and those of the others are in use (97%)."
    assert sentence in shown.splitlines()
    rows = re.findall(r"(?m)^ +\d+ +node.* (\d+%) +41\.9 GB +61 °C ", shown)
    assert rows == ["97%", "97%", "2%"]
    job.signal(signal.SIGINT).wait().assert_code(75)
    (attempt,) = json.loads(report.read_text())["attempts"]
    assert [(gpu["rank"], gpu["use"]) for gpu in attempt["gpus"]] == [(0, 97), (1, 97), (2, 2)]
    queries = {line for line in starts.read_text().splitlines() if "query-gpu" in line}
    # The preflight and one agent have asked on each host.
    assert sorted(line.split()[0] for line in queries) == ["node0"] * 2 + ["node1"] * 2


OUT_OF_MEMORY = (ROOT / "tests/data/failures/cuda-out-of-memory.txt").read_text().strip()
FILLS = f"""
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
raise MemoryError({OUT_OF_MEMORY!r})
"""


def test_a_gpu_whose_memory_is_full(here):
    """A full GPU is told once, in a short line: what was asked for, what is free, who holds the rest."""
    done = here.run("launch", "-n", "2", here.script(FILLS))
    assert done.code == 1
    line, cause = (sentence for sentence in done.said if "out of memory" in sentence)
    said = "Tried to allocate 22.00 MiB: GPU 0 has 11.06 MiB of 23.65 GiB free; this process holds 23.60 GiB. "
    ends = ("The other ranks were stopped.", "The same error ended all other ranks.")
    assert line.endswith(tuple(said + end for end in ends))
    assert cause.startswith('"CUDA out of memory. Tried to allocate" has a known cause. CUDA: ')


WAITS = """
import pathlib, sys, time
while pathlib.Path(sys.argv[1]).read_text().count("query-gpu") < 2:
    time.sleep(0.01)
print("the end", flush=True)
"""


# Not by exec: its child has its pipe.
@pytest.mark.parametrize(
    "then", ["sleep 1", "trap '' TERM\nsleep 6000\necho"], ids=["it ends", "it hangs"]
)
def test_a_reading_while_the_script_ends(here, tmp_path, then):
    """A reading of the GPUs that is under way when the script ends is no process that the script has left.

    A hanging nvidia-smi that ignores SIGTERM keeps no job from going on, or from ending within 20 s.
    """
    starts = tmp_path / "starts"
    reads = f'[ -s {starts} ] && later=1\necho "$1" >>{starts}'  # the gate is the first to ask
    text = f'{reads}\n[ "$later" ] && {{\n{then}\n}}\n{nvidia_smi({})}'
    env = {"PATH": tool(tmp_path / "tools", "nvidia-smi", text)}
    job = here.start("launch", "-n", "1", here.script(WAITS), str(starts), env=env).until("the end")
    with within(20):  # a hanging one would take 6000 s
        done = job.wait().assert_ok()
    assert "left behind" not in done.stderr
