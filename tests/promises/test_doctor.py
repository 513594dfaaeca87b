"""Doctor: `mpiddp doctor` before a job, `explain` after it, and `drill` to rehearse failures."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mpiddp import cli
from tests.support.cluster import Cluster
from tests.support.cluster.faults import beside_the_checkout, sshd_with
from tests.support.doctor_faults import FAULTS, NAMES, WORK, doctor, prepared
from tests.support.own_script import example
from tests.support.patience import eventually
from tests.support.place import Done, Process
from tests.support.ranks import ROOT, run_command

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
        more = ",nowhere" if "unresolvable name" in names else ""
        code, warnings, unknown = doctor(cluster, *arguments, names=NAMES + more)
    assert code == 1
    lines = warnings + unknown
    missed = {name for name, fault in present.items() if not any(map(fault.is_named, lines))}
    assert missed == set(), lines
    explained = [line for fault in present.values() for line in lines if fault.explains(line)]
    assert [line for line in warnings if line not in explained] == []


def test_doctor_raises_no_false_alarm(cluster):
    """`mpiddp doctor` finds nothing on healthy hosts, and leaves nothing behind."""
    code, warnings, _ = doctor(cluster, *JOB, names=",".join(NAMES.split(",")[:2]))
    assert (code, warnings) == (0, [])
    for host in cluster.hosts:
        assert host.run(["ls", "-A", f"{WORK}/runs"]).stdout == ""
        assert "mpiddp" not in str(host.processes())


def test_doctor_names_a_hang_of_its_job(hosts):
    """`mpiddp doctor` shows each check when it ends, and names the rank that hangs in its own small job."""
    job = hosts.start("doctor", *hosts.where(2))

    def scripts_of_node1() -> list[Process]:
        scripts = hosts.processes("mpiddp.runtime.script")
        return [rank for rank in scripts if rank.host == "node1" and "trial_job" in rank.command]

    for process in eventually(scripts_of_node1):
        hosts.kill(process, signal.SIGSTOP)
    assert "all 2 directions open" in job.until("preflight").stdout
    assert job.process.poll() is None
    done = job.wait().assert_code(1)
    (line,) = [line for line in done.lines if re.match(r"fail +job", line)]
    # A rank that was stopped before it had joined is missed at the start.
    seen = re.search("hung and was stopped: rank 1 on node1|Missing: rank 1 on node1", line)
    assert seen, done.stdout + done.stderr


OWN_TMP = beside_the_checkout("mount -t tmpfs own /tmp", "/tmp")
OWN_TMP = f"ForceCommand unshare -m sh -c '{OWN_TMP}; exec sh -c \"$SSH_ORIGINAL_COMMAND\"'\n"


def test_logins_with_a_tmp_of_their_own(hosts):
    """If each login of a host has a /tmp of its own, `mpiddp launch` and `mpiddp doctor` say so."""
    where, words = ("-H", "node0:1,node1:1"), "node1: mpirun's login has another /tmp"
    with sshd_with(hosts["node1"], OWN_TMP):
        done = hosts.run("launch", *where, "--", "hostname", cwd=Path("/")).assert_code(1)
        assert words in done.stderr
        done = hosts.run("doctor", *where, cwd=Path("/")).assert_code(1)
    (line,) = [line for line in done.lines if re.match(r"fail +job", line)]
    assert words in line
    assert "mpiddp doctor" not in done.stdout


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


# --- drill ---

DRILLED = str(ROOT / "tests/programs/drilled.py")


def results(done: Done) -> dict[str, Any]:
    return {result["fault"]: result for result in json.loads(done.stdout)["results"]}


@pytest.mark.parametrize(
    ("place", "only", "codes"),
    [("here", "kill,fewer", [[0], [1, 0], [1, 0]]), ("hosts", "sigterm", [[0], [75, 0]])],
    indirect=["place"],
)
def test_drill_passes_a_script_that_resumes_exactly(place, only, codes):
    """`mpiddp drill` kills or stops a script, and finds equal weights after it has resumed.

    It resumes on fewer ranks too, and on several hosts.
    """
    options = (*place.where(2), "--only", only, "--seed", "16", "--json")
    faults = results(place.run("drill", *options, DRILLED, "{out}").assert_ok())
    assert [fault["codes"] for fault in faults.values()] == codes
    assert [name for name, fault in faults.items() if not fault["passed"]] == []
    if "kill" in only:
        assert faults["kill"]["weights_equal"]
        assert faults["fewer"]["steps_lost"] > 0


@pytest.mark.parametrize(
    ("defect", "entry"),
    [
        ("optimizer", "the optimizer's step of 0.weight, which is missing"),
        ("scheduler", "the learning rate"),
    ],
)
def test_drill_tells_where_a_resumed_run_differs(here, defect, entry):
    """If a resumed run differs, `mpiddp drill` tells the step, and the first entry of the state that does."""
    options = ("-n", "1", "--only", "kill", "--seed", "3", "--steps", "20", "--json")
    done = here.run("drill", *options, DRILLED, "{out}", defect).assert_code(1)
    cause = results(done)["kill"]["cause"]
    named = re.fullmatch(rf"differs from step (\d+): first in {entry}", cause)
    assert named, cause
    assert (int(named[1]) - (defect == "scheduler")) % 3 == 0  # the step of a save, or the next one


TOO_LATE = """\
import sys
from mpiddp.drill import main, rehearse
rehearse._POLL_S = 600.0
sys.exit(main.main(sys.argv[1:]))
"""


def test_drill_passes_no_fault_that_has_not_hit(here):
    """A fault that comes too late for a run has not occurred, and so `mpiddp drill` does not pass."""
    options = ("-n", "1", "--only", "sigterm", "--steps", "6", "--json", DRILLED, "{out}")
    late = [sys.executable, here.script(TOO_LATE), *options]
    done = run_command(late)
    assert done.returncode == 1
    [_, sigterm] = json.loads(done.stdout)["results"]
    assert sigterm["passed"] is None
    assert sigterm["cause"] == "did not occur: the script ended before"


FAILS = (
    "import torch.distributed as dist\ndist.init_process_group('gloo')\nraise KeyError('its own')\n"
)


@pytest.mark.parametrize(
    ("only", "defect", "sentence"),
    [
        ("flip", "", "flip: the damaged checkpoint was taken: "),
        ("none", "all ranks", "none: ranks 0, 1 write one file, newest.tmp.\n"),
        ("kill", "fails", "failed first: KeyError: 'its own'"),
        ("kill", "random", "kill: not compared: two runs without a fault differ from step "),
    ],
    ids=["a damaged checkpoint", "one file of two ranks", "an error of its own", "a random start"],
)
def test_drill_tells_what_is_wrong(here, only, defect, sentence):
    """`mpiddp drill` tells that a script takes a checkpoint in which one bit has changed, that ranks write
    one file, the error of a script that fails by itself, and that nothing can be compared.
    """
    script = here.script(FAILS) if defect == "fails" else DRILLED
    options = (*here.where(2 if defect == "all ranks" else 1), "--only", only, "--seed", "3")
    assert sentence in here.run("drill", *options, script, "{out}", defect).assert_code(1).stdout


def test_drill_stops_and_resumes(here, tmp_path):
    """`mpiddp drill` stops a script, damages its checkpoint, resumes it, and compares the weights."""
    job = example(tmp_path / "job", every=5)
    options = ("--only", "sigterm,flip", "--seed", "16", "--json", "--work", "kept")
    faults = results(here.run("drill", "-n", "1", *options, job).assert_ok())
    assert (here.folder / "kept").is_dir()
    assert [fault["codes"] for fault in faults.values()] == [[0], [75, 0], [1, 0]]
    assert [faults[name]["steps_lost"] > 0 for name in ("sigterm", "flip")] == [False, True]
    assert all(faults[name]["weights_equal"] for name in ("sigterm", "flip"))
