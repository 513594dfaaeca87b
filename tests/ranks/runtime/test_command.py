"""Any command as a rank: its variables, stdin, end and signals, and the scripts within it.

Tests mpiddp/runtime/start/command.py.
python -m pytest tests/ranks/runtime/test_command.py
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from socket import gethostname

import pytest

from mpiddp.hosts.probe import with_own_folder
from mpiddp.protocol.messages import OUTPUT_PROCESS
from mpiddp.protocol.variables import ANNOUNCED, ERROR_FILE, MAX_RESTARTS, NETWORKS, RUN_DIR
from mpiddp.world import TORCH
from tests.support.errors import error
from tests.support.mpis import PACKAGES, library_of, mpirun_of
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ALL_OUTPUT, LAUNCH, ROOT, clean_env, launch, mpiddp, mpirun, script
from tests.support.running import descendants
from tests.support.stopping import LONG_GRACE, SCRIPT, piped, start

MPIS = ("openmpi5", *PACKAGES)
TWO = ("-H", "localhost:2")
OTHERS = "The other ranks were stopped."
OF_MPI = r"^(OMPI|OPAL|PMIX|PMI|PRTE|HYDI|HYDRA|MPI_LOCAL|I_MPI)\w*"
Done = subprocess.CompletedProcess[str]


def python(folder: Path, text: str, *arguments: str) -> str:
    """A line for a shell: a script with this text, as the last process of a wrapper."""
    return shlex.join([sys.executable, script(folder, text), *arguments])


def launch_with(stdin: str, *arguments: str) -> Done:
    return subprocess.run(
        [*LAUNCH, *arguments],
        env=clean_env(),
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


# --- under every MPI ---


@pytest.mark.parametrize("mpi", MPIS)
def test_variables_and_stdin(mpi: str) -> None:
    """torchrun's variables and none of the MPI's. Only rank 0 has stdin, to its end."""
    command = "line=$(cat); echo \"$RANK $WORLD_SIZE $LOCAL_RANK '$line'\"; env"
    options = ["--mpirun", mpirun_of(mpi), *TWO]
    done = launch_with("from stdin\n", *options, "--", "sh", "-c", command)
    assert done.returncode == 0, done.stderr
    facts = re.findall(r"^\d \d \d '.*'", done.stdout, re.MULTILINE)
    assert sorted(facts) == ["0 2 0 'from stdin'", "1 2 1 ''"]
    assert re.findall(OF_MPI, done.stdout, re.MULTILINE) == []


SUMS = """
import mpiddp, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"sum {total.item():g} {mpiddp.should_stop()}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("way", ["launch", "mpirun"])
def test_a_command_may_be_a_verb_of_mpiddp(way: str, tmp_path: Path) -> None:
    """`mpiddp run` within a command joins the rank's job, and reports as the rank's script."""
    verb = [sys.executable, "-m", "mpiddp", "run", script(tmp_path, SUMS)]
    done = (
        launch(*TWO, "--", *verb)
        if way == "launch"
        else mpirun(2, "-m", "mpiddp", "run", "--", *verb)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2 False") == 2, done.stdout


def test_a_training_may_be_the_command_of_a_rank(tmp_path: Path) -> None:
    sizes = ["--use-syn", "--arch", "resnet20", "--batch-size", "2", "--epochs", "1"]
    steps = ["--steps-per-epoch", "2", "--out", str(tmp_path)]
    train = [sys.executable, "-m", "mpiddp", "train", *sizes, *steps]
    done = launch(*TWO, "--", *train)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "checkpoints/step_00000002/COMPLETE").exists()


OF_RANKS = ("MPIDDP_", "TORCHELASTIC_", "MASTER_", "ROLE_", "GROUP_", "GLOO_", "NCCL_")


# They are for the rank, or for the launcher; the path of the error file is one of the host.
NOT_FOR_THE_SCRIPT = {NETWORKS, MAX_RESTARTS, ERROR_FILE, *ALL_OUTPUT}


