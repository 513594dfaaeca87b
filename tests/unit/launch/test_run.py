"""What the launcher's one thread does while disks, logins and ports do not answer."""

import errno
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest

from mpiddp.errors import FAILED, STOPPED, JobFailed, UserError
from mpiddp.hosts.hostfile import Host, Hosts
from mpiddp.launch.judge.events import Outcome, Phase, Record, Stop
from mpiddp.launch.plan import job_plan
from mpiddp.launch.plan.command import Command
from mpiddp.launch.plan.environment import Environment
from mpiddp.launch.plan.options import LaunchOptions
from mpiddp.launch.plan.placement import Past, place
from mpiddp.launch.plan.starters import STARTERS
from mpiddp.launch.run import handover, job, outcome_file, watchers
from mpiddp.launch.run.control import Console, SignalQueue
from mpiddp.launch.run.job import Job, Move
from mpiddp.launch.run.log_folder import LogFolder
from mpiddp.launch.run.mpirun import MpirunProcess
from mpiddp.protocol.orders import Orders
from mpiddp.protocol.server import Event
from mpiddp.protocol.variables import ORDERS


def test_a_log_folder_that_comes_back(tmp_path, capfd):
    """Texts are kept as soon as the folder can be made, and the screen's thread gets one complaint."""
    (tmp_path / "logs").write_text("in the way")
    folder = LogFolder(tmp_path / "logs/launch_1")
    with closing(folder):
        folder.add("mpirun.log", b"lost\n")
        while not folder.complaints:
            time.sleep(0.01)
        (tmp_path / "logs").unlink()
        folder.add("mpirun.log", b"kept\n")
        assert capfd.readouterr().err == ""
    assert (tmp_path / "logs/launch_1/mpirun.log").read_bytes() == b"kept\n"
    (complaint,) = capfd.readouterr().err.splitlines()
    assert complaint.endswith("Not a directory. Its log has a gap.")


def test_a_report_on_a_disk_that_hangs(tmp_path, monkeypatch):
    """A restart does not wait for it. The last report that is written is the newest."""
    report = outcome_file.Report("job", paths=[tmp_path / "report.json"])
    answers, write = threading.Event(), outcome_file.replace_file
    monkeypatch.setattr(outcome_file, "replace_file", lambda *args: (answers.wait(), write(*args)))
    report.add(0.0, ["node1"], Outcome(FAILED, "rank 0 failed."))
    answers.set()
    report.end(Outcome(STOPPED, "stopped on request."), None)
    assert '"cause": "stopped"' in (tmp_path / "report.json").read_text()


