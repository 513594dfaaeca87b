"""A script in its process: its first line, the steps that its optimizers count, its log and its end."""

import json
import os
import signal
import sys
from socket import gethostname

import pytest

from mpiddp.hosts.gpus import VISIBLE  # a rank with a choice of GPUs imports more
from mpiddp.runtime.child import Child, reap
from mpiddp.runtime.helpers import Helpers
from mpiddp.runtime.program import COMMAND, Program
from mpiddp.runtime.rank import Rank
from tests.support.ranks import LAUNCH, run_command, script

LOOK = """
import gc, json, os, sys, weakref
ours = [name for name in sys.modules if name.startswith("mpiddp.")]
modules = [name for name in ours if not hasattr(sys.modules[name], "__path__")]
is_early = "torch" in sys.modules
files = {*os.listdir("/proc/self/fd")}
import torch
files = {*os.listdir("/proc/self/fd")} - files
visited = {id(each) for each in gc.get_objects()}
class Node: pass
node = Node(); node.self = node; seen = weakref.ref(node); del node; gc.collect()
found = {
    "torch is imported before": is_early,
    "torch is visited": id(vars(torch)) in visited,
    "garbage is collected": gc.isenabled() and seen() is None,
    "files stay open": bool(files),
    "modules": modules,
}
os.write(1, f"{json.dumps(found)}\\n".encode())
"""


def test_a_script_begins_after_few_modules(tmp_path, monkeypatch):
    """torch comes with the script's own import, and opens no files. The garbage collector does not visit its objects."""
    for name in VISIBLE:
        monkeypatch.delenv(name, raising=False)
    done = run_command([*LAUNCH, "-H", "localhost:1", script(tmp_path, LOOK)])
    assert done.returncode == 0, done.stderr
    for found in map(json.loads, done.stdout.splitlines()):
        modules = found.pop("modules")
        assert len(modules) <= 18, modules
        assert not [name for name in modules if name.startswith("mpiddp.runtime.torch")]
        assert found.pop("garbage is collected")
        assert not any(found.values()), found


STARTS_ANOTHER = """
import os, subprocess, sys
if len(sys.argv) == 1:
    sys.exit(subprocess.run([sys.executable, __file__, "again"]).returncode)
import torch.distributed as dist
dist.init_process_group("gloo")
os.write(1, f"{dist.get_world_size()}\\n".encode())
dist.barrier()  # otherwise gloo may still connect the other rank
dist.destroy_process_group()
"""


CALLS_FROM_THREADS = """
import threading
from mpiddp.runtime.job.session import script_session
threads = threading.Barrier(8)
def call():
    threads.wait()
    connected.append(script_session().coordinator.has_launcher)
connected = []
calls = [threading.Thread(target=call) for _ in range(threads.parties)]
for thread in calls: thread.start()
for thread in calls: thread.join()
print(connected)
"""


CLOSES_FILES = """
import os, mpiddp
from mpiddp.runtime.job.session import current
os.closerange(3, 1 << 16)
mpiddp.progress(1)
print(current().coordinator.ask("claim", key="is answered")[0]["rank"])
"""


# What each prints, on how many ranks.
CONNECTS = {
    # torch's store listens in the script that imports torch, or in the process that it starts before.
    "a process of the script": (STARTS_ANOTHER, 2, ["2"] * 2),
    # They wait for one connection.
    "several threads at once": (CALLS_FROM_THREADS, 1, [str([True] * 8)]),
    # Its connection to the launcher does not get the number of the closed one to its agent.
    "after it has closed all files": (CLOSES_FILES, 1, ["0"]),
}


