"""The rows of known failures, and how a log is searched for them.

tests/promises/test_doctor.py has the texts of real programs.
python -m pytest tests/unit/explain
"""

import io
import random
import re
import time
from pathlib import Path

import pytest

from mpiddp import cli
from mpiddp.arguments import VERBS
from mpiddp.doctor.explanations import explain, explain_all, explain_file
from mpiddp.doctor.failures import FAILURES, PROGRAMS

TEXTS = Path(__file__).parents[2] / "data" / "failures"


def ids(log: list[str]) -> list[str]:
    return [each.failure.id for each in explain_all(log)]


def test_every_row_is_complete_and_has_a_real_text():
    assert {path.name.partition(".")[0] for path in TEXTS.glob("*.txt")} == {
        failure.id for failure in FAILURES
    }
    for failure in FAILURES:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", failure.id)
        assert failure.program in PROGRAMS.values()
        assert all(failure.says), failure.id
        assert failure.cause.endswith("."), failure.id
        assert failure.mend.strip(), failure.id
        for verb in re.findall(r"mpiddp ([a-z]+) (?=[-A-Za-z])", failure.mend):
            assert verb in VERBS, failure.id


def test_a_root_cause_comes_before_its_consequences():
    log = [
        "[rank0]: RuntimeError: [/gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:4711. GLHF",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ]
    found = explain_all(log)
    assert [(each.failure.id, each.number) for each in found] == [
        ("cuda-out-of-memory", 3),
        ("gloo-peer-gone", 1),
        ("system-rank-ended", 2),
    ]


def test_of_a_symptom_and_an_exception_the_earlier_one_is_named():
    raised = "[3 node1] ValueError: 3 channels"
    waited = (
        "[0 node0] RuntimeError: [a.cc:78] Timed out waiting 18000ms for recv operation to complete"
    )
    assert ids([raised, waited])[0] == "python-exception"
    assert ids([waited, raised])[0] == "gloo-timeout"


def test_the_error_line_of_the_launcher_is_known():
    killed = "mpiddp: rank 1 on node2 was killed by SIGKILL. The other ranks were stopped."
    assert ids([killed])[0] == "system-killed"
    failed = "mpiddp: rank 1 on n2 failed first: ValueError: bad. The other ranks were stopped."
    assert ids(["ValueError: bad", failed]) == ["python-exception", "system-rank-ended"]


def test_an_exception_alone_is_no_failed_job():
    assert explain(["ValueError: bad image, skipped"]) is None
    assert explain(["ValueError: bad image", "Process name: [1,0]"]) is None


@pytest.mark.parametrize(
    "prefix",
    ["", "[rank3]: ", "[1,0]<stderr>:", "[rank 3 node2] ", "3: ", "\x1b[31m", "100%|███| 9/9\r"],
)
def test_the_prefix_of_a_launcher_is_skipped(prefix):
    log = [f"{prefix}ValueError: 3 channels\n", f"{prefix}Killed\n"]
    assert ids(log) == ["python-exception", "system-killed"]
    assert explain_all(log)[0].line == "ValueError: 3 channels"


def test_a_line_is_shown_short_and_harmless():
    found = explain(["x" * 3000 + " Host key verification failed\x1b[2J\x07 " + "y" * 3000])
    assert found is not None
    assert "Host key verification failed" in found.line
    assert len(found.line) < 200
    assert found.line.isprintable()


def test_any_bytes_are_searched():
    rng = random.Random(0)
    for _ in range(50):
        noise = rng.randbytes(rng.randint(0, 400)).replace(b"\n", b"")
        log = noise + b"\n" + noise + b"\nHost key verification failed.\n" + noise
        found = explain_file(io.BytesIO(log))
        assert [each.number for each in found if each.failure.id == "ssh-host-key-unknown"] == [3]


@pytest.mark.parametrize("unit", ["Error: ", "[", "a.", "x: ", "\r", "\0", "ssh: connect to host "])
def test_a_hostile_line_takes_little_time(unit):
    began = time.process_time()
    explain([unit * 200_000])
    assert time.process_time() - began < 20


def test_the_root_cause_is_shown_with_its_line_and_what_follows_from_it(tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text(
        "step 1\nHost key verification failed.\nORTE was unable to reliably start one or more daemons.\n"
    )
    assert cli.main(["explain", str(log)]) == 0
    first, rest = capsys.readouterr().out.split("\n\n")
    assert first.startswith(f"{log}:2: Host key verification failed.\n")
    assert "ssh-host-key-unknown" in first
    assert "mpi-host-not-started" in rest