def test_a_report_without_a_thread(tmp_path, monkeypatch, capfd):
    """A job goes on if this user gets no more threads. The report at its end has all attempts."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")  # as the kernel's refusal becomes

    report = outcome_file.Report("job", paths=[tmp_path / "report.json"])
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        report.add(0.0, ["node1"], Outcome(FAILED, "rank 0 failed."))
    assert "no report of the attempt: RuntimeError" in capfd.readouterr().err
    report.end(Outcome(STOPPED, "stopped on request."), None)
    assert len(json.loads((tmp_path / "report.json").read_text())["attempts"]) == 1


@pytest.mark.parametrize("has_file", [True, False])
def test_a_command_at_the_end_without_a_temporary_folder(tmp_path, monkeypatch, capfd, has_file):
    """It gets the file of --report. Without one, a line says why it did not run, and the job has ended as it has."""
    report = outcome_file.Report(
        "job", paths=[tmp_path / "report.json"] * has_file, on_end=("cat",)
    )
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        report.end(Outcome(STOPPED, "stopped on request."), None)
    printed, said = capfd.readouterr()
    assert ('"cause": "stopped"' in printed) == has_file
    assert ("no command of --on-end: FileNotFoundError" in said) != has_file


def late_start(record: Record, **of_attempt: object) -> watchers.LateStart:
    options = SimpleNamespace(timeout_s=None)
    request = SimpleNamespace(hosts=SimpleNamespace(transport=None))
    plan = SimpleNamespace(
        options=options, request=request, starter=SimpleNamespace(may_wait=False)
    )
    agents = SimpleNamespace(others=[Host("b"), Host("c")], launcher=None)
    defaults = {"server": None, "output": None, "timers": None}
    return watchers.LateStart(
        SimpleNamespace(agents=agents, plan=plan, record=record, **{**defaults, **of_attempt})
    )


def test_a_host_with_a_rank_that_has_started_is_not_lost(monkeypatch):
    """However late its other ranks are, and however slow a login there is meanwhile."""
    asked = []
    monkeypatch.setattr(watchers, "ask_hosts", lambda hosts, *_, **__: asked.extend(hosts) or {})
    record = Record(["a", "b", "b", "c"])
    record.add(Event("started", 1, {"host": "b", "pid": 7}))
    late_start(record)._probe()
    assert asked == [Host("c")]


def test_a_launcher_that_was_stopped_at_the_start():
    """The time in which it was stopped, as by Ctrl-Z, is not that of mpirun."""
    stopped = []
    late = late_start(Record(["a", "b"]), stop_ranks=stopped.append, add_act=lambda *_, **__: None)
    late.attempt.ask_for_stacks = lambda *_: None
    late.on_event(Event("started", 0, {"host": "a", "pid": 7}))
    now = time.monotonic()
    late._allow(100)
    for at in (now, now + 1, now + 1000, now + 1001):
        late.look(at)
    assert not stopped
    for at in range(5, 130, 5):
        late.look(now + 1000 + at)
    assert stopped


@pytest.mark.parametrize(
    "error", [BlockingIOError(errno.EAGAIN, "no"), JobFailed("a host is down.")]
)
def test_a_restart_that_this_machine_does_not_allow_is_one_of_several(error, monkeypatch):
    """--max-restarts counts it, and the next one may get more processes."""

    def fails(_: object) -> None:
        raise error

    monkeypatch.setattr(Job, "_plan_again", fails)
    past = SimpleNamespace(failures=0, grows=False, _replace=lambda **_: past)
    plan = SimpleNamespace(options=SimpleNamespace(max_restarts=3), past=past)
    assert (
        Job(None, plan, None).go_on(Move.RESTART, Outcome(FAILED, "a rank failed.")).code == FAILED
    )


def test_many_viewers_of_a_launcher_that_is_stopped():
    """Each of them waits for its answer, and none is told that the job ends."""
    with closing(Console("a\udcff job")) as console, ExitStack() as viewers:
        for _ in range(300):
            viewer = viewers.enter_context(socket.socket(socket.AF_UNIX))
            viewer.setblocking(False)
            viewer.connect(console.listener.getsockname().replace("/new", "/job"))


def test_a_login_is_no_process_of_the_job(tmp_path):
    """The launcher's own logins, which ask hosts meanwhile, are not killed with what mpirun leaves."""
    starter = STARTERS[1]._replace(program=tmp_path / "mpirun")
    mpirun = MpirunProcess(starter, Command("sleep", [], ("6000",)))
    login = subprocess.Popen(["sleep", "6000"])
    try:
        assert mpirun.left() == [mpirun._process.pid]
    finally:
        mpirun.close()
        login.kill()
        login.wait()
        mpirun._process.wait()


