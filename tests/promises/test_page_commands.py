"""Pages: the commands of README.md and docs/ print what the pages show.

A block ```console is run as it stands. `$ ` begins a command; what follows is compared with what it prints:
numbers and the name of the host may differ, `…` alone stands for any lines, and within a line for any text.
"""

import html
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

from tests.docs.test_pages import USER_PAGES, blocks, named, prose
from tests.support.machine import nvidia_smi, tool
from tests.support.own_script import PLAIN
from tests.support.patience import PATIENCE_S
from tests.support.place import Done, Here, Hosts, program
from tests.support.ranks import ALL_OUTPUT, ROOT, clean_env, find_mpirun


def consoles(page: Path) -> list[str]:
    """The blocks of a page that have something to run."""
    return [block.text for block in blocks(page) if block.kind == "console"]


@pytest.mark.parametrize("page", [*filter(consoles, USER_PAGES)], ids=named)
def test_what_a_page_shows_is_what_its_commands_print(page, tmp_path):
    """Every command in a console block of README.md and docs/ prints what the page shows."""
    for folder in ("examples", "hostfiles"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for text in consoles(page):
        if page.stem != "get-started" or "ddp.py" not in text:  # the next test compares those
            compare(text, tmp_path)


def test_the_first_jobs_on_any_machine(tmp_path):
    """The first jobs of docs/get-started.md run on a machine with one GPU and one core, too."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/ddp.py").write_text(
        PLAIN.read_text().replace("STEPS = 2000", "STEPS = 300")
    )
    tools = tool(tmp_path / "tools", "nvidia-smi", nvidia_smi({}))
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        for text in (text for text in consoles(ROOT / "docs/get-started.md") if "ddp.py" in text):
            compare(text, tmp_path, tools)
    finally:
        os.sched_setaffinity(0, cores)


def test_a_logged_job_ends_with_the_exit_code_of_the_job(tmp_path):
    """The commands of the pages that write a log by `tee` end with the exit code of the job."""
    path = tool(tmp_path / "tools", "mpiddp", "echo the job has said; exit 75")
    texts = [
        "\n".join([*map(attrgetter("text"), blocks(page)), prose(page)]) for page in USER_PAGES
    ]
    logged = [
        line for text in texts for line in re.findall(r"mpiddp launch[^\n`#]*\| tee[^\n`#]*", text)
    ]
    assert logged
    for text in texts:
        assert not re.search(r"\| tee", text) or "set -o pipefail" in text
    for line in logged:
        script = f"set -o pipefail\n{line}"
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env={"PATH": path}, check=False)
        assert done.returncode == 75, line
        assert (tmp_path / "train.log").read_text() == "the job has said\n"
    bare = subprocess.run(["bash", "-c", logged[0]], cwd=tmp_path, env={"PATH": path}, check=False)
    assert bare.returncode == 0  # so the page has to say it


def test_the_commands_of_the_page_on_mpirun(hosts):
    """The commands of docs/mpirun.md run on two hosts, from a variable of the launcher to a ResNet."""
    page = ROOT / "docs/mpirun.md"
    variables, script, resnet = (
        shlex.split(block.text.strip()) for block in blocks(page) if block.kind == "sh"
    )
    (code,) = (block.text for block in blocks(page) if block.kind == "python")
    (hosts.folder / "hosts.txt").write_text("node0 slots=2\nnode1 slots=2\n")
    (hosts.folder / "train.py").write_text(code)

    def run(words: list[str], *more: str) -> Done:
        there = {"16": "4", "python": sys.executable, "mpirun": find_mpirun()}
        words = [there.get(word, word) for word in words]
        as_root = [words[0], "--allow-run-as-root", *words[1:], *more]
        return hosts.run(*as_root, cwd=hosts.folder).assert_ok()

    said = run([*variables[: variables.index("train.py")], program("reduces.py")]).records
    assert [one["RANK"] for one in sorted(said, key=lambda one: one["RANK"])] == [0, 1, 2, 3]
    assert {one["sum"] for one in said} == {10}
    lines = [line for line in run(script).lines if line.startswith("rank ")]
    assert sorted(line.partition(":")[0] for line in lines) == [
        f"rank {rank} of 4 on node{rank // 2}" for rank in range(4)
    ]
    small = ("--epochs=1", "--steps-per-epoch=1", "--batch-size=2")
    assert "train_loss" in run(resnet, *small).stdout


MARK = "next command"


def compare(text: str, folder: Path, tools: str = "") -> None:
    """Run the commands of a block in one shell, and compare what each prints. `tools` comes first on PATH."""
    shown = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    pairs = [first_command(text) for text in shown]
    script = "".join(
        f"echo {shlex.quote(MARK)}\n(exit $code)\n{command}\ncode=$?\n" for command, _ in pairs
    )
    env = {name: value for name, value in clean_env().items() if name not in ALL_OUTPUT}
    env["PATH"] = f"{Path(sys.executable).parent}:{tools or env['PATH']}"
    done = subprocess.run(
        ["bash", "-c", f"code=0\n{script}"],
        cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    printed = done.stdout.split(f"{MARK}\n")[1:]
    assert len(printed) == len(pairs), done.stdout
    for (command, expected), actual in zip(pairs, printed, strict=True):
        assert re.fullmatch(pattern(expected), alike(actual)), f"$ {command}\n{actual}"


def first_command(text: str) -> tuple[str, str]:
    """A command, whose lines but the last end with a backslash, and what the page says that it prints."""
    parts = re.match(r"((?:[^\n]*\\\n)*[^\n]*)\n?(.*)", text, re.DOTALL)
    return parts[1], parts[2]


def alike(text: str) -> str:
    """The text without what differs from machine to machine: numbers, the name of the host, spaces."""
    host = socket.gethostname().partition(".")[0]
    text = re.sub(rf"\b({re.escape(host)}|vm)\b", "HOST", text)
    text = re.sub(r"\d[\d,.]*\d|\d", "0", text)
    return "".join(f"{' '.join(line.split())}\n" for line in text.splitlines())


def pattern(expected: str) -> str:
    parts = [
        "(?:.*\n)*" if line == "…" else f"{re.escape(line).replace('…', '.*')}\n"
        for line in alike(expected).splitlines()
    ]
    return "".join(parts)


def test_another_line_would_be_found():
    """The comparison of a page with its commands allows for other numbers, but not for another line."""
    assert re.fullmatch(pattern("a 1\n…\nb … 2.5\n"), alike("a 7\nx\ny\nb is 3\n"))
    assert not re.fullmatch(pattern("a 1\n…\nb … 2.5\n"), alike("a 7\nx\ny\nc is 3\n"))


# As for users, who set neither variable.
AS_USERS = dict.fromkeys(ALL_OUTPUT, "")


# It prints what examples/ddp_with_checkpoints.py prints, without the time that torch takes for an optimizer.
IN_THE_PICTURE = """
import time, torch, torch.distributed as dist, mpiddp
dist.init_process_group("gloo")
checkpoints = mpiddp.Checkpoints("runs/ddp", every="10m")
saved = checkpoints.resume()
for step in range(saved.step + 1 if saved else 1, 601):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.005 if saved or step < 300 else 0.1)
    if step % 100 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss 0.1234", flush=True)
    if checkpoints.due(step) or step == 600:
        checkpoints.save(step, {})
    if mpiddp.should_stop():
        break
