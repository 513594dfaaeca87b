"""As under torchrun: a script sees what it sees under python, in everything that a launcher could change."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.installs import library_of, mpirun_of
from tests.support.machine import reserved
from tests.support.place import Here, eventually, every_mpi_on_hosts, program
from tests.support.ranks import ROOT, mpirun_command
from tests.support.terminal import in_a_terminal

# Each starts a script on this machine. The module of torchrun would put the working folder first for itself.
WAYS = {
    "python": [sys.executable],
    "torchrun": [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2"],
    "mpiddp": [str(Path(sys.executable).with_name("mpiddp")), "launch", "-H", "localhost:2"],
}
# What a script says goes to a file of its rank: no launcher is in between.
SAYS = """\
import json, os
def says(**facts):
    with open("rank%s.json" % os.environ.get("RANK", 0), "a") as file:
        file.write(json.dumps(facts) + "\\n")
"""


@pytest.fixture
def folders(here: Here) -> dict[str, Path]:
    """A folder for each way, so that none sees what another has left."""
    found = {way: here.folder / way for way in WAYS}
    for folder in found.values():
        folder.mkdir()
        (folder / "saying.py").write_text(SAYS)
    return found


def ranks_of(way: str) -> range:
    return range(1 if way == "python" else 2)


def said(folder: Path, way: str) -> list[list[dict[str, Any]]]:
    """What each rank has said, in its order."""
    texts = [(folder / f"rank{rank}.json").read_text() for rank in ranks_of(way)]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def same(
    here: Here, folders: dict[str, Path], text: str, *job: str, name: str = "train.py"
) -> list[dict[str, Any]]:
    """What every rank says of this script under each of these ways, which is the same."""
    found = {}
    for way, folder in folders.items():
        (folder / name).write_text(textwrap.dedent(text))
        here.run(*WAYS[way], name, *job, cwd=folder).assert_ok()
        found[way] = said(folder, way)
    one = next(iter(found.values()))[0]
    assert found == {way: [one] * len(ranks_of(way)) for way in folders}
    return one


SIGNALLED = """
import atexit, os, signal, sys, time

def main():
    # Its lines are lost unless Python ends as it does, and nobody keeps the frame of an error.
    log = open(f"log{os.environ.get('RANK', 0)}", "w")
    atexit.register(lambda: print("atexit", file=log))
    def handle(number, frame):
        print(signal.Signals(number).name, file=log)
        raise SystemExit(0)
    if "handles" in sys.argv:
        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGHUP, handle)
    print("began", file=log)
    try:
        print("ready", flush=True)
        time.sleep(6000)
    except KeyboardInterrupt:
        print("KeyboardInterrupt", file=log)
        raise
    finally:
        print("finally", file=log)

