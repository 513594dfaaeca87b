"""Jobs that outlive a terminal, and what programs learn of one: --detach, logs, wait, --report, --on-end."""

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.support.machine import executable
from tests.support.patience import eventually
from tests.support.place import Here, program
from tests.support.ranks import find_mpirun
from tests.support.terminal import in_a_terminal

# Each rank prints its line, waits for the file "go", and ends with the code of its argument.
WAITS = """
import os, pathlib, sys, time
print("step 1 of", os.environ["WORLD_SIZE"], flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.02)
print("step 2", flush=True)
sys.exit(int(sys.argv[1]) if os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture(autouse=True)
def state_folder(here, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(here.folder / "state"))


def script_of(here: Here) -> str:
    """A name of this test alone: jobs of other tests run at the same time."""
    return f"t{here.mark[:8]}.py"


def detached(here: Here, *options: str, code: int = 0) -> str:
    """A detached job of two ranks, which wait. Its name."""
    script = [here.script(WAITS, script_of(here)), str(code)]
    done = here.run("launch", "--detach", *options, *here.where(2), *script).assert_ok()
    (name,) = done.lines
    follow = f"To follow its output: mpiddp logs -f {name}"
    assert done.said == [f"the job goes on in the background. {follow}"]
    return name


def test_a_job_outlives_its_terminal_and_its_shell(here):
    """A detached job goes on after the hang-up of its terminal and a kill -9 of its shell."""
    script = here.script(WAITS, script_of(here))
    launch = [sys.executable, "-m", "mpiddp", "launch", "--detach", *here.where(2), script, "0"]
    line = f"{shlex.join(launch)}; echo ready; kill -9 $$"
    with in_a_terminal("/bin/sh", "-c", line, cwd=here.folder, TEST_PLACE=here.mark) as shell:
        assert shell.wait() == -signal.SIGKILL
    name = shell.shown.decode().split("\r\n")[0]
    assert name == script_of(here).replace(".py", "-1")

    view = here.start("logs", "-f", name).until("step 1 of 2")
    (line,) = [line for line in here.run("ps").lines if name in line]
    pid = int(line.split()[0])
    assert os.getsid(pid) == pid
    (here.folder / "go").touch()
    done = view.wait().assert_ok()
    assert done.lines[-1].endswith("step 2")
    ended = here.run("wait", name).assert_ok()
    assert ended.lines == [f"job {name} has ended with code 0."]
    assert here.run("logs", name).assert_ok().stdout == done.stdout
    record = report(here, name).with_name("attempt_1.jsonl")
    assert record.read_text().startswith('{"kind": "began"')
    eventually(lambda: not here.processes())


def test_a_job_outlives_an_ssh_login(hosts):
    """A login over ssh that starts a detached job on two hosts ends at once, and the next one follows it."""
    script = hosts.script(WAITS, "remote.py")
    there = f"cd {shlex.quote(str(hosts.folder))} && XDG_STATE_HOME=$PWD/state"
    mpiddp = f"{there} {sys.executable} -m mpiddp"
    launch = f"{mpiddp} launch --detach -H node1:1,node0:1 {script} 0"
    assert hosts.run("ssh", "node1", launch).assert_ok().lines == ["remote-1"]
    view = hosts.start("ssh", "node1", f"{mpiddp} logs -f").until("step 1 of 2")
    (hosts.folder / "go").touch()
    assert view.wait().assert_ok().lines[-1].endswith("step 2")
    # The folder is shared, so the other host has the outcome, too.
    ended = hosts.run("sh", "-c", f"{mpiddp} wait")
    assert (ended.code, ended.lines) == (0, ["job remote-1 has ended with code 0."])


def test_wait_has_the_exit_code_of_the_job(here):
    """`mpiddp wait` ends with the job and has its code; `stop`, `top` and `logs` know how it ended."""
    name = detached(here, code=3)
    waiting = here.start("wait", name)
    view = f"{sys.executable} -m mpiddp logs -f {name} | grep -m1 'step 1 of 2'"
    with in_a_terminal("/bin/sh", "-c", view, cwd=here.folder) as shell:
        assert shell.wait() == 0  # although the job prints nothing more
    assert waiting.process.poll() is None
    (here.folder / "go").touch()
    first = f"rank 1 on {here.hosts[0]} ended first, with exit code 3."
    ended = f"job {name} has ended with code 1: {first} The other ranks were stopped."
    assert (waiting.wait().code, waiting.stdout) == (1, f"{ended}\n")
    for verb in ("stop", "top", "wait"):
        assert here.run(verb, name).stdout == f"{ended}\n"
    assert "step 2" in here.run("logs").assert_ok().stdout
    again = detached(here)
    assert again == name[:-1] + "2"
    assert here.run("wait").assert_ok().stdout == f"job {again} has ended with code 0.\n"
    usage = here.script("import sys; print('usage: …', file=sys.stderr); sys.exit(2)")
    (usage,) = here.run("launch", "--detach", *here.where(1), usage).assert_ok().lines
    ended = f"job {usage} has ended with code 2: see mpiddp logs {usage}\n"
    assert here.run("wait", usage).assert_code(2).stdout == ended


def test_the_command_of_on_end_still_runs(here):
    """While the command of `--on-end` runs, `stop` and `top` say that the job ends now."""
    wait = here.script("import os, sys\nwhile not os.path.exists('go'): pass", "wait for go.py")
    name = detached(here, "--on-end", shlex.join([sys.executable, wait]), code=3)
    assert here.run("stop", name).assert_ok()
    eventually(lambda: json.loads(report(here, name).read_text())["exit_code"])
    for verb in ("stop", "top", "stacks"):
        done = here.run(verb, name)
        assert (done.code, done.stderr) == (2, f"mpiddp: job {name} starts or ends now.\n")
    (here.folder / "go").touch()
    assert here.run("wait", name).code == 130


def test_ctrl_c_ends_the_view_and_not_the_job(here):
    """Ctrl-C in `mpiddp logs -f` and `wait` says that the job goes on, and it does.

    `mpiddp ps --json` lists the job and its ranks. After a kill of its launcher, `wait` says so, and fails.
    """
    name = detached(here)
    views = [here.start("logs", "-f", name).until("step 1 of 2")]
    kind, version, jobs = json.loads(here.run("ps", "--json").stdout).values()
    assert (kind, version) == ("ps", 1)
    (job,) = [job for job in jobs if job["name"] == name]
    assert (job["phase"], job["attempt"], len(job["ranks"])) == ("running", 1, 2)
    views.append(here.start("wait", name))
    waits = re.compile(rf"-> .* {views[1].pid} ")  # for the lock of the job
    eventually(lambda: waits.search(Path("/proc/locks").read_text(encoding="utf-8")))
    sentence = f"mpiddp: job {name} goes on. To stop it: mpiddp stop {name}\n"
    for view in views:
        view.signal(signal.SIGINT)
        done = view.wait()
        assert (done.code, done.stderr) == (130, sentence)
    os.kill(json.loads(report(here, name).read_text())["pid"], signal.SIGKILL)
    killed = "its launcher was killed, its machine stopped, or its disk is full."
    for broken in (None, "[]", '{"exit'):
        if broken:
            report(here, name).write_text(broken)
        done = here.run("wait", name)
        assert (done.code, done.lines) == (1, [f"job {name} has ended without a report: {killed}"])
    eventually(lambda: not here.processes())


def test_the_log_is_bounded(here):
    """The log of a detached job keeps its newest 32 to 64 MB, and what comes in a second."""
    line = r"head -c 20000000 /dev/zero | tr '\0' x; echo"
    floods = f"for _ in 1 2 3 4 5 6; do {line}; sleep 1.5; done; echo the end"
    here.run("launch", "--detach", "-H", "localhost:1", "--", "sh", "-c", floods).assert_ok()
    here.run("wait").assert_ok()
    parts = [*report(here, "sh-1").parent.glob("log-*")]
    assert 32e6 <= sum(part.stat().st_size for part in parts) <= (64 << 20) + 20e6
    assert here.run("logs").assert_ok().lines[-1] == "the end"


def report(here: Here, name: str) -> Path:
    return here.folder / "state" / "mpiddp" / "jobs" / name / "report.json"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--report", "none/r.json"], "--report: cannot write none/r.json: No such file"),
        (["--on-end", "no-such-program now"], "--on-end: no-such-program is not a program."),
        (["--report", "."], "--report: cannot write .: Is a directory."),
        (["--report", "pipe"], "--report: cannot write pipe: Invalid argument."),
        # A file here, which a rename would replace with all that is printed later.
        (["--report", "/dev/stdout"], "--report: cannot write /dev/stdout: Invalid argument."),
        (["--on-end", "'"], "--on-end: ': no closing quotation."),
        (["-H", "misspelt.invalid:1"], "misspelt.invalid: cannot be resolved"),
    ],
)
def test_a_wrong_option_starts_nothing(here, options, text):
    """A report that cannot be written, or a command that is no program, is refused before the start.

    So is a misspelt host: at the terminal, also of a detached job, which leaves no folder.
    """
    os.mkfifo(here.folder / "pipe")  # in the place of /dev/null, which a rename would replace
    for detach in ([], ["--detach"]):
        job = ("-n", "1", here.script("print('ran')"))
        done = here.run("launch", *detach, *options, *job)
        assert (done.code, done.stdout) == (2, "")
        assert text in done.stderr
        assert not [*here.folder.glob("state/mpiddp/jobs/*")]


def test_an_mpirun_that_does_not_start(here):
    """`--detach` returns once mpirun has started; until then, what fails is said at the terminal."""
    mpirun = executable(here.folder / "mpirun", 'echo "mpirun (Open MPI) 5.0.11"; rm -f "$0"')
    job = ("--mpirun", mpirun, "-n", "1", here.script("print('ran')"))
    done = here.run("launch", "--detach", *job).assert_code(2)
    assert (done.stdout, done.said[-1]) == (
        "",
        f"cannot start {mpirun}: No such file or directory.",
    )
    assert not [*here.folder.glob("state/mpiddp/jobs/*")]


def test_a_terminal_that_ends_before_the_start(here):
    """A detached job goes on if the process of its terminal is killed during the checks, before mpirun starts."""
    text = f'touch asked; until [ -e answer ]; do sleep 0.1; done; exec {find_mpirun()} "$@"'
    mpirun = executable(here.folder / "mpirun", text)
    script = here.script("open('ran', 'w')", script_of(here))
    job = here.start("launch", "--detach", "--mpirun", mpirun, "-n", "1", script)
    eventually((here.folder / "asked").exists)
    job.signal(signal.SIGKILL).wait()
    (here.folder / "answer").touch()
    here.run("wait", script_of(here).replace(".py", "-1")).assert_ok()
    assert (here.folder / "ran").exists()


def test_a_full_disk_starts_nothing(here):
    """A job whose log or report finds a full disk is refused before the start."""
    job = shlex.join([*here.where(1), here.script("print('ran')", "full.py")])
    for option, what in {"--detach": "keep the job's output in", "--report r": "write r:"}.items():
        launch = f"(ulimit -f 0; {sys.executable} -m mpiddp launch {option} {job}) 2>&1 | cat"
        sentence, *_ = here.run("sh", "-c", launch).lines
        assert re.match(rf"mpiddp: {option[:8]}: cannot {what} .*File too large", sentence)
    assert not [*here.folder.glob("state/mpiddp/jobs/full*")]


def test_the_report_of_a_job_that_failed(here):
    """`--report` has each attempt, the rank that failed first and its error; `--on-end` runs once."""
    script = [program("alone.py"), "raise"]
    on_end = here.script("import sys\nopen('ended', 'a').write(sys.argv[1] + '\\n')", "on end.py")
    options = ["--report", "r.json", "--on-end", shlex.join([sys.executable, on_end])]
    (here.folder / "r.json").symlink_to("latest.json")
    done = here.run("launch", *options, "--max-restarts", "1", *here.where(2), *script)
    facts = json.loads((here.folder / "r.json").read_text())
    assert (done.code, facts["exit_code"], facts["cause"]) == (1, 1, "failed")
    assert facts["error"] in done.said
    assert (facts["rank"], facts["host"]) == (1, here.hosts[0])
    assert [attempt["cause"] for attempt in facts["attempts"]] == ["failed", "failed"]
    assert facts["hosts"] == facts["attempts"][0]["hosts"] == [here.hosts[0]]
    times = [facts["began_at"]]
    times += [attempt[name] for attempt in facts["attempts"] for name in ("began_at", "ended_at")]
    assert sorted(times) == times
    assert (here.folder / "ended").read_text() == "r.json\n"
    assert (here.folder / "r.json").is_symlink()


def test_the_report_of_a_job_that_was_stopped(here):
    """The report of a stop has the checkpoint, and the command that resumes the job."""
    train = ["--use-syn", "--backend=gloo", "--arch=resnet20", "--epochs=900", "--out", "run"]
    train += ["--batch-size=4", "--steps-per-epoch=20"]
    options = ("--report", "r.json", *here.where(1))
    job = here.start("launch", *options, "-m", "mpiddp", "train", *train).until("epoch")
    facts = json.loads((here.folder / "r.json").read_text())
    assert (facts["cause"], facts["exit_code"]) == ("running", None)
    job.signal(signal.SIGTERM)
    done = job.wait()
    facts = json.loads((here.folder / "r.json").read_text())
    assert (done.code, facts["cause"], facts["error"]) == (75, "stopped", "stopped on request.")
    assert facts["checkpoint"].startswith(str(here.folder / "run" / "checkpoints" / "step_"))
    assert f"to resume: {facts['resume']}" in done.said