def test_the_page_on_containers_names_what_a_command_gets() -> None:
    """Docker and Enroot pass on no variable that is not named."""
    named = set(re.findall(r"-e (\w+)", (ROOT / "docs" / "containers.md").read_text()))
    done = launch("-n", "1", "--", "env")
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(\w+)=", done.stdout, re.MULTILINE)
    ours = {name for name in found if name.startswith(OF_RANKS) or name in TORCH}
    assert ours - named <= NOT_FOR_THE_SCRIPT
    assert {ANNOUNCED, RUN_DIR, "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} <= named


def sleep(seconds: int) -> str:
    """A command that no other run of the tests on this machine has."""
    return f"sleep {seconds}.{os.getpid():08}"


# Rank 1 fails while rank 0 would sleep; rank 0's processes are in two process groups.
FAILS = f"if [ $RANK = 0 ]; then setsid {sleep(1005)} & {sleep(1006)}; fi; sleep 1; {{}}"


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("exit 3", "ended first, with exit code 3"),
        ("kill -SEGV $$", "was killed by SIGSEGV"),
    ],
)
def test_the_end_of_one_command_ends_the_job(mpi: str, end: str, reason: str) -> None:
    command = [*LAUNCH, "--mpirun", mpirun_of(mpi), *TWO, "--", "bash", "-c", FAILS.format(end)]
    with piped(command) as job:
        stderr = job.communicate(timeout=PATIENCE_S)[1]
    assert job.returncode == 1, stderr
    assert f"mpiddp: rank 1 on {gethostname()} {reason}. {OTHERS}\n" in stderr
    assert running(sleep(1005), sleep(1006)) == []


def running(*commands: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_text().replace("\0", " ").strip()
        except OSError:
            continue
        found += [command] if command in commands else []
    return found


@pytest.mark.parametrize("mpi", MPIS)
def test_a_stop_request_is_one_sigterm(tmp_path: Path, mpi: str) -> None:
    """The end of rank 1, which does not save, leaves rank 0 the time that its save takes."""
    text = (
        'if [ $RANK = 0 ]; then trap "echo TERM; sleep 4; echo saved; exit 75" TERM; fi; '
        "echo ready; while :; do sleep 0.1; done"
    )
    options = ["--mpirun", mpirun_of(mpi), *LONG_GRACE, *TWO]
    with start([*LAUNCH, *options, "--", "bash", "-c", text]) as job:
        job.send_signal(signal.SIGTERM)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 75, stderr
    assert stdout == "TERM\nsaved\n"
    assert "mpiddp: to resume: mpiddp launch " in stderr


# --- on its own ---


@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        (["sh", "-c", "exit 0"], 0, ""),
        (["sh", "-c", "exit 3"], 3, "ended with exit code 3\n"),
        (
            ["sh", "-c", "kill -KILL $$"],
            137,
            "was killed by SIGKILL\n",
        ),
        (["sh", "-c", "exit 143"], 143, "ended with exit code 143\n"),
    ],
)
def test_a_raw_run_returns_the_commands_code(command: list[str], code: int, error: str) -> None:
    done = mpiddp("run", "--", *command)
    expected = f"rank 0 on {gethostname()} {error}" if error else ""
    assert (done.returncode, done.stdout, done.stderr) == (code, "", expected)