main()
"""


@pytest.mark.parametrize(
    ("number", "options", "lines"),
    [
        (signal.SIGINT, (), ["began", "KeyboardInterrupt", "finally", "atexit"]),
        (signal.SIGTERM, (), []),
        (signal.SIGTERM, ("handles",), ["began", "SIGTERM", "finally", "atexit"]),
        (signal.SIGHUP, ("handles",), ["began", "SIGHUP", "finally", "atexit"]),
    ],
)
def test_signals(here, folders, number, options, lines):
    """Ctrl-C raises KeyboardInterrupt in every rank, and finally, atexit and buffered files come after it.

    mpiddp shows one of the tracebacks, as python does.
    """
    for way, folder in folders.items():
        if way == "torchrun" and number != signal.SIGINT:
            continue
        (folder / "train.py").write_text(SIGNALLED)
        job = here.start(*WAYS[way], "train.py", *options, cwd=folder)
        job.until("ready", times=len(ranks_of(way)))
        os.killpg(job.pid, number)  # as a terminal does
        done = job.wait()
        assert done.code != 0 or way == "python"
        is_interrupt = number == signal.SIGINT
        assert way == "torchrun" or done.stderr.count("Traceback (most") == is_interrupt, (
            done.stderr
        )
        logs = [(folder / f"log{rank}").read_text().splitlines() for rank in ranks_of(way)]
        assert logs == [lines] * len(logs), way


# --- what Python has before the first line ---


def test_what_differs(here, folders):
    """What a script finds at its first line differs from torchrun only where docs/differences.md says so."""
    found = {}
    for way, folder in folders.items():
        here.run(*WAYS[way], program("finds.py"), "found", "an argument", cwd=folder).assert_ok()
        texts = [(folder / f"found{rank}.json").read_text() for rank in ranks_of(way)]
        found[way] = json.loads(texts[-1])
    page = (ROOT / "docs/differences.md").read_text(encoding="utf-8")
    named = {*re.findall(r"^\| `([^`]+)` ", page, re.M)}
    ours, theirs = found["mpiddp"], found["torchrun"]
    assert {field for field in ours if ours[field] != theirs[field]} == named
    alone = {field for field in ours if ours[field] != found["python"][field]}
    assert alone <= named
    variables = {*ours["variables"]} ^ {*theirs["variables"]}
    listed = page + (ROOT / "docs/reference.md").read_text(encoding="utf-8")
    assert {name for name in variables if f"`{name}`" not in listed} == set()
    counts = here.script("import sys; print(len(sys.modules))")
    modules = [int(here.run(*WAYS[way], counts).stdout.split()[-1]) for way in ("python", "mpiddp")]
    most = re.search(r"up to (\d+) more modules", page)
    assert modules[1] - modules[0] <= int(most[1]), modules


SETS = 'import os\nos.putenv("A", "1")\nos.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"\n'
READS = """
from torch.distributed import get_debug_level
from saying import says
says(level=str(get_debug_level()))
"""


@pytest.mark.parametrize(
    "sets",
    [
        SETS,
        "import package.settings",
    ],
    ids=["environ", "package"],
)
def test_variables_before_torch(here, folders, sets):
    """A variable that a script, or a module of the user's, sets before it imports torch counts."""
    for folder in folders.values():
        (folder / "package").mkdir()
        (folder / "package/__init__.py").touch()
        (folder / "package/settings.py").write_text(SETS)
    compared = folders if sets is SETS else {"mpiddp": folders["mpiddp"]}
    assert same(here, compared, f"{sets}\n{READS}") == [{"level": "DebugLevel.DETAIL"}]


NAMES = ("inspect", "tokenize", "signal", "types", "copy", "json", "socket", "selectors", "queue")
IN_A_FOLDER = """
import inspect, os, sys, types
from saying import says
base = os.path.realpath(os.getcwd())
paths = [os.path.relpath(each, base) for each in sys.path if each.startswith(base)]
says(paths=paths, argv=sys.argv, file=os.path.relpath(__file__, base), name=__name__, names=sorted(vars()))
says(shadowed=[each.__file__ for each in (inspect, types) if each.__file__.startswith(base)])
"""


def test_names(here, folders):
    """A file of the user's with the name of a module of Python shadows nothing of mpiddp's or of Python's."""
    for folder in folders.values():
        for name in NAMES:
            (folder / f"{name}.py").write_text("raise RuntimeError('a file of the user')\n")
        (folder / "src").mkdir()
        (folder / "saying.py").rename(folder / "src/saying.py")
    script, shadowed = same(here, folders, IN_A_FOLDER, "--lr", "1", name="src/train.py")
    assert (script["paths"], shadowed) == (["src"], {"shadowed": []})


SPAWNS = """
import os, mpiddp
def rank():
    return os.environ["RANK"]
if __name__ == "__main__":
    print(*mpiddp.spawn(rank, hosts="localhost:2"))
"""


def test_what_mpiddp_starts_beside_such_files(here):
    """Every verb, and `mpiddp.spawn`, works in a folder whose files have the names of Python's modules."""
    for name in NAMES:
        (here.folder / f"{name}.py").write_text("raise RuntimeError('a file of the user')\n")
    (here.folder / "src").mkdir()
    (here.folder / "src/spawns.py").write_text(SPAWNS)
    assert here.run("python", "src/spawns.py").assert_ok().lines == ["0 1"]
    mpiddp = Path(sys.executable).with_name("mpiddp")
    here.run(mpiddp, "doctor", *here.where(2)).assert_ok()
    here.run(mpiddp, "bench", "allreduce", *here.where(2), "--max-size=1K").assert_ok()
    train = ("--use-syn", "--dataset=cifar10", "--arch=resnet20", "--batch-size=2")
    options = ("--epochs=1", "--steps-per-epoch=1", "--out=out")
    here.run(
        mpiddp, "launch", *here.where(1), "-m", "mpiddp", "train", *train, *options
    ).assert_ok()


