"""Output: whole lines, each with its rank in front, and log files for each rank."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.programs.prints_lines import LAST_WORDS, PARTS
from tests.support.errors import error
from tests.support.installs import mpirun_of
from tests.support.machine import executable
from tests.support.place import Done, Here, Hosts, eventually, here_and_on_hosts, program
from tests.support.ranks import LAUNCH, find_mpirun
from tests.support.records import events
from tests.support.terminal import in_a_terminal

HOST = socket.gethostname()
# The defaults. Most tests of other chapters read what every rank prints, without prefixes.
SHOWN = {"MPIDDP_LOG_RANKS": "", "MPIDDP_PREFIX": ""}
TRAIN = "-m mpiddp train --use-syn --backend gloo --arch resnet20 --batch-size 4 --epochs 1"


def assert_whole(done: Done, hosts: list[str]) -> None:
    """All lines of prints_lines.py are there, whole and in order, with these hosts of its ranks."""
    for parity, text in enumerate((done.stdout, done.stderr)):
        for rank, host in enumerate(hosts):
            expected = [f"<{rank} {n} {rank} {n}>" for n in range(parity, PARTS, 2)]
            if rank == len(hosts) - 1:
                expected += [f"last words {n}" for n in range(parity, LAST_WORDS, 2)]
            lines = re.findall(rf"^\[rank {rank} {host}\] (.*)$", text, re.MULTILINE)
            assert lines == expected, text
        assert text.count("<") == len(hosts) * PARTS // 2


@pytest.mark.parametrize(
    ("place", "mpi"),
    [("here", "openmpi5"), ("hosts", "openmpi5"), ("hosts", "mpich")],
    indirect=True,
)
def test_lines_are_whole(place, mpi):
    """Lines arrive whole, with their rank in front. A killed rank loses none. Each host keeps log files."""
    logs = place.folder / "logs" if isinstance(place, Here) else Path("/run/tmp", place.folder.name)
    done_folder = place.folder / "done"
    done_folder.mkdir()
    options = (*place.where(3), "--log-ranks", "all", "--log-dir", str(logs))
    job = (program("prints_lines.py"), str(done_folder))
    done = place.run("launch", *options, *job, env=SHOWN, mpi=mpi)
    hosts = place.hosts_of(3)
    assert done.code == 1, done.stderr
    assert_whole(done, hosts)
    assert f"rank 2 on {hosts[2]} " in "".join(done.said)
    for rank, host in enumerate(hosts):
        folder = place[host].path(logs) if isinstance(place, Hosts) else logs
        text = "".join((folder / f"rank_{rank:05d}.{end}").read_text() for end in ("out", "err"))
        assert text.count(f"<{rank} ") == PARTS
        assert text.count("last words") == (LAST_WORDS if rank == 2 else 0)
        of_others = [other for other in range(3) if hosts[other] != host]
        assert not any((folder / f"rank_{other:05d}.out").exists() for other in of_others)
        here = place[hosts[0]].path(logs) if isinstance(place, Hosts) else logs
        (copy,) = here.glob(f"launch_*/rank_{rank:05d}.err")  # beside the launcher
        assert copy.read_bytes() == (folder / f"rank_{rank:05d}.err").read_bytes()
    eventually(lambda: not place.processes())


def test_lines_are_whole_under_srun(hosts, batch):
    """In a Slurm job, too, lines arrive whole, and a killed rank loses no line."""
    done_folder, errors = hosts.folder / "done", hosts.folder / "errors"
    done_folder.mkdir()
    job = ("--log-ranks", "all", program("prints_lines.py"), str(done_folder))
    text = f"#!/bin/sh\n{shlex.join([*LAUNCH, *job])} 2> {errors}\n"
    options = ("-N2", "--ntasks-per-node=1")
    ended = batch.sbatch(text, *options, cwd=hosts.folder, env=SHOWN)
    assert_whole(Done(ended.returncode, ended.stdout, errors.read_text()), ["node0", "node1"])


TALKS = """
import os, sys
os.write(1, f"out {os.environ['RANK']}\\n".encode())
os.write(2, f"err {os.environ['RANK']}\\n".encode())
"""


@pytest.mark.parametrize(
    ("options", "stdout", "stderr"),
    [
        ((), [0], [0, 1]),
        (("--log-ranks", "all"), [0, 1], [0, 1]),
        (("--log-ranks", "none"), [], []),
        (("--log-ranks", "1"), [1], [1]),
    ],
    ids=lambda value: "-".join(map(str, value)) or "default",
)
def test_whose_lines_are_shown(here, options, stdout, stderr):
    """By default, stdout of rank 0 and stderr of all ranks are shown. --log-ranks chooses others."""
    done = here.run("launch", *here.where(2), *options, here.script(TALKS), env=SHOWN).assert_ok()
    assert sorted(done.lines) == [f"[rank {rank} {HOST}] out {rank}" for rank in stdout]
    errors = sorted(line for line in done.stderr.splitlines() if "err" in line)
    assert errors == [f"[rank {rank} {HOST}] err {rank}" for rank in stderr]


IN_A_RUN = """
import sys, mpiddp, torch.distributed as dist
world = mpiddp.init(backend="gloo")
print("early", world.rank, flush=True)
mpiddp.Checkpoints("run").resume()
print("late", world.rank, file=sys.stderr, flush=True)
dist.barrier()
if world.rank == 1:
    raise RuntimeError("a bug")