OPEN_MPI = ("--allow-run-as-root", "--bind-to", "none", "--oversubscribe")


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        ("exit 7", 7, "ended with exit code 7"),
        ("kill -SEGV $$", 139, "was killed by SIGSEGV"),
    ],
)
def test_a_raw_mpirun_returns_the_commands_code(mpi: str, end: str, code: int, reason: str) -> None:
    program = Path(mpirun_of(mpi))
    flags = OPEN_MPI if "openmpi" in mpi else ()
    command = ["sh", "-c", f"[ $RANK = 0 ] && {sleep(1000)}; {end}"]
    done = subprocess.run(
        [program, *flags, "-np", "2", sys.executable, "-m", "mpiddp", "run", "--", *command],
        env=with_own_folder(program, clean_env(library_of(mpi))),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == code, done.stderr
    assert f"rank 1 on {gethostname()} {reason}\n" in done.stderr
    assert running(sleep(1000)) == []


WRAPPERS = {
    "env": ["env", "ADDED=1"],
    "nice": ["nice", "-n", "1"],
    "timeout": ["timeout", "600"],
    "stdbuf": ["stdbuf", "-oL"],
    "taskset": ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))],
    "setsid": ["setsid", "--wait"],
    "sh": ["sh", "-c", '"$0" "$@"'],
    "bash": ["bash", "-c", '"$@"; exit $?', "bash"],
    "numactl": ["numactl", "--cpunodebind=0"],
    "strace": ["strace", "-f", "-o", "/dev/null"],
    "python": [
        *(sys.executable, "-c"),
        "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))",
    ],
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper(name: str) -> None:
    command = ["sh", "-c", "echo $RANK of $WORLD_SIZE; exit $RANK"]
    wrapper = WRAPPERS[name]
    is_there = shutil.which(wrapper[0]) is not None
    if (
        not is_there
        or subprocess.run(
            [*wrapper, "true"], stderr=subprocess.DEVNULL, timeout=PATIENCE_S
        ).returncode
    ):
        pytest.skip(f"{name} does not run here")
    done = launch(*TWO, "--", *wrapper, *command)
    assert sorted(done.stdout.split("\n")) == ["", "0 of 2", "1 of 2"], done.stderr
    assert f"rank 1 on {gethostname()} ended first, with exit code 1. {OTHERS}" in done.stderr


def test_a_wrapper_script(tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text('#!/bin/sh\nexport ADDED=1\nexec "$@"\n')
    wrapper.chmod(0o755)
    done = launch(*TWO, "--", str(wrapper), "sh", "-c", "echo $ADDED $RANK")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "1 0", "1 1"]