# --- streams ---


STREAMS = """
import os
from saying import says
if os.environ.get("RANK", "0") == "0":
    with open("/dev/stdin") as file:
        line = file.readline()
    size = os.get_terminal_size(2) if os.isatty(2) else None
    says(isatty=[os.isatty(each) for each in range(3)], line=line, size=size)
"""


@pytest.mark.parametrize(
    ("redirected", "isatty"),
    [
        ("", [True, True, True]),
        ("> out", [True, False, True]),
        ("< typed 2> err", [False, True, False]),
        ("< typed 2>&1 | cat", [False, False, False]),
    ],
)
def test_streams(here, folders, redirected, isatty):
    """isatty() tells the truth about each stream, a terminal has its size, and /dev/stdin opens on rank 0."""
    for way in ("python", "mpiddp"):
        folder = folders[way]
        (folder / "train.py").write_text(STREAMS)
        (folder / "typed").write_text("typed\n")
        line = f"{shlex.join([*WAYS[way], 'train.py'])} {redirected}"
        with in_a_terminal("/bin/sh", "-c", line, cwd=folder, TEST_PLACE=here.mark) as job:
            job.types("typed\n")
            assert job.wait() == 0, job.shown
        (fact,) = [json.loads(each) for each in (folder / "rank0.json").read_text().splitlines()]
        size = [120, 33] if isatty[2] else None
        assert fact == {"isatty": isatty, "line": "typed\n", "size": size}, way


ASKS = """
import getpass, os, signal, time
import torch.distributed as dist
resized = []
signal.signal(signal.SIGWINCH, lambda *_: resized.append(os.get_terminal_size(1)))
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    print("got", input("name? ").upper(), getpass.getpass("secret? ")[::-1], flush=True)
    while not resized:
        time.sleep(0.01)
    print("resized", *resized[-1], flush=True)
for step in range(2):
    dist.breakpoint()
    if dist.get_rank() == 0:
        print("step", step, flush=True)
dist.destroy_process_group()
"""


def test_questions_at_a_terminal(here):
    """input(), getpass() without an echo, and torch.distributed.breakpoint() work at a terminal. The script's
    terminal follows the size of the launcher's, and the script gets SIGWINCH.
    """
    command = [*WAYS["mpiddp"], here.script(ASKS)]
    with in_a_terminal(*command, cwd=here.folder, TEST_PLACE=here.mark) as job:
        job.until(r"name\? ").types("ada\n")
        job.until(r"secret\? ").types("olleh\n")
        job.until(r"got ADA hello").resize(20, 90)
        job.until("resized 90 20").until(r"\(Pdb\) ").types("p 6 * 7\n")
        job.until(r"\b42\b").types("c\n")
        job.until(r"step 0(.|\n|\r)*\(Pdb\) ").types("c\n")
        assert job.wait() == 0, job.shown
        assert b"olleh" not in job.shown


BAR = """
import os, time
rank = os.environ["RANK"]
for number in range(4):
    os.write(2, b"\\r%s: %d of 3" % (rank.encode(), number))
    while not os.path.exists(f"seen{number}"):
        time.sleep(0.01)
os.write(2, b"\\n")
"""


def test_a_bar_through_a_pipe(here):
    """Through `| tee`, the progress bar of the lowest rank appears as it grows, behind its prefix."""
    env = {"MPIDDP_LOG_RANKS": "", "MPIDDP_PREFIX": ""}
    job = here.start(*WAYS["mpiddp"], here.script(BAR), env=env)
    for number in range(4):
        eventually(lambda: f"0: {number} of 3" in job.stderr)  # noqa: B023 - it is called here
        (here.folder / f"seen{number}").touch()
    assert job.wait().assert_ok().stderr.count("1: 3 of 3") == 1


TEE = """
import sys
class Tee:
    write, flush = sys.stderr.write, sys.stderr.flush
sys.stderr = Tee()
import mpiddp
print(mpiddp.init(backend="gloo").world_size, flush=True)
"""