"""


def test_the_picture(hosts: Hosts):
    """The picture of README.md is what the program prints."""
    texts = re.findall(r">([^<]+)</text>", (ROOT / "docs/pictures/launch.svg").read_text())
    shown = html.unescape("\n".join(texts)).replace("^C", "")
    pairs = [first_command(text) for text in re.split(r"^\$ ", shown, flags=re.MULTILINE)[1:]]
    hosts.script(IN_THE_PICTURE, "train.py")
    for command, expected in pairs:
        job = hosts.start(*shlex.split(command)[1:], cwd=hosts.folder, env=AS_USERS)
        if "SIGINT" in expected:
            job.until("step 300").signal(signal.SIGINT)
        done = job.wait()
        # On a busy machine, a rank may be a straggler.
        printed = "\n".join(line for line in lines_of(done) if "is a straggler" not in line)
        assert sorted(alike(printed).splitlines()) == sorted(alike(expected).splitlines())
    assert len(pairs) == 3


FAILS = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for step in range(1000):
    if step == 50 and dist.get_rank() == 3: raise ValueError("bad sample 17")
    dist.all_reduce(torch.ones(8))
"""


def lines_of(done: Done) -> list[str]:
    return [*done.lines, *done.stderr.splitlines()]


def test_one_failure_on_four_ranks(here: Here):
    """A page says how many lines mpiddp and torchrun print if one of four ranks raises an exception."""
    page = " ".join((ROOT / "docs/migration.md").read_text().split())
    ours = re.search(r"you read (\d+) lines with (\d+) traceback\.", page)
    theirs = re.search(r"torchrun prints about (\d+) lines with (\d+),", page)
    script = here.script(FAILS)
    done = here.run("launch", "-H", "localhost:4", script, env=AS_USERS)
    carets = sys.version_info >= (3, 11)  # a line of the traceback
    assert counted(done) == (int(ours[1]) - (not carets), int(ours[2])), done.stderr
    torchrun = here.run("python", "-m", "torch.distributed.run", "--nproc-per-node=4", script)
    lines, tracebacks = counted(torchrun)
    # The victims that are quick enough print a traceback, of 9 to 11 lines, before torchrun ends them.
    about_lines, about_tracebacks = map(int, theirs.groups())
    assert 2 <= tracebacks <= about_tracebacks + 1, torchrun.stderr
    assert abs(lines + 10 * (about_tracebacks - tracebacks) - about_lines) <= 10 * tracebacks, (
        torchrun.stderr
    )


def counted(done: Done) -> tuple[int, int]:
    """The lines, and the tracebacks."""
    assert done.code == 1
    return len(lines_of(done)), done.stderr.count("Traceback (most recent call last)")


SPAWNS = """
import os, socket, torch, torch.distributed as dist, torch.multiprocessing as mp


def main(rank, world_size, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    numbers = torch.ones(1)
    dist.all_reduce(numbers)
    print(f"sum {numbers.item():g}\\n", end="", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    mp.spawn(main, args=(2, port), nprocs=2)
"""
RANK_0_SAVES = """
import os, torch, torch.distributed as dist
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=world_size)
if rank == 0:
    torch.save({"step": 1}, "model.pt")
dist.barrier()
print(f"saved {torch.load('model.pt')['step']}\\n", end="", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("script", "ranks", "line"), [(SPAWNS, 1, "sum 2"), (RANK_0_SAVES, 2, "saved 1")]
)
def test_what_my_script_may_keep(here: Here, script, ranks, line):
    """What docs/my-script.md says to leave as it is runs: mp.spawn on one rank, torch.save on rank 0."""
    done = here.run("launch", "-H", f"localhost:{ranks}", here.script(script)).assert_ok()
    assert done.lines == [line] * 2
