"""Records of attempts (`launch.judge.events`): judge a record again, or record tests/data/records anew.

    python -m tests.support.records replay attempt_1.jsonl    # print the sentences of the launcher again
    python -m tests.support.records record hang exit_code      # run these real jobs again; all without a name

`launch --log-dir` keeps a record of each attempt. Beside each file of tests/data/records is its verdict.
"""

import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpiddp.launch.judge.events import Record
from mpiddp.launch.judge.hangs import find_hang, missing_sentence
from mpiddp.launch.judge.stragglers import straggler_sentence, window
from mpiddp.launch.judge.verdict import verdict
from mpiddp.protocol.server import Event
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env

FOLDER = ROOT / "tests" / "data" / "records"
_OTHER_ROOT = "/home/me/mpiddp"  # in a file, for that of this checkout


def events(path: Path) -> Iterator[tuple[Record, Event]]:
    """The record in a file, after each of its events."""
    with path.open(encoding="utf-8") as lines:
        texts = (line.replace(_OTHER_ROOT, str(ROOT)) for line in lines)
        began, *later = (Event(**json.loads(line)) for line in texts)
    record = Record(**began.facts, at=began.at)
    for event in later:
        record.add(event)
        yield record, event


def replay(path: Path) -> str:
    """The sentences of a launcher on the events of a record, a line for each, and its exit code."""
    sentences: dict[str, str] = {}  # by their subjects, once for each
    windows, late_s = list[dict[str, Any]](), 0.0
    since = None
    for record, event in events(path):
        facts = {**event.facts}
        match event.kind, facts.pop("by", ""):
            case "noticed", "Stragglers":
                began_at = since or record.began_at
                assert facts == window(record, began_at, event.at)
                since = event.at
                windows.append(facts)
                ranks, sentence = straggler_sentence(record, windows)
                sentences.setdefault(f"stragglers {ranks}", sentence)
            case "noticed", "Hangs":
                hang = find_hang(record, facts["printed_at"])
                assert hang is not None
                sentences.setdefault(hang.about, f"{hang.sentence}{hang.stacks}")
            case "noticed", "LateStart":
                late_s = facts["seconds"]
            case "end", _ if late_s and record.latest["started"] and record.missing:
                assert missing_sentence(record, late_s) == facts["why"]
    outcome = verdict(record)
    sentences |= {line: line for line in (outcome.sentence, outcome.known_cause)}
    fault = f"host at fault: {outcome.host_at_fault}\n" if outcome.host_at_fault else ""
    text = "".join(f"{line}\n" for line in sentences.values() if line).replace(
        str(ROOT), _OTHER_ROOT
    )
    return f"{text}{fault}exit code: {outcome.code}\n"


# --- real jobs of two ranks: on this machine, or with -H on two hosts of a test cluster ---