def test_a_stderr_that_is_no_file(here):
    """A script may replace sys.stderr before the ranks meet, also within an mpirun of its own."""
    for command in (["python"], ["launch", *here.where(2), "--log-ranks=all"], mpirun_command(2)):
        done = here.run(*command, here.script(TEE)).assert_ok()
        assert {*done.lines} == {"1" if command == ["python"] else "2"}


# --- processes and memory ---

CHILDREN = """
import signal, subprocess
from saying import says
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        child = subprocess.Popen(["sleep", "6000"])
        child.terminate()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        return child.wait(), len(blocked), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

if __name__ == "__main__":
    for context in ("fork", "spawn"):
        for found in DataLoader(Numbers(), 4, num_workers=1, multiprocessing_context=context):
            codes, blocked, is_default = (each.tolist() for each in found)
            says(codes=codes, blocked=blocked, is_default=is_default)
    program = "trap 'echo trapped; exit 7' USR1; echo ready; while :; do sleep 0.05; done"
    for options in ({}, {"preexec_fn": lambda: None}):
        shell = subprocess.Popen(["bash", "-c", program], stdout=subprocess.PIPE, text=True, **options)
        assert shell.stdout.readline() == "ready\\n"
        shell.send_signal(signal.SIGUSR1)
        says(line=shell.stdout.readline(), code=shell.wait())
"""


def test_signals_of_children(here, folders):
    """In a DataLoader's workers, and for their children, SIGTERM is as under python. What a script starts, or
    becomes, ignores no signal.
    """
    compared = {way: folders[way] for way in ("python", "mpiddp")}
    *workers, first, second = same(here, compared, CHILDREN)
    for facts in workers:
        assert (facts["codes"], facts["blocked"]) == ([-signal.SIGTERM] * 4, [0] * 4)
    assert first == second == {"line": "trapped\n", "code": 7}


# --- torch's store ---


