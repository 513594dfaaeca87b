"""Doctor: `mpiddp doctor` before a job, `explain` after it, and `drill` to rehearse failures."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mpiddp import cli
from tests.support.cluster import Cluster
from tests.support.doctor_faults import FAULTS, WORK, doctor, prepared
from tests.support.own_script import example
from tests.support.patience import eventually
from tests.support.place import Done, Process
from tests.support.ranks import ROOT

# --- doctor ---


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Four hosts with folders, an environment and a GPU of their own."""
    with prepared() as up:
        yield up


JOB = ("--script", "train.py", "--data", "data")
UNREACHED = {"wrong key", "unknown host key", "stopped sshd", "unresolvable name"}
LACKING = {"interpreter missing", "daemon missing", "host down"}
OTHERS = {"working folder missing", "Open MPI 4 beside 5"}
# Each of these hides or is hidden by another fault.
ALONE = {"torch does not load", "large packets lost", "foreign libmpi", "another user of a GPU"}
GROUPS: dict[str, tuple[set[str], tuple[str, ...]]] = {
    "hosts that ssh does not reach": (UNREACHED, ()),
    "hosts that lack what a job needs": (LACKING, ("--quick",)),
    "hosts that have something else": (OTHERS, ("--quick",)),
    "hidden faults": (ALONE, JOB),
    "all others": ({*FAULTS} - UNREACHED - LACKING - OTHERS - ALONE, JOB),
}


@pytest.mark.parametrize("group", GROUPS)
def test_doctor_names_all_faults(cluster, group):
    """`mpiddp doctor` finds all faults of all hosts in one run, and raises no false alarm beside them."""
    names, arguments = GROUPS[group]
    present = {name: FAULTS[name] for name in names}
    with ExitStack() as stack:
        for fault in present.values():
            stack.enter_context(fault.inject(cluster))
        hosts = max((fault.names for fault in present.values()), key=len)
        report = doctor(cluster, *arguments, names=hosts)
    assert report.code == 1
    said = report.warnings + report.unknown
    missed = {name for name, fault in present.items() if not any(map(fault.is_named, said))}
    assert missed == set(), said
    explained = [line for fault in present.values() for line in said if fault.explains(line)]
    assert [line for line in report.warnings if line not in explained] == []


def test_doctor_raises_no_false_alarm(cluster):
    """`mpiddp doctor` finds nothing on healthy hosts, and leaves nothing behind."""
    report = doctor(cluster, *JOB)
    assert report.code == 0
    assert report.warnings == []
    for host in cluster.hosts:
        assert host.run(["ls", "-A", f"{WORK}/runs"]).stdout == ""
        assert "mpiddp" not in str(host.processes())


def test_doctor_names_a_hang_of_its_job(hosts):
    """`mpiddp doctor` shows each check when it ends, and names the rank that hangs in its own small job."""
    job = hosts.start("doctor", *hosts.where(2))

    def stopped() -> list[Process]:
        found = [
            each for each in hosts.processes("mpiddp.doctor.trial_job") if each.host == "node1"
        ]
        scripts = [each for each in found if "runtime.script" in each.command]
        for process in scripts:
            hosts.kill(process, signal.SIGSTOP)
        return scripts

    eventually(stopped)
    assert "all 2 directions open" in job.until("preflight").stdout
    assert job.process.poll() is None
    done = job.wait()
    assert done.code == 1
    (line,) = [line for line in done.stdout.splitlines() if re.match(r"fail +job", line)]
    assert "rank 1 on node1" in line, done.stdout + done.stderr


# --- explain ---

TEXTS = sorted((ROOT / "tests/data/failures").glob("*.txt"))