def test_a_stop_ends_a_login_that_hangs(monkeypatch):
    """If mpirun fails at the start, hosts are asked why. A Ctrl-C does not wait for their answers."""

    def ask_hosts(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(6000)

    monkeypatch.setattr(watchers, "ask_hosts", ask_hosts)
    monkeypatch.setattr(watchers, "PROBE_S", 6000)
    record = Record(["a", "b"])
    with closing(SignalQueue()) as signals:
        late = late_start(record)
        late.launcher = SimpleNamespace(signals=signals)
        late.on_event(Event("mpirun", facts={"code": 1}))
        assert signals.receive() == [signal.SIGINT]  # the loop sees it
    assert record.phase is Phase.STARTING


class Began(Exception):
    """A job would begin its first attempt now."""


@pytest.mark.parametrize(
    ("left_s", "options", "after_s"),
    [
        (36000, {}, 36000 - 2 * 30),
        (36000, {"grace_s": 120}, 36000 - 2 * 120),
        (300, {}, 300 - 30),
        (300, {"stop_after_s": float("inf")}, float("inf")),
    ],
)
def test_when_a_stop_is_requested_before_a_time_limit(monkeypatch, left_s, options, after_s):
    """docs/stop.md: twice --grace before it, or when a tenth of the time is left; never, if so requested."""
    asked = []

    def begin(*arguments: object) -> None:
        asked.append(arguments[2] - time.monotonic())
        raise Began

    monkeypatch.setattr(job, "seconds_left", lambda _: (left_s, "Slurm"))
    monkeypatch.setattr(job, "make_plan", lambda *_, **__: None)
    monkeypatch.setattr(job, "Launcher", begin)
    with pytest.raises(Began):
        job.run(LaunchOptions(("train.py",), **options), outcome_file.Report(""))
    assert asked == [pytest.approx(after_s, abs=5)]


@pytest.mark.parametrize(
    ("rank", "failures", "move"), [(None, 0, Move.GROW), (1, 0, Move.RESTART), (1, 1, Move.END)]
)
def test_a_failure_during_growth_counts_as_one(rank, failures, move):
    """A rank that fails while it stops to grow has failed, and --max-restarts counts it."""
    launcher = SimpleNamespace(stop_at=float("inf"), why_stop="")
    past = SimpleNamespace(failures=failures)
    plan = SimpleNamespace(options=SimpleNamespace(max_restarts=1), past=past)
    assert (
        Job(launcher, plan, None).next_move(Outcome(FAILED, "", rank, "a", stop=Stop.TO_GROW))
        is move
    )


def test_a_port_that_another_program_has(capfd):
    """Then the hosts are not tried against each other, and a line says so."""
    hosts = [Host("node1"), Host("node2")]
    reports = {host: {"launcher": "", "hosts": None if host is hosts[1] else {}} for host in hosts}
    wanted = {
        "launcher": "10.0.0.1:5",
        "meet": ({"node1": "10.0.0.1", "node2": "10.0.0.2"}, 41_111, 3.0, 16),
    }
    assert handover._cut_off(reports, wanted) == {}
    assert "another program has tcp/41111 on node2" in capfd.readouterr().err


def test_the_agents_of_a_dry_run_have_the_options():
    """Its command runs without this launcher."""
    hosts = Hosts("hosts", (Host("localhost", slots=2),))
    options = LaunchOptions(("train.py",), failed_grace_s=20.0, log_ranks="all", dry_run=True)
    placed = place(hosts, {}, STARTERS[1], options, Environment(), Past(hosts), 1)
    request = SimpleNamespace(hosts=placed, environment=Environment(), networks=())
    assert Orders.unpacked(job_plan._ours(options, STARTERS[1], request)[ORDERS]) == Orders(
        failed_grace_s=20.0
    )


def test_a_restart_without_a_rank_whose_output_is_wanted(capfd):
    """The first attempt refuses such a --log-ranks. A restart on fewer hosts says it, and goes on."""
    hosts, options = (
        Hosts("hosts", (Host("localhost", slots=2),)),
        LaunchOptions(("train.py",), log_ranks="0,5"),
    )
    past = Past(hosts)
    with pytest.raises(
        UserError, match="--log-ranks 0,5: there is no rank 5; the job has ranks 0 to 1"
    ):
        place(hosts, {}, STARTERS[1], options, Environment(), past, 1)
    assert (
        place(
            hosts, {}, STARTERS[1], options, Environment(), past._replace(attempts=1), 1
        ).world_size
        == 2
    )
    assert "there is no rank 5; the job has ranks 0 to 1" in capfd.readouterr().err