SCRIPT = """\
import os, signal, subprocess, sys, time
import mpiddp
rank, agent = int(os.environ["RANK"]), os.getppid()
from mpiddp.runtime.job.session import current
def parent(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
def tell_launcher(number):
    os.kill(parent(parent(agent)), number)
def steps(count, own_s=0.0):
    for step in range(count):
        until = time.thread_time() + own_s
        while time.thread_time() < until:
            pass
        mpiddp.should_stop()
        current().coordinator.all_gather_json(step, timeout_s=600)
        time.sleep(0.05)
def until_stopped():
    while not mpiddp.should_stop():
        time.sleep(0.05)
"""
COLLECTIVES = """\
from datetime import timedelta
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=12))
numbers = torch.ones(1 << 16)
def all_reduces(count, own_s=0.0):
    for _ in range(count):
        time.sleep(own_s)
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
all_reduces(3)
"""
JOBS: dict[str, tuple[str, str]] = {  # by name: options, and what each rank runs after SCRIPT
    "done": ("", "steps(3)"),
    "exception": ("", "time.sleep(rank == 0 and 30)\nraise KeyError('x')"),
    "exit_code": ("", "time.sleep(rank == 0 and 30)\nsys.exit(3)"),
    "exit_2_amid_steps": ("", "steps(3)\ntime.sleep(rank == 0 and 30)\nsys.exit(2)"),
    "refusal": ("", "import argparse\nargparse.ArgumentParser().parse_args(['--x'])"),
    "user_error": ("", "from mpiddp.errors import UserError\nraise UserError('--x: bad.')"),
    "killed": ("", "time.sleep(rank == 0 and 30)\nos.kill(os.getpid(), 9)"),
    "agent_killed": ("", "time.sleep(rank == 0 and 30)\nos.kill(agent, 9)\ntime.sleep(30)"),
    "segfault": ("", "time.sleep(rank == 0 and 30)\nimport ctypes\nctypes.string_at(0)"),
    "mpirun_killed": ("", "rank or os.kill(parent(agent), 9)\ntime.sleep(30)"),
    "mpirun_interrupted": ("", "rank or os.kill(parent(agent), 2)\ntime.sleep(30)"),
    "os_exit_0": ("", "os._exit(0)"),
    "out_of_memory": (
        "",
        "time.sleep(rank == 0 and 30)\n"
        "raise RuntimeError('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.')",
    ),
    "stopped": ("", "steps(3)\nrank or tell_launcher(2)\nuntil_stopped()\nsys.exit(75)"),
    "interrupted": ("", "time.sleep(1)\nrank or tell_launcher(2)\ntime.sleep(30)"),
    "hung_up": ("", "time.sleep(1)\nrank or tell_launcher(1)\ntime.sleep(30)"),
    "stop_after": ("--stop-after 2", "until_stopped()\nsys.exit(75)"),
    "too_slow_to_stop": (
        "--grace 1",
        "steps(3)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nrank or tell_launcher(15)\ntime.sleep(30)",
    ),
    "second_signal": (
        "",
        "steps(3)\nrank or tell_launcher(15)\nuntil_stopped()\n"
        "time.sleep(2)\nrank or tell_launcher(15)\ntime.sleep(30)",
    ),
    "failed_while_it_saved": (
        "",
        "steps(3)\nrank or tell_launcher(15)\nuntil_stopped()\n"
        "time.sleep(rank == 0 and 30)\nraise OSError(28, 'No space left on device')",
    ),
    "command_exit_code": ("-- {python}", "time.sleep(rank == 0 and 30)\nsys.exit(5)"),
    "hang_in_a_line": (
        "--hang-timeout 2",
        "steps(3)\nif rank:\n    os.mkfifo(f'{__file__}.1')\n    open(f'{__file__}.1')\nsteps(9)",
    ),
    "hang_of_a_stopped_rank": (
        "--hang-timeout 2",
        "steps(3)\nif rank:\n    [os.kill(pid, signal.SIGSTOP) for pid in (agent, os.getpid())]\nsteps(9)",
    ),
    "hang_in_native_code": (
        "--hang-timeout 2",
        "steps(3)\nimport ctypes\nlock = ctypes.create_string_buffer(64)\n"
        "for _ in range(2 * rank):\n    ctypes.PyDLL(None).pthread_mutex_lock(lock)\nsteps(9)",
    ),
    "host_lost": (
        "-H node0,node1",
        "steps(3)\nimport glob, os.path\n"
        "for each in glob.glob('/sys/class/net/*') if rank else ():\n"
        "    subprocess.run(['ip', 'link', 'set', os.path.basename(each), 'down'])\ntime.sleep(60)",
    ),
    "daemon_of_another_host_killed": (
        "-H node0,node1",
        "time.sleep(1)\nrank and os.kill(parent(agent), 9)\ntime.sleep(30)",
    ),
    "straggler": ("", COLLECTIVES + "all_reduces(400, (0.02, 0.1)[rank])"),
    "left_the_loop": (
        "",
        COLLECTIVES + "from torch.nn.parallel import DistributedDataParallel\n"
        "model = DistributedDataParallel(torch.nn.Linear(9, 1))\nwith model.join():\n"
        "    for _ in range(10 + 400 * rank):\n"
        "        model(torch.ones(1, 9)).sum().backward()\n        time.sleep(0.1)",
    ),
    "not_in_a_collective": (
        "--hang-timeout 5",
        COLLECTIVES
        + "if rank:\n    os.mkfifo(f'{__file__}.1')\n    open(f'{__file__}.1')\nall_reduces(9)",
    ),
    "collectives_differ": (
        "--hang-timeout 5",
        COLLECTIVES + "rank and dist.broadcast(numbers, 1)\nall_reduces(9)",
    ),
    "collective_times_out": ("", COLLECTIVES + "rank and time.sleep(60)\nall_reduces(9)"),
}


def record(name: str) -> None:
    """Run a job, and keep its record without the names of this machine, and its verdict."""
    options, code = JOBS[name]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT + code, encoding="utf-8")
        python = [sys.executable, "-m"]
        command = [*python, "mpiddp", "launch", "-n", "2", "--log-dir", folder]
        if "-H" in options:
            command = [*python, "tests.support.cluster", "2", "--", *command]
        command += [*options.replace("{python}", sys.executable).split(), str(script)]
        subprocess.run(command, env=clean_env(), cwd=ROOT, timeout=PATIENCE_S * 3, check=False)
        (file,) = Path(folder).glob("*/attempt_1.jsonl")
        text = file.read_text(encoding="utf-8")
        for there, neutral in (
            (folder, "/home/me"),
            (str(ROOT), _OTHER_ROOT),
            (sys.prefix, "/venv"),
            (sys.base_prefix, "/usr"),
        ):
            text = text.replace(there, neutral)
    text = re.sub(rf"\b{socket.gethostname()}\b", "node0", text)
    path = FOLDER / f"{name}.jsonl"
    path.write_text(text)
    path.with_suffix(".txt").write_text(replay(path))
    print(name, path.with_suffix(".txt").read_text(), sep="\n")


if __name__ == "__main__":
    verb, *names = sys.argv[1:]
    for name in names or JOBS if verb == "record" else ():
        record(name)
    for path in names if verb == "replay" else ():
        print(replay(Path(path)), end="")