"""


@pytest.mark.parametrize("option", [(), ("--log-dir", "named")], ids=["default", "--log-dir"])
def test_the_files_of_a_run(here, option):
    """The output of a script with checkpoints is kept in logs/ of its run, or in --log-dir."""
    done = here.run("launch", *here.where(2), *option, here.script(IN_A_RUN), env=SHOWN)
    assert (done.code, done.lines) == (1, [f"[rank 0 {HOST}] early 0"]), done.stderr
    logs = here.folder / "named" if option else here.folder / "run" / "logs"
    for rank in range(2):
        assert (logs / f"rank_{rank:05d}.out").read_text() == f"early {rank}\n"
        assert f"late {rank}\n" in (logs / f"rank_{rank:05d}.err").read_text()
    assert "RuntimeError: a bug\n" in (logs / "rank_00001.err").read_text()
    assert f"/{logs.name}/rank_00001.err" in done.said[-1]  # where its traceback is
    assert (here.folder / "run" / "logs").exists() != bool(option)


def test_the_files_of_a_training(here):
    """A training keeps the output of each rank in logs/ of its run. A second start appends to the files."""
    job = ("-H", "localhost:1", *TRAIN.split(), "--steps-per-epoch", "1", "--out", "run")
    first = here.run("launch", *job).assert_ok()
    file = here.folder / "run" / "logs" / "rank_00000.out"
    assert file.read_text() == first.stdout
    assert "test_accuracy" in first.stdout
    second = here.run("launch", *job, "--epochs", "2").assert_ok()
    assert file.read_text() == first.stdout + second.stdout


def test_a_log_folder_that_cannot_be_written(hosts):
    """If one host cannot write to --log-dir, the job ends with exit code 2 and one error line."""
    hosts["node1"].path("/run/tmp/only_a_file").touch()
    folder = ("--log-dir", "/run/tmp/only_a_file")
    done = hosts.run("launch", "-H", "node0:1,node1:1", *folder, program("identity.py"))
    assert done.code == 2, done.stderr
    (sentence,) = [line for line in done.stderr.splitlines() if "only_a_file" in line]
    assert re.fullmatch(error(":", f"{folder[0]} {folder[1]}: File exists"), sentence), sentence


BYTES = """
import sys
for stream in (sys.stdout, sys.stderr):
    stream.buffer.write(bytes(range(256)) * 4000)