# A group of both ranks, whatever the script has done before.
JOINS = """
import torch, torch.distributed as dist
from saying import says
def joins(**options):
    dist.init_process_group("gloo", **options)
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    says(total=total.item())
"""
REPLACES_ITSELF = """
import os, sys
if "AGAIN" not in os.environ:
    import torch.distributed
    os.environ["AGAIN"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.argv])
"""
CHOOSES = """
import os, sys
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", sys.argv[1]
"""
MAKES_IT = """
import os
from torch._C._distributed_c10d import TCPStore
where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
make = lambda how: how(*where, size, rank == 0)
"""
WITHOUT_CHILDREN = """
import glob, os, signal
for file in glob.glob("/proc/self/task/*/children"):
    for pid in open(file).read().split():
        os.kill(int(pid), signal.SIGKILL)
try:
    while True:
        os.wait()
except ChildProcessError:
    joins()
"""
IN_A_CHILD = """
if __name__ == "__main__":
    torch.multiprocessing.spawn(work)
"""
# The first import of torch fails, after a finder of an old kind; and a variable is large.
IMPORTS_TWICE = """
import os, sys
class Old:
    def find_module(self, name, path=None):
        return None
sys.meta_path.insert(0, Old())
sys.modules["torch._C"] = None
os.environ["LARGE"] = "x" * 600_000
try:
    import torch
except ImportError:
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]
del os.environ["LARGE"]
import torch
os.environ["LARGE"] = "x" * 600_000
"""
BOTH, OURS = (
    ("torchrun", "mpiddp"),
    ("mpiddp",),
)  # the ways that run the script; torchrun where it might differ
FORMS = {
    "execs itself": (OURS, f"{REPLACES_ITSELF}{JOINS}joins()", 1),
    "starts a program": (
        OURS,
        "import subprocess, sys\n"
        "if 'child' not in sys.argv:\n"
        "    sys.exit(subprocess.run([sys.executable, *sys.argv, 'child']).returncode)"
        f"{JOINS}joins()",
        1,
    ),
    "spawns a child": (OURS, f"{JOINS}def work(index): joins()\n{IN_A_CHILD}", 1),
    "a port before torch": (OURS, f"{CHOOSES}{JOINS}joins()", 1),
    "a port after a group": (OURS, f"{JOINS}joins()\n{CHOOSES}\njoins()", 2),
    "another name of the host": (
        OURS,
        f"import os\nos.environ['MASTER_ADDR'] = 'localhost'\n{JOINS}joins()",
        1,
    ),
    "a store of its own": (
        OURS,
        f"{JOINS}{MAKES_IT}joins(store=make(dist.TCPStore), rank=rank, world_size=size)",
        1,
    ),
    "a store of its own after a group": (
        BOTH,
        f"{JOINS}{MAKES_IT}joins()\njoins(store=make(TCPStore), rank=rank, world_size=size)",
        2,
    ),
    "imports torch twice": (OURS, f"{IMPORTS_TWICE}{JOINS}joins()", 1),
    "closes all files": (OURS, f"import os{JOINS}os.closerange(3, 1 << 16)\njoins()", 1),
    "waits for all its children": (OURS, f"{JOINS}{WITHOUT_CHILDREN}", 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_group_forms(here, folders, form):
    """However a script comes to its group, the ranks meet: it replaces itself, starts the program that joins,
    chooses the port, makes the store, or ends all its children.
    """
    ways, text, groups = FORMS[form]
    with reserved("127.0.0.1") as reservation:
        for way in ways:
            (folders[way] / "train.py").write_text(text)
            port = str(reservation.getsockname()[1])
            here.run(*WAYS[way], "train.py", port, cwd=folders[way]).assert_ok()
            assert said(folders[way], way) == [[{"total": 2.0}] * groups] * 2


NAME_SERVER = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
while True:  # it answers each question for an IPv4 address with 127.0.0.9
    question, client = server.recvfrom(512)
    end = question.index(0, 12) + 5
    is_ipv4 = question[end - 4 : end - 2] == bytes([0, 1])
    head = question[:2] + bytes([0x81, 0x80, 0, 1, 0, is_ipv4, 0, 0, 0, 0]) + question[12:end]
    answer = bytes([0xC0, 12, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4, 127, 0, 0, 9])
    server.sendto(head + answer * is_ipv4, client)
"""
LOOKS_UP = """
import os, socket, sys, threading, time, torch, torch.distributed as dist
def look_up():
    names = []
    while "init_process_group" not in names:
        frame = sys._current_frames()[threading.main_thread().ident]
        names = []
        while frame := frame.f_back:
            names.append(frame.f_code.co_name)
    for _ in range(20):
        assert socket.gethostbyname("service.test") == "127.0.0.9"
        time.sleep(0.05)
    print("all found", flush=True)
    open("has_looked", "w")
if os.environ["RANK"] == "1":
    threading.Thread(target=look_up).start()
while os.environ["RANK"] == "0" and not os.path.exists("has_looked"):
    time.sleep(0.1)
dist.init_process_group("gloo")
"""


def test_names_while_a_group_forms(here):
    """A thread finds names while its rank waits in init_process_group."""
    (here.folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    server = here.script(NAME_SERVER, "server.py")
    mounts = f"ip link set lo up && mount --bind {here.folder}/resolv.conf /etc/resolv.conf"
    begins = f'{mounts} && {{ {sys.executable} {server} & exec "$@"; }}'
    alone = ["unshare", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*alone, "sh", "-c", mounts], check=False).returncode:
        pytest.skip("no network namespace of its own can be made here")
    done = here.run(*alone, "sh", "-c", begins, "-", *WAYS["mpiddp"], here.script(LOOKS_UP))
    assert done.assert_ok().lines == ["all found"], done.stderr


# --- the patches that remain ---


def test_no_patches(here):
    """MPIDDP_NO_PATCHES leaves out all that mpiddp changes in the process of a script, or what it names."""
    text = """
    import faulthandler, gc, signal, sys
    import torch
    print(gc.get_freeze_count() > 0, faulthandler.is_enabled(), sys.stdout.line_buffering,
          callable(signal.getsignal(signal.SIGUSR1)))
    """
    script = here.script(textwrap.dedent(text))

    def run(patches: str) -> str:
        env = {"MPIDDP_NO_PATCHES": patches}
        return here.run("launch", "-H", "localhost:1", script, env=env).assert_ok().stdout

    assert run("") == "True True True True\n"
    assert run("lines, stop_signal") == "True True False False\n"
    assert run("all") == "False False False False\n"


OF_MPI = """
from mpi4py import MPI
import mpiddp
world = mpiddp.init(backend="gloo")
print(MPI.COMM_WORLD.allreduce(1), MPI.COMM_WORLD.rank == world.rank)
"""


@every_mpi_on_hosts
def test_a_script_that_uses_mpi(place, mpi):
    """`from mpi4py import MPI` has the job's ranks under every MPI, in the order of torch's."""
    done = place.run("launch", *place.where(2), place.script(OF_MPI), mpi=mpi).assert_ok()
    assert done.lines == ["2 True"] * 2


OF_TORCH = """
import ctypes, os, shutil, sys
import torch.distributed.distributed_c10d as c10d
class ProcessGroupMPI:  # of a torch that is built with MPI
    @staticmethod
    def create(ranks):
        library = os.path.dirname(shutil.which("mpirun")) + "/../lib/libmpi.so.40"
        mpi, size = ctypes.CDLL(library, ctypes.RTLD_GLOBAL), ctypes.c_int()
        mpi.MPI_Init(None, None)
        mpi.MPI_Comm_size(ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")), ctypes.byref(size))
        mpi.MPI_Finalize()
        print(size.value, flush=True)
        os._exit(0)
c10d.ProcessGroupMPI, c10d.is_mpi_available = ProcessGroupMPI, lambda: True
c10d.init_process_group("mpi")
"""


def test_a_torch_that_uses_mpi(here):
    """It has the job's ranks. Under a raw mpirun, where the agents have used MPI, it is refused."""
    done = here.run(*WAYS["mpiddp"], "--log-ranks", "all", here.script(OF_TORCH))
    assert done.lines == ["2", "2"], done.stderr
    done = here.run(*mpirun_command(2, "-m", "mpiddp", "run", here.script(OF_TORCH)))
    assert (done.code != 0, done.stdout) == (True, "")
    assert "ImportError: mpiddp has finalized the MPI of this rank." in done.stderr


LIBRARY = """
import ctypes, os, shutil, sys
if "imports" in sys.argv:
    from mpi4py import MPI
else:
    library = os.path.dirname(shutil.which("mpirun")) + "/../lib/libmpi.so.40"
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL).MPI_Init(None, None)
if "joins" in sys.argv:
    import torch.distributed as dist
    dist.init_process_group("gloo")
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("argument", ["", "joins", "imports"])
def test_a_library_that_starts_mpi(here, argument):
    """A library that starts MPI without mpi4py is rank 0 of 1 in it: a line says so, with its fix."""
    done = here.run(*WAYS["mpiddp"], here.script(LIBRARY), argument).assert_ok()
    fix = "mpiddp launch, and in the script before it: from mpi4py import MPI"
    assert done.fixes == [fix] * (argument != "imports"), done.stderr
    assert (
        "libmpi.so.40) without mpi4py, so each rank is rank 0 of 1 in it." in done.stderr
    ) is bool(done.fixes)


STARTS_MPI = """
import os, subprocess, sys
if "imports" in sys.argv:
    from mpi4py import MPI
    assert MPI.COMM_WORLD.size == 2
code = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
size = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout
seen = [name for name in os.environ if name.startswith(("OMPI_", "OPAL_", "PMIX_", "PRTE_", "PMI_"))]
print(size.strip(), seen, os.environ["LD_LIBRARY_PATH"])
"""


@pytest.mark.parametrize("imports", ["", "imports"])
def test_an_mpi_program_of_a_script(here, imports):
    """A script's children see nothing of the job's MPI, even if the script uses it: theirs has one rank."""
    script, env = here.script(STARTS_MPI), {"LD_LIBRARY_PATH": "/mine"}
    done = here.run(*WAYS["mpiddp"], "--log-ranks", "all", script, imports, env=env).assert_ok()
    assert done.lines == ["1 [] /mine"] * 2


def test_a_second_start_of_mpi(here):
    """Under a raw mpirun, where the agents have used MPI, a second start may abort (`finalized_mpi`)."""
    options = ("--allow-run-as-root", "--oversubscribe", "-np", "2")
    command = [mpirun_of("openmpi4"), *options, sys.executable, "-m", "mpiddp", "run"]
    env = library_of("openmpi4") | {"MPIDDP_NO_PATCHES": "finalized_mpi"}
    done = here.run(*command, here.script(OF_MPI), env=env)
    assert (done.code != 0, done.stdout) == (True, ""), done.stderr


# --- a guest in the script's process ---

HOLDS = """\
import os
from pathlib import Path
data = bytearray(256 << 20)
for at in range(0, len(data), 4096):
    data[at] = 1
forks = []
os.register_at_fork(before=lambda: forks.append(1))
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    for each in Path("/proc").glob("[0-9]*"):
        name = (each / "comm").read_text() if (each / "comm").exists() else ""
        if name == "mpiddp-store\\n" and f"PPid:\\t{os.getppid()}\\n" in (each / "status").read_text():
            maps = (each / "smaps_rollup").read_text()
            print("private kB", sum(int(l.split()[1]) for l in maps.splitlines() if l[:8] == "Private_"))
    print("forks", len(forks), flush=True)
dist.destroy_process_group()
"""


def test_the_store_has_nothing_of_the_script(here):
    """torch's store is no fork of a script: it shares none of its memory, and calls no hook of `os.fork`."""
    private, forks = here.run("launch", *here.where(2), here.script(HOLDS)).assert_ok().lines
    assert forks == "forks 0"
    assert int(private.split()[-1]) < 200 << 10, private


OF_ITS_OWN = """\
import os, sys, tempfile, time
rank = os.environ["RANK"]
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
os.environ.pop("LOCAL_WORLD_SIZE")
import torch, torch.distributed as dist
if "group" in sys.argv:
    dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/x", rank=0, world_size=1)
parameter = torch.nn.Parameter(torch.ones(1))
optimizer, began = torch.optim.SGD([parameter]), time.monotonic()
parameter.sum().backward()
optimizer.step()
print(rank, time.monotonic() - began < 10, flush=True)
"""


@pytest.mark.parametrize("group", ["", "group"])
def test_ranks_that_train_alone(here, group):
    """Ranks of a sweep that make themselves rank 0 of 1 train, and no step waits for mpiddp."""
    done = here.run("launch", *here.where(2), here.script(OF_ITS_OWN), group).assert_ok()
    assert sorted(done.lines) == ["0 True", "1 True"]
    assert done.said == []


MEET_AGAIN = """\
import os, subprocess, sys
import torch, torch.distributed as dist
import torch.multiprocessing as mp
CHILD = '''
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(total := torch.ones(1))
print(total.item(), flush=True)
dist.destroy_process_group()
'''
def child(rank, world_size, way):
    there = dict(rank=rank, world_size=world_size)
    dist.init_process_group("gloo", **there, init_method=way)
    dist.all_reduce(total := torch.ones(1))
    assert total.item() == world_size
    dist.destroy_process_group()
if __name__ == "__main__":
    dist.init_process_group("gloo")
    dist.barrier()
    if sys.argv[1] == "later":
        dist.destroy_process_group()
    if os.environ["RANK"] == "0":
        alone = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        port = os.environ["MASTER_PORT"]
        mp.spawn(child, (2, "env://"), 2)
        mp.spawn(child, (2, f"tcp://localhost:{port}"), 2)
        subprocess.run([sys.executable, "-c", CHILD], env=alone, check=True)
        mpirun = [*sys.argv[2].split(), sys.executable, "-m", "mpiddp", "run", sys.argv[3]]
        subprocess.run(mpirun, check=True)
    if sys.argv[1] != "later":
        dist.barrier()
        dist.destroy_process_group()
"""


@pytest.mark.parametrize("when", ["beside", "later"])
def test_groups_of_a_rank_s_children(here, when):
    """Beside and after the job's group, what a rank starts meets at MASTER_PORT: by spawn, a program, an mpirun."""
    *mpirun, _ = mpirun_command(2)
    argv = [here.script(MEET_AGAIN), when, shlex.join(mpirun), program("reduces.py")]
    done = here.run("launch", *here.where(2), *argv).assert_ok()
    alone, *inner = done.lines
    assert alone == "1.0"
    assert [json.loads(line)["sum"] for line in inner] == [3, 3]


TRAINS_ELSEWHERE = """\
import multiprocessing, os, sys, time
def train():
    import mpiddp
    print("rank", mpiddp.init().rank, flush=True)

def report():
    import mpiddp
    mpiddp.progress(1, 10)
    open(f"reported{os.environ['RANK']}", "w").close()
    time.sleep(6000)

if __name__ == "__main__":
    started = multiprocessing.get_context(sys.argv[2]).Process(
        target={"worker": report, "training": train}[sys.argv[1]], daemon=True
    )
    started.start()
    if sys.argv[1] == "worker":
        while not os.path.exists(f"reported{os.environ['RANK']}"):
            time.sleep(0.05)
        train()
    else:
        started.join()
        sys.exit(started.exitcode)
"""


@pytest.mark.parametrize("how", ["fork", "spawn"])
@pytest.mark.parametrize("what", ["worker", "training"])
def test_the_process_that_trains(here, what, how):
    """A training may run in a child of the script. A worker that only reports takes nobody's place."""
    job = (*here.where(2), here.script(TRAINS_ELSEWHERE), what, how)
    done = here.run("launch", *job, cwd=here.folder).assert_ok()
    assert sorted(done.lines) == ["rank 0", "rank 1"]
    assert done.said == []


ONE_REPORTS = """\
import os
if os.environ["RANK"] == "0":
    import mpiddp
    mpiddp.progress(1, 10)
raise ValueError("3 classes")
"""


def test_one_register_of_failures(here):
    """Ranks that fail alike show one traceback, also if only some of them use mpiddp."""
    done = here.run("launch", *here.where(2), here.script(ONE_REPORTS)).assert_code(1)
    assert done.stderr.count("ValueError: 3 classes\n") == 1


def test_modules_of_the_user_s_folder(here):
    """A module beside the script with a name of Python's own is imported by the script alone, whatever mpiddp uses."""
    names = ("resource", "numbers", "traceback", "linecache", "shutil")
    for name in names:
        file = here.folder / f"{name}.py"
        file.write_text("import os\nmine = True\nos.write(1, f'imported {__name__}\\n'.encode())\n")
    fails = here.script("raise ValueError('its own')")
    done = here.run("launch", *here.where(2), fails, cwd=here.folder).assert_code(1)
    assert "imported" not in done.stdout
    assert "ValueError: its own" in done.stderr
    uses = "import sys\nfor name in sys.argv[1:]:\n    assert __import__(name).mine\n"
    done = here.run(
        "launch", *here.where(1), here.script(uses), *names, cwd=here.folder
    ).assert_ok()
    assert done.lines == [f"imported {name}" for name in names]
    fails = here.script("import linecache\nraise ValueError('its own')")
    done = here.run("launch", *here.where(2), fails, cwd=here.folder).assert_code(1)
    assert "ValueError: its own" in done.stderr


ENDS_THE_STORE = """\
import os, signal, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 0:
    for each in Path("/proc").glob("[0-9]*"):
        status = (each / "status").read_text() if (each / "status").exists() else ""
        if "Name:\\tmpiddp-store\\n" in status and f"PPid:\\t{os.getppid()}\\n" in status:
            os.kill(int(each.name), signal.SIGKILL)
            while each.exists():
                time.sleep(0.01)
dist.barrier()
print("trained", flush=True)
"""


def test_a_store_that_is_killed(here):
    """If the process of torch's store is killed, the group goes on, and a line says that no other one can form."""
    done = here.run("launch", *here.where(2), here.script(ENDS_THE_STORE)).assert_ok()
    assert done.lines == ["trained"] * 2
    (said,) = done.said
    assert said.endswith("torch's store has ended, so no process group can form any more.")


def test_an_error_of_a_script_with_a_path_of_its_own(here):
    """Whatever a script puts on sys.path, its own error is shown."""
    text = "import sys\nfrom pathlib import Path\nsys.path.insert(0, Path('lib'))\nimport absent_module"
    done = here.run("launch", *here.where(1), here.script(text)).assert_code(1)
    assert "ModuleNotFoundError: No module named 'absent_module'" in done.stderr