def test_a_killed_rank_leaves_no_process() -> None:
    """SIGKILL to the process around the command, of which nothing else of the job knows."""
    text = f"echo ready; trap '' TERM; setsid {sleep(1007)} & {sleep(1008)}; {sleep(1009)}"
    with start([*LAUNCH, *TWO, "--", "bash", "-c", text]) as job:
        pids = descendants(job.pid)
        rank = next(pid for pid in pids if parent_of(pid) not in pids or is_rank(pid))
        os.kill(rank, signal.SIGKILL)
        stderr = job.communicate(timeout=PATIENCE_S)[1]
    assert job.returncode == 1, stderr
    assert "was killed by SIGKILL" in stderr
    assert running(*map(sleep, (1007, 1008, 1009))) == []


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_rank(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return command[1:4] == ["-m", "mpiddp", "run"]


def test_sigterm_to_every_process_arrives_once() -> None:
    text = "trap 'echo TERM' TERM; trap 'exit 0' USR2; echo ready; while :; do sleep 0.05; done"
    with start([*LAUNCH, *LONG_GRACE, *TWO, "--", "bash", "-c", text]) as job:
        pids = [job.pid, *descendants(job.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        assert job.stdout is not None
        assert [job.stdout.readline() for _ in range(2)] == ["TERM\n"] * 2
        time.sleep(1.0)  # a second one would come by now
        for pid in pids:
            if Path(f"/proc/{pid}/comm").exists() and name_of(pid) == "bash":
                os.kill(pid, signal.SIGUSR2)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert stdout == "", stderr


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_ranks_of_a_command_do_without_torch() -> None:
    """Only the process that serves torch's store for the commands imports it."""
    text = "echo ready; read line"
    with start([*LAUNCH, *TWO, "--", "sh", "-c", f"{text}; sleep 1010"]) as job:
        ranks = [pid for pid in descendants(job.pid) if is_rank(pid)]
        ranks = [pid for pid in ranks if name_of(pid) != OUTPUT_PROCESS]
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in ranks]
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=PATIENCE_S)
    assert len(ranks) == 4  # each with its guardian
    assert not any("libtorch" in each for each in maps)


# --- scripts within a command ---

PLAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print(f"{dist.get_rank()} of {dist.get_world_size()}: {total.item()}\\n", end="", flush=True)
dist.destroy_process_group()
"""
INIT = """
import os, sys, mpiddp, torch, torch.distributed as dist
world = mpiddp.init(backend="gloo")
total = torch.tensor([world.rank + 1])
dist.all_reduce(total)
assert "MPIDDP_CONTROL" not in os.environ
print(f"{world.rank} of {world.world_size}: {total.item()}\\n", end="", flush=True)
"""


@pytest.mark.parametrize(("text", "mpi"), [(PLAIN, mpi) for mpi in MPIS] + [(INIT, "openmpi5")])
def test_a_process_group(tmp_path: Path, text: str, mpi: str) -> None:
    command = shlex.split(python(tmp_path, text))
    done = launch("--mpirun", mpirun_of(mpi), *TWO, "--", *command)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 2: 3", "1 of 2: 3"]


def test_under_a_raw_mpirun_too(tmp_path: Path) -> None:
    command = shlex.split(python(tmp_path, INIT))
    done = mpirun(2, "-m", "mpiddp", "run", "--", *command)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 2: 3", "1 of 2: 3"]


def test_several_scripts_one_after_the_other(tmp_path: Path) -> None:
    line = python(tmp_path, INIT)
    done = launch(*TWO, "--", "bash", "-c", f"{line} && {line}")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 2: 3"] * 2 + ["1 of 2: 3"] * 2


def test_a_torchrun_inside_wins(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    done = launch("-n", "1", "--", *torchrun, script(tmp_path, INIT.replace("assert", "#")))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 of 2: 3", "1 of 2: 3"]


@pytest.mark.parametrize(
    ("before", "mpi"),
    [
        ("", "openmpi5"),
        ('import torch.distributed as dist; dist.init_process_group("gloo")\n', "openmpi5"),
        ('import mpiddp; mpiddp.init(backend="gloo")\n', "mpich"),
    ],
)
def test_scripts_stop_at_the_same_step(tmp_path: Path, before: str, mpi: str) -> None:
    """The wrapper gets no signal, and returns the script's code."""
    line = python(tmp_path, before + SCRIPT)
    command = [*LAUNCH, "--mpirun", mpirun_of(mpi), *LONG_GRACE, *TWO, "--"]
    with start([*command, "bash", "-c", f"{line}; code=$?; exit $code"]) as job:
        job.send_signal(signal.SIGTERM)
        stdout, stderr = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 75, stderr
    saved = stdout.split()
    assert len(saved) == 4, stdout
    assert len(set(saved)) == 2, stdout


RAISES = """
import os, sys, mpiddp
world = mpiddp.init(backend="gloo")
if world.rank == 1 and not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    raise RuntimeError("a bug")
import time; time.sleep(1000)
"""


def test_the_verdict_has_the_scripts_error(tmp_path: Path) -> None:
    line = python(tmp_path, RAISES, str(tmp_path / "raised"))
    done = launch(*TWO, "--", "bash", "-c", f"{line}; exit $?")
    assert done.returncode == 1, done.stderr
    verdict = f"mpiddp: rank 1 on {gethostname()} failed first: RuntimeError: a bug. {OTHERS}\n"
    assert done.stderr.endswith(verdict)


def test_a_wrapper_may_start_a_failed_script_again(tmp_path: Path) -> None:
    text = """
import os, sys, mpiddp
mpiddp.should_stop()
if not os.path.exists(sys.argv[1]):
    open(sys.argv[1], "w").close()
    raise RuntimeError("a bug")
"""
    line = python(tmp_path, text, str(tmp_path / "raised"))
    done = launch("-n", "1", "--", "bash", "-c", f"{line} || {line}")
    assert done.returncode == 0, done.stderr
    assert "RuntimeError: a bug" in done.stderr


HANGS = """
import os, time, mpiddp
for step in range(10**6):
    mpiddp.should_stop()
    if os.environ["RANK"] == "1" and step == 5:
        time.sleep(1000)  # here it hangs
    time.sleep(0.01 if step < 9 else 1000)
"""


def test_a_hang_report_has_the_scripts_stack(tmp_path: Path) -> None:
    line = python(tmp_path, HANGS)
    done = launch(*TWO, "--hang-timeout", "3", "--", "bash", "-c", f"{line}; exit $?")
    assert done.returncode == 1
    assert "rank 1 on" in done.stderr
    assert "time.sleep(1000)  # here it hangs" in done.stderr
    assert "mpiddp: the job hung and was stopped.\n" in done.stderr


def test_a_command_without_steps_cannot_be_watched() -> None:
    done = launch("-n", "1", "--hang-timeout", "1", "--", "sleep", "3")
    assert done.returncode == 0
    assert (
        "mpiddp: no rank has made a step in 1 s. --hang-timeout watches a command only if its script "
        "calls mpiddp.should_stop() in every step.\n"
    ) in done.stderr


def test_a_restart_appends_what_the_script_announced(tmp_path: Path) -> None:
    text = """
import sys, mpiddp
mpiddp.announce(resume_args=["--resume", "last"])
print(sys.argv[1:], flush=True)
sys.exit(0 if "--resume" in sys.argv else 3)
"""
    command = shlex.split(python(tmp_path, text, "--lr", "1"))
    done = launch("-n", "1", "--max-restarts", "1", "--", "env", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--lr', '1']\n['--lr', '1', '--resume', 'last']\n"


# --- bad input ---


def run_raw(*arguments: str) -> Done:
    return mpiddp("run", *arguments)


@pytest.mark.parametrize(
    ("arguments", "id", "values"),
    [
        (["--"], "command follows", ["mpiddp run: ", "mpiddp run --help"]),
        (["--", "no-such-program"], "program on", ['"no-such-program" ']),
        (["--", "/nowhere/program"], ":", ["/nowhere/program: No such file or directory"]),
        (["--", "/"], "not a program", ["/ "]),
        (["--", "{}/data"], "not a program", ["{}/data ", "chmod +x"]),
        (
            ["--", "{}/no_shebang"],
            "be started",
            ["{}/no_shebang ", "Exec format error", "#!/bin/sh"],
        ),
    ],
)
def test_a_wrong_command(
    tmp_path: Path, arguments: Sequence[str], id: str, values: Sequence[str]
) -> None:
    (tmp_path / "data").touch(0o644)
    (tmp_path / "no_shebang").write_text("echo hi\n")
    (tmp_path / "no_shebang").chmod(0o755)
    done = run_raw(*[each.format(tmp_path) for each in arguments])
    assert (done.returncode, done.stdout) == (2, "")
    sentence = error(id, *[each.format(tmp_path) for each in values])
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr


def test_a_command_that_is_being_copied_is_no_bad_input(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    with program.open("a"):
        done = run_raw("--", str(program))
    assert (done.returncode, done.stdout) == (1, "")
    sentence = error("be started", f"{program} ", "Text file busy")
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr


def test_a_launch_of_a_missing_command_starts_nothing() -> None:
    done = launch(*TWO, "--", "no-such-program")
    assert done.returncode == 2
    sentence = error("program on", '"no-such-program" ')
    assert re.fullmatch(f"{sentence}\n", done.stderr), done.stderr


def test_a_command_that_is_missing_for_one_rank(tmp_path: Path) -> None:
    """It is there when the launcher looks, and rank 0 must not run alone."""
    (tmp_path / "program").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "program").chmod(0o755)
    text = (
        "import os, sys\n"
        "if os.environ['OMPI_COMM_WORLD_RANK'] == '1': os.environ['PATH'] = '/nowhere'\n"
        "sys.argv = ['mpiddp', 'run', '--', 'program']\n"
        "import runpy; runpy.run_module('mpiddp', run_name='__main__', alter_sys=True)\n"
    )
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = mpirun(2, script(tmp_path, text), env=env)
    assert done.returncode == 2
    sentence = error("program on", f'rank 1 on {gethostname()}: "program" ')
    assert re.match(f"{sentence}\n", done.stderr), done.stderr


def test_a_command_that_fails_at_once_on_all_ranks() -> None:
    done = launch(*TWO, "--", "false")
    assert done.returncode == 1
    named = rf"mpiddp: rank [01] on {gethostname()} ended first, with exit code 1\. {OTHERS}\n"
    assert re.search(named, done.stderr)