"""
LONG_LINES = "[print(rank * 1_000_000, flush=True) for rank in '345']"


@pytest.mark.parametrize("mpi", ["openmpi5", "mpich"], indirect=True)
def test_every_byte_arrives(here, mpi):
    """All output arrives unchanged, even binary data and lines of a megabyte."""
    done = here.run("launch", "-H", "localhost:1", here.script(BYTES), mpi=mpi).assert_ok()
    data = bytes(range(256)) * 4000
    assert done.stdout.encode(errors="surrogateescape") == data
    assert done.stderr.encode(errors="surrogateescape").count(bytes(range(256))) == 4000
    done = here.run("launch", *here.where(2), here.script(LONG_LINES), mpi=mpi).assert_ok()
    assert sorted(done.lines) == [digit * 1_000_000 for digit in "334455"]


def piped(here: Here, *argv: str) -> subprocess.Popen[bytes]:
    """A launch whose output nobody reads, unless the test does."""
    pipe = subprocess.PIPE
    how = {"cwd": here.folder, "stdin": pipe, "stdout": pipe, "text": False}
    return here.popen([*LAUNCH, *argv], {}, **how)


def test_a_slow_reader(here):
    """A slow reader of the output slows the ranks down, and loses no line."""
    text = "for line in range(300_000): print(line)\nopen('done', 'w').close()"
    with piped(here, "-H", "localhost:1", here.script(text)) as job:
        assert job.stdout.readline() == b"0\n"
        time.sleep(1.0)
        assert not (here.folder / "done").exists()  # pipes hold 64 KiB each, and this is 2 MB
        rest = job.stdout.read().split()
    assert job.returncode == 0
    assert rest == [str(line).encode() for line in range(1, 300_000)]


@pytest.mark.parametrize("how", ["| head -2", ">&-"])
def test_a_reader_that_goes_away(here, how):
    """A reader that goes away, as in `| head`, or a closed stdout does not end the job."""
    script = here.script("for line in range(20_000): print('line', line, flush=True)")
    job = shlex.join([*LAUNCH, "-H", "localhost:1", script])
    done = here.run("bash", "-c", f"{job} {how}; exit ${{PIPESTATUS[0]}}").assert_ok()
    assert done.lines == (["line 0", "line 1"] if "head" in how else [])
    assert "Traceback" not in done.stderr
    assert "its reader went away" in done.stderr or how == ">&-"


def test_open_lines_and_progress_bars(here):
    """With one rank, an unfinished line appears at once, and progress bars work."""
    script = here.script("print(input('Go on? '), end='\\r1 of 2\\r2 of 2\\n')")
    with piped(here, "-H", "localhost:1", script) as job:
        assert job.stdout.read(len("Go on? ")) == b"Go on? "
        job.stdin.write(b"yes\n")
        job.stdin.close()
        assert job.stdout.read() == b"yes\r1 of 2\r2 of 2\n"


GROWS = """
import json, sys, time
json.dump({"accuracy": 0.5}, sys.stdout)
sys.stdout.flush()
time.sleep(3)  # longer than an open line waits for its end
print(end=" ", flush=True)
time.sleep(2)
sys.stdout.write("last\\r\\n")
"""


def test_a_line_that_grows_in_a_file(here):
    """In a file, a line that grows for long is written once; under MPIDDP_PREFIX=never, byte by byte."""
    job = ("launch", "--quiet", *here.where(2), here.script(GROWS, "grows.py"))
    prefixed = here.start(*job, env=SHOWN)
    plain = here.start(*job, env={**SHOWN, "MPIDDP_PREFIX": "never"}).wait().assert_ok()
    assert plain.stdout == '{"accuracy": 0.5} last\r\n'
    shown = prefixed.wait().assert_ok().stdout.replace("\r", "")
    assert shown == f'[rank 0 {HOST}] {{"accuracy": 0.5}} last\n'


def test_a_full_disk(here):
    """A job whose stdout could not be written, for a full disk, has not succeeded."""
    launch = f"{sys.executable} -m mpiddp launch {shlex.join(here.where(2))}"
    script = here.script("print('a result')", "prints.py")
    done = here.run("sh", "-c", f"{launch} {script} >/dev/full")
    sentence = "all ranks are done, but not all of their stdout could be written."
    assert (done.code, done.said[-1]) == (1, sentence), done.stderr
    done = here.run("sh", "-c", f"{launch} --dry-run {script} >/dev/full")
    assert (done.code, done.said[-1]) == (1, "stdout: No space left on device."), done.stderr


LEAVES = """
import os, subprocess, time
subprocess.Popen(["sleep", "6000"], start_new_session=True)
os.fork() or time.sleep(6000)
print("left", flush=True)
"""


@here_and_on_hosts
def test_a_process_that_a_rank_leaves(place):
    """A process that a rank leaves behind does not keep the job from ending, is named, and ends with it."""
    # It sleeps for 6000 s, and a test may take 900 s.
    done = place.run("launch", *place.where(2), place.script(LEAVES)).assert_ok()
    assert done.lines == ["left"] * 2
    said = "".join(done.said)
    assert said.count("ended what the script has left behind: pid ") == 2
    assert said.count("(a fork of the script)") == said.count("(sleep 6000)") == 2
    eventually(lambda: not place.processes())


LENDS = """
import socket, sys
with socket.socket(socket.AF_UNIX) as holder:
    holder.connect(sys.argv[1])
    socket.send_fds(holder, [b"mine"], [1, 2])
    holder.recv(1)