def explained(log: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code, and what `mpiddp explain` prints of the root cause."""
    code = cli.main(["explain", str(log)])
    return code, capsys.readouterr().out.partition("\n\n")[0]


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.stem)
def test_explain_knows_the_root_cause(text, capsys):
    """`mpiddp explain` names the root cause of a failure from what real programs printed."""
    code, first = explained(text, capsys)
    assert code == 0
    assert f"\n{text.stem.partition('.')[0]}: " in first
    assert str(text) in first


def test_explain_knows_a_failure_of_today(tmp_path, capsys):
    """`mpiddp explain` knows what the installed programs print today."""
    name = "torch-no-group"  # support/provoke_failures.sh provokes most of the others, too
    script = ROOT / "tests/support/provoke_failures.sh"
    env = {**os.environ, "FAILURES_OUT": str(tmp_path)}
    subprocess.run([script, name], env=env, cwd=tmp_path, check=True)
    code, first = explained(tmp_path / f"{name}.txt", capsys)
    assert (code, name in first) == (0, True)


def test_explain_finds_nothing_in_a_good_log(tmp_path, capsys):
    """`mpiddp explain` finds no failure in the log of a healthy job."""
    log = tmp_path / "train.log"
    shutil.copy(ROOT / "tests/data/logs/healthy_words.log", log)
    logger = logging.Logger("training")
    logger.addHandler(logging.FileHandler(log))
    try:
        raise ValueError("bad image")
    except ValueError:
        logger.exception("skipped one")
    pages = ("README.md", "docs/launch.md", "docs/evidence/proved.md")
    for good in (log, *(ROOT / page for page in pages)):
        assert explained(good, capsys)[0] == 1, good


# --- drill ---

DRILLED = str(ROOT / "tests/programs/drilled.py")


def results(done: Done) -> dict[str, Any]:
    assert done.code in (0, 1), done.stderr
    return {each["fault"]: each for each in json.loads(done.stdout)["results"]}


def test_drill_passes_a_script_that_resumes_exactly(here):
    """`mpiddp drill` kills and resumes a script, also on fewer ranks, and finds equal weights."""
    options = ("-n", "2", "--only", "kill,fewer", "--seed", "3", "--json")
    done = here.run("drill", *options, DRILLED, "{out}")
    assert done.code == 0, done.stderr + done.stdout
    faults = results(done)
    assert [faults[name]["codes"] for name in ("none", "kill", "fewer")] == [[0], [1, 0], [1, 0]]
    assert faults["kill"]["weights_equal"]
    assert faults["fewer"]["steps_lost"] > 0


@pytest.mark.parametrize(
    ("defect", "entry"),
    [
        ("optimizer", "the optimizer's step of 0.weight, which is missing"),
        ("scheduler", "the learning rate"),
    ],
    ids=["optimizer", "scheduler"],
)
def test_drill_tells_where_a_resumed_run_differs(here, defect, entry):
    """If a resumed run differs, `mpiddp drill` tells the step, and the first entry of the state that does."""
    options = ("-n", "1", "--only", "kill", "--seed", "3", "--steps", "20", "--json")
    done = here.run("drill", *options, DRILLED, "{out}", defect)
    assert done.code == 1, done.stderr
    cause = re.fullmatch(
        rf"differs from step (\d+): first in {entry}", results(done)["kill"]["cause"]
    )
    assert cause, done.stdout
    assert (int(cause[1]) - (defect == "scheduler")) % 3 == 0  # the step of a save, or the next one


def test_drill_tells_that_a_damaged_checkpoint_was_taken(here):
    """`mpiddp drill` tells that a script has taken a checkpoint in which one bit had changed."""
    done = here.run("drill", "-n", "1", "--only", "flip", "--seed", "3", DRILLED, "{out}")
    assert done.code == 1, done.stderr
    assert "flip: the damaged checkpoint was taken: " in done.stdout


def test_drill_tells_which_ranks_write_one_file(here):
    """`mpiddp drill` tells which ranks write one file."""
    done = here.run("drill", *here.where(2), "--only", "none", DRILLED, "{out}", "all ranks")
    assert done.code == 1, done.stderr
    assert "none: ranks 0, 1 write one file, newest.tmp.\n" in done.stdout


def test_drill_stops_and_resumes(here, tmp_path):
    """`mpiddp drill` stops a script, damages its checkpoint, resumes it, and compares the weights."""
    job = example(tmp_path / "job", every=5)
    options = ("--only", "sigterm,flip", "--seed", "3", "--json", "--work", "kept")
    done = here.run("drill", "-n", "2", *options, job)
    assert done.code == 0, done.stderr + done.stdout
    assert (here.folder / "kept").is_dir()
    found = results(done)
    assert [each["codes"] for each in found.values()] == [[0], [75, 0], [1, 0]]
    assert [found[name]["steps_lost"] > 0 for name in ("sigterm", "flip")] == [False, True]
    assert all(found[name]["weights_equal"] for name in ("sigterm", "flip"))


def test_drill_of_a_script_that_fails(here):
    """The drill of a script that fails by itself says its error, on several ranks too."""
    text = "import torch.distributed as dist\ndist.init_process_group('gloo')\nraise KeyError('its own')\n"
    done = here.run("drill", *here.where(2), "--only", "kill", here.script(text), "{out}")
    assert done.code == 1, done.stderr
    assert "the undisturbed run ended with code 1: KeyError: 'its own'." in done.stdout


def test_drill_on_hosts(hosts):
    """`mpiddp drill` works on several hosts."""
    options = ("--only", "sigterm", "--seed", "3", "--json")
    done = hosts.run("drill", *options, *hosts.where(2), DRILLED, "{out}")
    assert done.code == 0, done.stderr + done.stdout
    assert [fault for fault, each in results(done).items() if not each["passed"]] == []