@pytest.mark.parametrize("who", CONNECTS)
def test_what_connects(tmp_path, who):
    text, ranks, lines = CONNECTS[who]
    done = run_command([*LAUNCH, "-H", f"localhost:{ranks}", script(tmp_path, text)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == lines


KINDS = """
import os, subprocess, sys
from mpiddp.runtime.job.session import current

def say():
    os.write(1, f"{current().kind.name}\\n".encode())

def fork(act):
    child = os.fork()
    if child == 0:
        act()
        os._exit(0)
    os.waitpid(child, 0)

say()
if len(sys.argv) == 1:
    fork(lambda: (say(), fork(say)))
    subprocess.run([sys.executable, __file__, "again"])
    os.environ.pop("MPIDDP_RUN_ID", None)
    subprocess.run([sys.executable, __file__, "again"])
"""


@pytest.mark.parametrize(
    ("how", "kind", "of_what_it_starts"),
    [
        ([*LAUNCH, "-H", "localhost"], "SCRIPT", "WITHIN"),
        ([*LAUNCH, "-H", "localhost", "--", sys.executable], "WITHIN", "WITHIN"),
        ([sys.executable], "BY_HAND", "BY_HAND"),
    ],
    ids=["a script", "a command", "by hand"],
)
def test_what_a_process_is_in_its_job(tmp_path, how, kind, of_what_it_starts):
    """A process is by hand, too, if it starts without the id of the job."""
    done = run_command([*how, script(tmp_path, KINDS)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [kind, *[of_what_it_starts] * 3, "BY_HAND"]


FOLDS_AND_A_GAN = """
import torch
from types import SimpleNamespace
from mpiddp.runtime.patches import optimizer_steps

told = []
progress = SimpleNamespace(count=lambda steps, by: told.append(steps))
optimizer_steps(SimpleNamespace(progress=progress))
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
for fold in range(3):
    optimizer = torch.optim.SGD([parameter])
    for step in range(2):
        optimizer.step()
print(told)
told.clear()
both = [torch.optim.SGD([parameter]) for _ in range(2)]
for step in range(2):
    for optimizer in both:
        optimizer.step()
print(told)
"""


def test_a_later_optimizer_goes_on_and_two_of_one_step_count_once():
    done = run_command([sys.executable, "-c", FOLDS_AND_A_GAN])
    assert done.stdout == "[1, 2, 2, 3, 3, 4]\n[4, 4, 5, 5]\n"


def test_a_signal_that_comes_before_a_command_reaches_it(monkeypatch):
    child = Child(Rank.from_env(Program(COMMAND, "sleep", ("600",))), helpers := Helpers())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of a rank that has joined")
    child.pass_on(signal.SIGTERM)
    child.start(os.environ)
    while child.status is None:
        reap(helpers)
    assert child.status == -signal.SIGTERM


FLAGS = "import sys; print(sys.flags.optimize, sys.flags.dev_mode, sys.warnoptions, sys.orig_argv[1:-1])"


def test_flags_of_python_by_hand(tmp_path):
    """A script sees the flags of the Python that has started its rank."""
    python = [sys.executable, "-O", "-X", "dev", "-W", "error"]
    name = script(tmp_path, FLAGS)
    # Without a launcher's variables, run is launch.
    done = run_command([*python, "-m", "mpiddp", "run", name], RANK="0", WORLD_SIZE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 True ['default', 'error'] ['-")


CRASHES = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
ctypes.string_at(0)
"""


@pytest.mark.parametrize(("value", "shows_all"), [("", False), ("1", True)])
def test_a_crash_shows_the_threads_that_the_user_asks_for(tmp_path, value, shows_all):
    command = [sys.executable, "-m", "mpiddp", "run", script(tmp_path, CRASHES)]
    done = run_command(command, PYTHONFAULTHANDLER=value)
    assert "in string_at" in done.stderr
    assert ("Thread 0x" in done.stderr) is shows_all


IN_A_DESTRUCTOR = """
import ctypes
libc = ctypes.CDLL("libc.so.6")
libc.__cxa_atexit(ctypes.cast(libc.abort, ctypes.c_void_p), None, None)
"""
HANDLED = "try: 1 / 0\nexcept ArithmeticError: sys.exit(4)"
AGAIN = (
    "os.getenv('A') and os._exit(6); os.putenv('A', '1'); os.execv(sys.executable, sys.orig_argv)"
)
NO_FILES = "import resource as r, torch; r.setrlimit(r.RLIMIT_NOFILE, (0, 0)); raise OSError('a')"
# What rank 1 does, and what is said of it. Plainer ends are in tests/promises/test_failures.py.
ENDS = {
    "sys.exit('no data.')": "ended first, with exit code 1: no data. ",
    HANDLED: "ended first, with exit code 4: ZeroDivisionError: division by zero.",
    AGAIN: "ended first, with exit code 6.",
    NO_FILES: "failed first: OSError: a.",
    "os.closerange(3, 999); os._exit(8)": "ended first, with exit code 8.",
    "os.execvp('sh', ['sh', '-c', 'exit 5'])": "ended first, with exit code 5.",
    IN_A_DESTRUCTOR: "was killed by SIGABRT.",
}
TEXT = """
import os, sys, time
if os.environ["RANK"] == "1":
    exec(sys.argv[1])
else:
    time.sleep(600)
"""


@pytest.mark.parametrize("code", ENDS, ids=lambda each: each.strip().split("\n")[0])
def test_an_end_is_what_wait_says(tmp_path, code):
    done = run_command([*LAUNCH, "-H", "localhost:2", script(tmp_path, TEXT), code])
    assert f"rank 1 on {gethostname()} {ENDS[code]}" in done.stderr, done.stderr
    assert (done.returncode, "Exception ignored" in done.stderr) == (1, False), done.stderr


STARTS_PROGRAMS = """
import os, resource, signal, subprocess, sys, time, torch, mpiddp
from torch.utils.data import DataLoader
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
files = [open(os.devnull) for _ in range(1100)]
class Programs:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGUSR1)
        program = subprocess.Popen(["sleep", "1000"])
        program.send_signal([signal.SIGTERM, signal.SIGINT][index])
        ends = [program.wait(), os.waitstatus_to_exitcode(os.system("kill -TERM $$"))]
        for start in (os.fork, lambda: os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)):
            if (pid := start()) == 0:
                time.sleep(1000)
                os._exit(0)
            os.kill(pid, signal.SIGTERM)
            ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return torch.tensor(ends)
workers = DataLoader(Programs(), num_workers=1, worker_init_fn=mpiddp.init_worker)
print([ends[0].tolist() for ends in workers])
"""


def test_programs_of_a_worker_receive_signals(tmp_path):
    """`mpiddp.init_worker` in a rank with many open files."""
    done = run_command([sys.executable, script(tmp_path, STARTS_PROGRAMS)])
    assert (done.returncode, done.stdout) == (0, "[[-15, -15, -15, -15], [-2, -15, -15, -15]]\n"), (
        done.stderr
    )


WORKERS = """
import os, sys
from torch.utils.data import DataLoader
import mpiddp
if __name__ == "__main__":
    loader = DataLoader(range(9), num_workers=2, multiprocessing_context="forkserver",
        persistent_workers=True, worker_init_fn=mpiddp.init_worker)
    next(iter(loader))
    os._exit(2)
"""


def test_no_worker_of_a_forkserver_outlives_its_rank(tmp_path):
    """`mpiddp.init_worker`: they hold the rank's stdout, so its end is the end of them all."""
    done = run_command([sys.executable, script(tmp_path, WORKERS)])
    assert (done.returncode, done.stdout) == (2, "")
