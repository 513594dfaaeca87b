"""The tables of `mpiddp ps` and `mpiddp top`, the status on a terminal, and which job a name means."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from mpiddp.errors import UserError
from mpiddp.launch.judge.events import Record
from mpiddp.launch.run.status import job_facts, status_lines
from mpiddp.protocol.channel import is_valid, viewed_folders
from mpiddp.protocol.server import Event
from mpiddp.runtime.job.progress import BY_CALLS, BY_OPTIMIZER
from mpiddp.watch import running_jobs, table
from mpiddp.watch.detached import KEPT, DetachedJob, detached_jobs, new_job
from mpiddp.watch.running_jobs import RunningJob
from mpiddp.watch.table import head_lines, rank_lines
from tests.support.channels import progress
from tests.support.errors import error


@pytest.fixture(name="facts")
def facts_of_a_job():
    """A job of four ranks on two hosts: two make steps, one saves, one has not started."""
    record = Record(("a", "a", "b", "b"))
    for rank in (0, 1, 2):
        record.add(Event("started", rank, {"host": "ab"[rank // 2], "pid": 10 + rank}, 0.0))
        record.add(Event("joining", rank, {"timeout_s": 60, "script": 20 + rank}, 0.0))
    for second in range(10):
        for rank, own in ((0, 0.1), (1, 0.9)):
            facts = progress(second * 2, own_s=second * own)
            record.add(Event("progress", rank, facts, 100.0 + second))
    record.add(Event("saving", 2, {"active": True}, 101.0))
    latest = {0: b"epoch 1\n 10%\r 20%\x1b[2J\n\n", 2: b"\xff\n"}
    job = {"pid": 7, "name": "train.py", "age_s": 720.0, "attempt": 2, "phase": "running"}
    facts = job_facts(record, latest, 112.0, silent={2: 21.2, 3: 20.6}) | job
    decoded: dict[str, Any] = json.loads(json.dumps(facts))
    return decoded


def test_every_rank_has_a_line(facts):
    assert head_lines(facts) == [
        "train.py (pid 7), running, 4 ranks on 2 hosts, step 18, 2/s, attempt 2, 12 min",
        "b has not answered for 21 s.",
    ]
    assert rank_lines(facts["ranks"]) == [
        "RANK  HOST  PID  STATE     STEP  RATE     OWN    WAIT  CPU  MEMORY  AGO  LAST LINE",
        "   0  a      20  running     18   2/s   50 ms  450 ms  10%  1.1 GB  3 s   20%\\x1b[2J",
        "   1  a      21  running     18   2/s  450 ms   50 ms  90%  1.1 GB  3 s",
        "   2  b      22  saving       -     -       -       -    -       -    -  \ufffd",
        "   3  b       -  starting     -     -       -       -    -       -    -",
    ]


def test_a_job_is_named_by_its_pid_or_its_name(monkeypatch):
    found = [
        RunningJob(Path(), pid, name, {}) for pid, name in ((7, "a.py"), (8, "b.py"), (9, "b.py"))
    ]
    monkeypatch.setattr(running_jobs, "running_jobs", lambda: found)
    assert running_jobs.find_job("a.py") is running_jobs.find_job("7") is found[0]
    for name, sentence in {
        None: error("several jobs", ": 7 (a.py), 8 (b.py), 9 (b.py)."),
        "b.py": error("several jobs", ": 8 (b.py), 9 (b.py)."),
        "c": error("There are", " c.", ": 7 (a.py), 8 (b.py), 9 (b.py)."),
    }.items():
        with pytest.raises(UserError, match=rf"^{sentence}$"):
            running_jobs.find_job(name)
    found[1:] = [RunningJob(Path(), 0, "a container's", {})]
    assert running_jobs.find_job(None) is found[0]
    assert running_jobs.find_job("a container's") is found[1]
    del found[0]
    with pytest.raises(UserError, match=error("runs in this container", ": - (a container's).")):
        running_jobs.find_job(None)
    found.clear()
    with pytest.raises(UserError, match=error("yours runs")):
        running_jobs.find_job(None)


class Kept(DetachedJob):
    """A job of --detach that runs, with a pid, or has ended."""

    pid = property(lambda job: {"a-1": 7, "a-2": 8}.get(job.name))
    is_running = property(lambda job: job.pid is not None)


def test_logs_and_wait_mean_the_only_running_job_or_else_the_latest(monkeypatch):
    found = [Kept(Path(name)) for name in ("b-2", "a-2", "b-1", "a-1")]  # the latest first
    monkeypatch.setattr(running_jobs, "detached_jobs", lambda: found)
    monkeypatch.setattr(running_jobs, "running_jobs", lambda: [RunningJob(Path(), 9, "c.py", {})])
    assert running_jobs.find_detached("b-1").name == "b-1"  # it has ended
    assert running_jobs.find_detached("8").name == "a-2"
    for name, sentence in {
        None: error("several jobs", ": 8 (a-2), 7 (a-1)."),
        "9": error("without --detach", " 9 (c.py)"),
        "nosuch": error("no job called nosuch", ": b-2, a-2, b-1, a-1."),
    }.items():
        with pytest.raises(UserError, match=rf"^{sentence}$"):
            running_jobs.find_detached(name)
    del found[3]
    assert running_jobs.find_detached(None).name == "a-2"
    del found[1]
    assert running_jobs.find_detached(None).name == "b-2"
    found.clear()
    with pytest.raises(UserError, match=error("no job called nosuch was started")):
        running_jobs.find_detached("nosuch")
    with pytest.raises(UserError, match=error("no job was started")):
        running_jobs.find_detached(None)


def test_a_name_stands_for_one_job(monkeypatch, tmp_path):
    """Also after the folders of old jobs were removed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for number in range(1, KEPT + 9):
        job, lock = new_job("train")
        assert job.name == f"train-{number}"
        os.utime(lock, (number, number))
        os.close(lock)