print("lent", flush=True)
"""


def test_a_process_outside_of_the_job_that_holds_its_streams(here):
    """A process of another job that holds a rank's stdout does not keep the job from ending."""
    with socket.socket(socket.AF_UNIX) as daemon:
        daemon.bind(str(here.folder / "daemon"))
        daemon.listen()
        job = here.start("launch", "-H", "localhost:1", here.script(LENDS), here.folder / "daemon")
        holder, _ = daemon.accept()
        _, files, _, _ = socket.recv_fds(holder, 4, 2)
        holder.sendall(b"x")
        assert job.wait().assert_ok().lines == ["lent"]
        for file in files:
            os.close(file)
        holder.close()


FORGES = """
print("\\x1b[1mbold\\u202e", flush=True)
raise ValueError("\\x1b[2J\\r\\u202emischief")
"""


def test_no_rank_forges_a_line(here):
    """A script's output is unchanged. In the launcher's own lines, no text controls the terminal."""
    job = ("-H", "localhost:1", here.script(FORGES))
    done = here.run("launch", *job)
    assert done.code == 1
    assert done.stdout == "\x1b[1mbold\u202e\n"
    own = [line for line in done.stderr.split("\n") if line.startswith("mpiddp: ")]
    assert own[-1].startswith(f"mpiddp: rank 0 on {HOST} failed first: ValueError: ")
    assert not any("\x1b" in line or "\u202e" in line for line in own)


BANNER = re.compile(r"processes exited|Primary job|exited on|^[-=]{60}", re.MULTILINE)


@pytest.mark.parametrize("mpi", ["openmpi5", "openmpi4"], indirect=True)
def test_what_mpirun_prints(here, mpi):
    """mpirun's banner about a failed rank is kept in mpirun.log of --log-dir, and shown with -v only."""
    job = (*here.where(2), program("alone.py"), "kill")
    done = here.run("launch", "--log-dir", "logs", *job, mpi=mpi)
    assert "was killed by SIGKILL. The other ranks were stopped." in done.said[-1]
    assert not BANNER.search(done.stderr), done.stderr
    (file,) = (here.folder / "logs").glob("*/mpirun.log")
    assert BANNER.search(file.read_text())
    assert BANNER.search(here.run("launch", "-v", *job, mpi=mpi).stderr)


def test_a_warning_of_mpirun_that_means_nothing(here):
    """Open MPI's warning that its ssh was fast ("setpgid … failed") is not shown."""
    warning = "[vm:00140] plm:{}: Warning: setpgid(145,145) failed in parent with errno=13"
    both = "\n".join(map(warning.format, ("ssh", "rsh")))  # of Open MPI 5 and 4
    lines = f"[ $1 = --version ] || echo '{both}\nanother' >&2"
    mpirun = executable(here.folder / "mpirun", f'{lines}\nexec {find_mpirun()} "$@"')
    done = here.run("launch", "--mpirun", mpirun, *here.where(2), "--", "true").assert_ok()
    assert done.stderr == "another\n"


def test_a_start_that_fails(here):
    """If mpirun fails to start the ranks, its message is shown, with a line that names the failure."""
    job = (*here.where(2), "--mpi-args=--no-such-option", program("identity.py"))
    done = here.run("launch", *job)
    assert (done.code, done.stdout) == (1, ""), done.stderr
    assert "no-such-option" in done.stderr
    assert "".join(done.said).count("mpirun ended with exit code ") == 1, done.stderr


FRAMES = """\
[rank1]: RuntimeError: the sizes differ
Exception raised from checkTimeout at /pytorch/ProcessGroupNCCL.cpp:607 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f2b0a6c51e6 in /venv/libc10.so)
frame #1: <unknown function> + 0xdc253 (0x7f2b64d94253 in /lib/libstdc++.so.6)
frame #2: python() [0x5a5b2c]
frame #3 is what the script prints
frame #4: clone + 0x44 (0x7f2b64d94253 in /lib/libc.so.6)
[rank1]: Exception raised from add at /pytorch/add.cpp:35 (most recent call first):
[rank1]: C++ CapturedTraceback:
[rank1]: #4 at::_ops::add_Tensor::call(at::Tensor const&) from ??:0
#5 and more from train.py:12
#6 after another line from train.py:12 and on
"""


def test_the_frames_of_an_error_of_torch(here):
    """Of an error of torch, the lines of C++ are counted and not shown. The log files keep them."""
    script = here.script(
        f"import os\nos.environ['RANK'] == '1' and os.write(2, {FRAMES.encode()!r})"
    )
    done = here.run("launch", *here.where(2), "--log-dir", "logs", script).assert_ok()
    lines = FRAMES.splitlines()
    *shown, last = done.stderr.splitlines()
    # Frames are only directly below the line that announces them.
    assert shown == [*lines[0:2], *lines[5:8], lines[11]]
    assert last.startswith("mpiddp: 6 lines of C++ were not shown.")
    assert (here.folder / "logs/rank_00001.err").read_text() == FRAMES


def test_a_log_on_a_full_disk(here):
    """A log file that cannot be written, as on a full disk, is named, and no shown line is lost."""
    (here.folder / "logs").mkdir()
    (here.folder / "logs/rank_00000.out").symlink_to("/dev/full")
    job = ("-H", "localhost:1", "--log-dir", "logs", here.script("print('shown')"))
    done = here.run("launch", *job)
    assert "shown\n" in done.assert_ok().stdout
    assert "its log of stdout has a gap: No space left" in done.stdout + done.stderr


def test_two_launches_with_one_log_folder(here):
    """A second launch with the same --log-dir overwrites nothing of the first, which has failed."""
    job = (*here.where(2), "--log-dir", "logs", program("alone.py"), "raise")
    for _ in range(2):
        assert here.run("launch", *job).code == 1
    first, second = (here.folder / "logs").glob("launch_*/attempt_1.jsonl")
    for path in (first, second):
        *_, (record, _) = events(path)
        assert record.latest["failed"]


GOES_ON = """
import sys, time
print("started", flush=True)
while True:
    print("goes on", file=sys.stderr, flush=True)
    time.sleep(0.01)
"""


def test_a_log_folder_that_hangs(here):
    """If a write to the launcher's logs hangs, the job goes on, and Ctrl-C ends it at once."""
    job = here.start("launch", *here.where(1), "--log-dir", "logs", here.script(GOES_ON))
    (file,) = eventually(lambda: [*(here.folder / "logs").glob("launch_*/rank_00000.err")])
    os.mkfifo(pipe := file.with_name("pipe"))
    pipe.rename(file)  # nobody reads it, so that an open for writing never returns
    job.until("goes on", times=job.stderr.count("goes on") + 200)
    job.signal(signal.SIGINT)
    done = job.wait()
    asked, lost, end = done.said
    assert done.code == 130
    assert asked.startswith("SIGINT: ")
    assert end.startswith("interrupted: the job was stopped.")
    assert lost.endswith("is too slow for the logs, so some of their lines are lost.")