def test_a_job_of_another_machine_may_still_run(monkeypatch, tmp_path):
    """Where hosts share the folder and not its locks, its log stays."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for number in range(1, KEPT + 9):
        job, lock = new_job("train")
        job.report_path.write_text(json.dumps({"launched_on": "another"}))
        os.close(lock)
        assert len(detached_jobs()) == number


def test_a_rank_without_a_step_for_ten_of_its_steps_is_quiet_and_its_rate_falls():
    record = Record(("a",))
    record.add(Event("started", 0, {"host": "a", "pid": 7}, 0.0))
    record.add(Event("joining", 0, {"timeout_s": 60}, 0.0))
    for second in range(3):
        record.add(Event("progress", 0, progress(second), float(second)))
    running, quiet = (job_facts(record, {}, at)["ranks"][0] for at in (11.0, 42.0))
    assert (running["state"], running["rate"]) == ("running", 1.0)
    assert (quiet["state"], quiet["rate"]) == ("quiet", 1 / 40)


def test_the_rate_of_a_resume_counts_no_step_of_the_run_before():
    """Its first step, which the optimizer counts, is step 1, and should_stop() counts step 302 then."""
    record = Record(("a",))
    for second, step, counter in (
        (0.0, 1, BY_OPTIMIZER),
        (0.5, 302, BY_CALLS),
        (1.0, 304, BY_CALLS),
    ):
        record.add(Event("progress", 0, progress(step, counter=counter), second))
        facts = job_facts(record, {}, second)
        assert facts["rate"] == (4.0 if step == 304 else None)
    assert facts["step"] == 304


@pytest.mark.parametrize(
    ("values", "fact", "text"),
    [
        ({"loss": 0.123456}, 0.123456, ", loss 0.1235, "),
        ({"train_loss": 2}, 2, ", loss 2, "),
        ({"loss": float("nan")}, "nan", ", loss nan, "),
        ({"loss": "\x1b[2J"}, "\x1b[2J", ", loss \\x1b[2J, "),
        ({"accuracy": 0.5}, None, "-, attempt 1, "),
    ],
)
def test_the_loss_of_a_job(values, fact, text):
    """It is that of rank 0. Its JSON has no NaN, and a terminal gets no escape of a script."""
    record = Record(["a", "b"])
    report(record, 0, 10, 0.0, **values)
    report(record, 1, 10, 0.0, loss=9.0)
    facts = job_facts(record, {}, 1.0) | {"pid": 7, "name": "train.py", "age_s": 1.0}
    assert facts["loss"] == fact
    assert text in head_lines(facts)[0]


def report(record: Record, rank: int, step: int, at: float, **shown: Any) -> None:
    facts = {**progress(step), **({"shown": shown} if shown else {})}
    assert is_valid("progress", facts)
    record.add(Event("progress", rank, facts, at))


def test_the_status_says_how_far_the_training_is():
    record = Record(["a", "a", "b"], attempt=2)
    report(record, 0, 1000, 0.0, total=4000, loss=0.123456, epoch=3, phase="warm-up\x1b[2J")
    report(record, 1, 1000, 0.0, loss=9.0)
    report(record, 0, 1100, 10.0)
    assert status_lines(record, 10.0, "rank 2 on b is a straggler: the others wait.") == [
        "step 1,100/4,000 (28%)  10 steps/s  5 min left  epoch 3  loss 0.1235  phase warm-up\\x1b[2J",
        "3 ranks on 2 hosts  attempt 2  1.1 GB a rank  rank 2 on b is a straggler",
    ]
    report(record, 0, 4001, 20.0)
    assert status_lines(record, 20.0)[0].startswith("step 4,001  ")


def test_a_detached_job_whose_lock_another_machine_may_hold(tmp_path):
    """On NFS with nolock, the lock of another machine is not seen, so the job may run there."""
    DetachedJob(tmp_path).report_path.write_text('{"exit_code": null, "launched_on": "node7"}')
    assert (
        "If it runs on node7, its lock is not seen here. Log in there."
        in DetachedJob(tmp_path).ending
    )


def test_a_folder_that_others_may_enter_is_no_job(monkeypatch, tmp_path):
    """Another user may make a folder of any name in /tmp."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    others = viewed_folders()[0].with_name("job-0")
    others.mkdir(parents=True)
    others.chmod(0o777)
    assert others / "job" not in running_jobs.sockets()
    theirs = tmp_path / "mpiddp/jobs/train-1"  # where a group may write
    theirs.mkdir(parents=True)
    theirs.chmod(0o755)
    os.mkfifo(theirs / "lock")  # to open it would wait for ever
    assert detached_jobs() == []


def test_the_socket_of_another_machine_stays(monkeypatch, tmp_path):
    """Machines that share a home folder may share a name as well, and refuse each other's sockets."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before = viewed_folders()[0]
    monkeypatch.setattr(Path, "read_text", lambda path, *_: "another start of another machine")
    assert {before} - {*viewed_folders()}
    other = viewed_folders()[0].with_name("job-1")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    other.mkdir(mode=0o700, parents=True)
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(other / "job"))
    running_jobs.running_jobs()
    assert (other / "job").exists()


def test_a_job_that_ends_while_it_is_asked(facts, monkeypatch, tmp_path, capsys):
    """Its launcher has taken the question of `top`, and gives no answer."""
    job = RunningJob(tmp_path / "job", 7, "train.py", facts)
    answers = iter([facts])
    monkeypatch.setattr(table, "find_job", lambda _: job)
    monkeypatch.setattr(RunningJob, "connected", lambda _: socket.socket(socket.AF_UNIX))
    monkeypatch.setattr(running_jobs, "_answer", lambda *_: next(answers, {}))
    monkeypatch.setattr(os, "isatty", lambda _: True)
    monkeypatch.setenv("TERM", "xterm")
    assert table.top(["7"]) == 0
    assert capsys.readouterr().out.endswith("\njob 7 (train.py) has ended.\n")