# --- stdin ---


@pytest.mark.parametrize(
    ("mpi", "way"),
    [("openmpi5", ()), ("mpich", ()), ("openmpi5", ("--", sys.executable))],
    indirect=["mpi"],
)
def test_stdin_is_that_of_rank_0(here, mpi, way):
    """Rank 0 reads the launcher's stdin, line by line as in a conversation. Other ranks have no stdin."""
    options = ("--mpirun", mpirun_of(mpi), *here.where(2))
    job = (*options, *way, program("reads_stdin.py"))
    assert sorted(here.run("launch", *job).assert_ok().lines) == ["rank 0: end", "rank 1: end"]
    with piped(here, *job) as running:
        running.stdin.write(b"one\n")
        running.stdin.flush()
        first = sorted(running.stdout.readline() for _ in range(2))
        assert first == [b"rank 0: one\n", b"rank 1: end\n"]
        running.stdin.write(b"two\n")
        running.stdin.close()
        assert running.stdout.read() == b"rank 0: two\nrank 0: end\n"
    assert running.returncode == 0


def test_stdin_that_is_left_to_the_shell(here):
    """With --stdin none, a shell's `while read` loop gets every line of its own stdin, and rank 0 none."""
    script = here.script("import sys\nprint(repr(sys.stdin.read()))")
    launch = shlex.join([*LAUNCH, "--stdin", "none", "-H", "localhost:1", script])
    done = here.run("sh", "-c", f"while read lr; do {launch}; done", stdin="1\n2\n").assert_ok()
    assert done.lines == ["''"] * 2


@pytest.mark.parametrize(
    ("value", "ranks", "is_there"),
    [("auto", 1, False), ("always", 1, True), ("never", 2, False)],
)
def test_the_prefix(here, value, ranks, is_there):
    """MPIDDP_PREFIX writes the rank in front of each line: always, never, or if there are several ranks."""
    env = {"MPIDDP_LOG_RANKS": "0", "MPIDDP_PREFIX": value}
    done = here.run("launch", *here.where(ranks), here.script("print('a line')"), env=env)
    assert done.assert_ok().lines == [f"[rank 0 {HOST}] a line" if is_there else "a line"]


def test_timestamps(here):
    """--timestamps writes the date and the time before each line of a rank."""
    script = here.script("import os\nos.write(1, b'one\\ntwo\\n')")
    for env, prefix in ((None, ""), (SHOWN, rf"\[rank 0 {HOST}\] ")):
        done = here.run("launch", "-H", "localhost:2", "--timestamps", script, env=env).assert_ok()
        pattern = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d {prefix}(one|two)"
        assert all(re.fullmatch(pattern, line) for line in done.lines), done.stdout
        assert len(done.lines) == (2 if env else 4)


STEPS = """
import os, time, mpiddp
step = 0
while not os.path.exists("seen") and step < 30000:
    step += 1
    mpiddp.progress(step, 10**9, loss=0.5)
    time.sleep(0.01)
print("the end")
"""


def test_a_terminal_has_a_status(here):
    """On a terminal, the last line shows the step, the rate and other figures. A pipe gets no such line."""
    job = ("-H", "localhost:2", here.script(STEPS))
    with in_a_terminal(*LAUNCH, *job, cwd=here.folder, TEST_PLACE=here.mark) as shown:
        shown.until(r"step \d+/1,000,000,000 [\s\S]*loss 0\.5[\s\S]*2 ranks")
        (here.folder / "seen").touch()
        assert shown.wait() == 0, shown.shown
    assert b"the end" in shown.shown
    assert b"2 ranks" not in shown.shown.rpartition(b"\x1b[J")[2]
    done = here.run("launch", *job).assert_ok()
    assert (done.stdout, done.stderr) == ("the end\n" * 2, "")
