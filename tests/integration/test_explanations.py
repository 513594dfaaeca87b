"""Known failures are found in what the real programs print, the root cause first; good logs show none.

tests/data/failures/ has the texts. tests/support/provoke_failures.sh provokes most of them again; sources.tsv
says where the others come from.
"""

import io
import json
import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiddp import cli
from mpiddp.cli import VERBS
from mpiddp.explain.explain import explain, explain_file
from mpiddp.explain.failures import FAILURES
from mpiddp.launch.judge.events import Outcome
from mpiddp.launch.run.outcome_file import Report
from mpiddp.text import as_json, with_fix
from tests.support.ranks import ROOT

TEXTS = ROOT / "tests" / "data" / "failures"
BY_ID = {failure.id: failure for failure in FAILURES}


def found_in(lines):
    """What is found in a log, [] if its job has survived it."""
    findings = explain_file(io.BytesIO("\n".join(lines).encode("utf-8", "replace")))
    return [] if findings.survived else findings.explanations


LOGS = ROOT / "tests/data/logs"
_, *CAUSES = ((LOGS / "causes.tsv").read_text(encoding="utf-8")).splitlines()


@pytest.mark.parametrize("row", CAUSES, ids=lambda row: row.partition("\t")[0])
def test_the_last_failure_decides_and_a_survived_one_is_none(row, command):
    name, id, line = row.split("\t")
    code, out, err = command(LOGS / f"{name}.log")
    assert err == ""
    if id == "-":
        assert code == 1
        assert "nothing failed" in out or "no known failure" in out
    else:
        assert out.split(":")[1] == line
        answer = "No known failure." if id == "own-error" else f"{id}: "
        assert f"\n{answer}" in out.partition("Also seen")[0]
        assert code == (id == "own-error")


CAUGHT = """skipped one
Traceback (most recent call last):
  File "a.py", line 3, in {function}
    raise ValueError
ValueError: bad image"""
RESET = "[rank0]: RuntimeError: [/gloo/pair.cc:553] Connection closed by peer [10.0.0.2]:4711. GLHF"
ELASTIC = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: "
OOM = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
RAISED = "[3 node1] ValueError: 3 channels"
WAITED = (
    "[0 node0] RuntimeError: [a.cc:78] Timed out waiting 18000ms for recv operation to complete"
)
REFUSED = "ssh: connect to host node2 port 22: Connection refused"
KILLED = "mpiddp: rank 1 on node2 was killed by SIGKILL. The other ranks were stopped."
VERDICT = "mpiddp: rank 1 on n2 failed first: ValueError: bad. The other ranks were stopped."
CHAINED = [
    "[rank1]: Traceback (most recent call last):",
    '[rank1]:   File "a.py", line 3, in <module>',
    "[rank1]: OSError: [Errno 28] No space left on device",
    "[rank1]: During handling of the above exception, another exception occurred:",
    "[rank1]: Traceback (most recent call last):",
    '[rank1]:   File "a.py", line 5, in <module>',
    "[rank1]: ValueError: bad",
]
CAUSE = f'mpiddp: "No space left on device" has a known cause. The system: {BY_ID["system-disk-full"].cause}'
HUNG = "mpiddp: rank 0 on n1 has not entered broadcast no. 5, for which rank 1 has waited 60 s."
SILENCE = "no rank has made a step for 300 s: rank 0 on n1 is in load (a.py:3): q.get()  # rank 1 has not entered it."
QUIET, ENDED_QUIET = f"mpiddp: {SILENCE}", f"mpiddp: the job hung and was stopped: {SILENCE}"
INTERRUPTED = "mpiddp: rank 0 on n1 failed first: KeyboardInterrupt. The other ranks were stopped."
GONE = (
    "mpiddp: rank 0 on n1 ended early, with exit code 0. Then rank 1 on n1 failed first: RuntimeError: "
    "[gloo] Connection closed by peer [::1]:40000. The other ranks were stopped."
)
LEFT = "mpiddp: rank 0 on n1 ended early, with exit code 0 (os._exit). Then rank 1 on n1"
RESTARTED = "mpiddp: restarting on n1 and n2 (restart 1 of 3)."
ENDED = "mpiddp: rank 0 on n1 ended first, with exit code 3. The other ranks were stopped."
DF = ["Filesystem      Size  Used Avail Use% Mounted on", *["/dev/sda1  9G  4G  5G  45% /"] * 20]
STEPS = [f"step {number} loss 0.5" for number in range(50_000)]


@pytest.mark.parametrize(
    ("log", "found"),
    [
        # A job survives a warning after which it goes on.
        ([*STEPS, REFUSED], [("ssh-refused", 50_001)]),
        ([*STEPS, REFUSED, *STEPS], []),
        ([*STEPS, REFUSED, "Training complete."], []),
        # A root cause comes before its consequences.
        (
            [RESET, ELASTIC, OOM],
            [("cuda-out-of-memory", 3), ("gloo-peer-gone", 1), ("rank-ended", 2)],
        ),
        # Of a symptom and an exception, the earlier one is named.
        ([RAISED, WAITED], [("own-error", 1), ("gloo-timeout", 2)]),
        ([WAITED, RAISED], [("gloo-timeout", 1), ("own-error", 2)]),
        # The launcher's own sentence is known.
        (["ValueError: bad", VERDICT, *DF], [("own-error", 2)]),
        # That of a DataLoader whose worker has ended names no file.
        (
            ["FileNotFoundError: [Errno 2] No such file or directory", VERDICT],
            [("own-error", 2)],
        ),
        # The launcher's sentence below its verdict names the cause of the exception.
        ([*CHAINED, VERDICT, CAUSE], [("system-disk-full", 3), ("own-error", 7)]),
        # The job has survived this line, so it is no cause of what the launcher names.
        ([REFUSED, *STEPS, KILLED], [("system-killed", 50_002), ("ssh-refused", 1)]),
        ([REFUSED, *STEPS, "Killed"], [("system-killed", 50_002), ("ssh-refused", 1)]),
        # A Ctrl-C only ends a hang, and so do the errors of the ranks that it interrupts.
        ([HUNG, "KeyboardInterrupt", INTERRUPTED], [("python-hang", 1), ("python-interrupted", 2)]),
        ([HUNG, "interrupted", GONE], [("python-hang", 1)]),
        # A rank that has left the others is why their connections closed, unless its log has a cause.
        ([RESET, GONE], [("python-left-early", 2), ("gloo-peer-gone", 1)]),
        ([OOM, GONE], [("cuda-out-of-memory", 1), ("python-left-early", 2)]),
        ([f"{LEFT} failed first: {WAITED.partition('] ')[2]}."], [("python-left-early", 1)]),
        ([f"{LEFT} failed first: ValueError: bad."], [("own-error", 1)]),
        ([f"{LEFT} was killed by SIGKILL."], [("system-killed", 1)]),
        (
            [
                "mpiddp: rank 0 on n1 ended early, with exit code 0. Then the job hung and was stopped."
            ],
            [("python-hang", 1)],
        ),
        ([HUNG, VERDICT], [("own-error", 2), ("python-hang", 1)]),
        (
            ["a.py: error: the following arguments are required: --local-rank"],
            [("torch-local-rank-argument", 1)],
        ),
        # A silence is no hang. The job went on after it, unless it was stopped for it.
        ([QUIET], [("python-quiet", 1)]),
        ([QUIET, KILLED], [("system-killed", 2)]),
        ([QUIET, ENDED], [("rank-ended", 2)]),
        ([QUIET, ENDED_QUIET], [("python-quiet", 2)]),
        (["mpiddp: the job hung and was stopped."], [("python-hang", 1)]),  # of an older launcher
        # What a restart has survived is no cause of the end.
        (["ValueError: bad", VERDICT, RESTARTED, KILLED], [("system-killed", 4)]),
        (["ValueError: bad", VERDICT, RESTARTED, ENDED], [("rank-ended", 4)]),
        # Of one process, the last exception has ended it.
        (["ValueError: bad image, skipped", "ValueError: bad"], [("own-error", 2)]),
    ],
)
def test_what_a_log_shows(log, found):
    lines = [line for text in log for line in text.split("\n")]
    assert [(row.failure.id, row.number) for row in found_in(lines)] == found


RECORDS = sorted((ROOT / "tests/data/records").glob("*.txt"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_no_verdict_is_overruled(path):
    """The launcher's verdict on a failed job decides, whatever the job has survived before."""
    *said, code = path.read_text().splitlines()
    if code != "exit code: 1":
        assert code in {"exit code: 0", "exit code: 2", "exit code: 75", "exit code: 130"}
        return
    survived = [REFUSED, *STEPS[:3]]
    lines = [
        line if line.startswith((" ", "thread", "The Python")) else f"mpiddp: {line}"
        for line in said
    ]
    first, *_ = found_in([*survived, *lines])
    assert first.number > len(survived)


def test_the_table_is_complete():
    """Each row has a text of the real program, sentences that fit a line, and commands that exist."""
    assert {path.stem for path in LOGS.glob("*.log")} == {row.split("\t")[0] for row in CAUSES}
    assert {path.name.partition(".")[0] for path in TEXTS.glob("*.txt")} == set(BY_ID)
    assert len(BY_ID) == len(FAILURES) >= 60
    for row in FAILURES:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", row.id)
        assert row.program
        assert row.blames in ("", "host", "another rank"), row.id
        assert all(row.says), row.id
        assert 0 < len(row.cause) < 260, row.id
        assert 0 < len(row.fix) < 260, row.id
        assert row.cause.endswith("."), row.id
        for verb in re.findall(r"mpiddp ([a-z]+) (?=[-A-Za-z])", row.fix):
            assert verb in VERBS, row.id


@pytest.mark.parametrize(
    ("sentence", "resume"),
    [
        ("stopped on request.", "mpiddp launch train.py --resume"),
        ("interrupted: the job was stopped.", ""),
        ("interrupted: the terminal hung up, and the job was stopped.", ""),
    ],
)
def test_a_stopped_job_has_not_failed(sentence, resume, tmp_path, command):
    """What its ranks print while they end, such as the traceback of a KeyboardInterrupt, is no failure."""
    log = tmp_path / "train.log"
    lines = [*CAUGHT.format(function="<module>").split("\n"), f"mpiddp: {sentence}"]
    log.write_text("\n".join([*lines, *([f"mpiddp: to resume: {resume}"] if resume else []), ""]))
    code, out, err = command(log)
    first, second, *rest = out.splitlines()
    assert (code, err, first) == (1, "", f"{log}:{len(lines)}: mpiddp: {sentence}")
    assert second == "The job did not fail: it was stopped on request."
    assert rest == ([f"To resume: {resume}"] if resume else [])
    log.write_text("\n".join([*lines, VERDICT, ""]))  # it has failed after all
    assert "did not fail" not in command(log)[1]


def test_a_report_is_read_and_not_its_prose(tmp_path, command):
    """The file of launch --report says how the job ended, in whatever words, and what mends it."""
    report = Report("job", paths=[path := tmp_path / "report.json"])
    assert command(path) == (1, f"{path}: no failure: the job is running.\n", "")
    known = with_fix('"Killed" has a known cause. Linux: the memory was full.', "a smaller batch")
    report.end(Outcome(1, "whatever the launcher says.", 1, "n2", known_cause=known), None)
    ended, cause, remedy = command(path)[1].splitlines()
    assert (ended, remedy) == (f"{path}: whatever the launcher says.", "Fix:  a smaller batch")
    assert cause.endswith("the memory was full.")
    report.end(Outcome(1, "whatever the launcher says."), None)
    code, out, _ = command(path)
    assert (code, "No known failure. " in out) == (1, True)


UNKNOWN = "No known failure. "
TWO_HOSTS = "\n".join(with_fix(f"node{n}: no x.", f"fix of node{n}") for n in (1, 2))
HANG = "rank 1 on node1 has not entered all_reduce no. 31."
REPORTED = [
    (Outcome(1, "the ranks differ:\nfc.weight  0.1  0.2"), 1, UNKNOWN),
    (Outcome(2, TWO_HOSTS), 0, "Fix:  fix of node1\n      fix of node2\n"),
    (Outcome(2), 1, UNKNOWN),
    (Outcome(1, "rank 0 failed.", known_cause="ParsingError: a\n\t[line 2]."), 0, UNKNOWN),
    (Outcome(130, f"interrupted: the job hung, and was stopped: {HANG}"), 0, "python-hang: "),
    (Outcome(130, "interrupted: the job was stopped."), 1, "no failure: the job is interrupted."),
]


@pytest.mark.parametrize(("outcome", "code", "said"), REPORTED)
def test_a_report_has_no_fix_that_is_none(outcome, code, said, tmp_path, command):
    """Whatever the launcher says, in however many lines, the report has it, and each fix once."""
    Report("job", paths=[path := tmp_path / "report.json"]).end(outcome, None)
    facts = json.loads(path.read_text())
    assert facts["fix"] == ("fix of node1\nfix of node2" if outcome.sentence == TWO_HOSTS else None)
    assert "\n".join(filter(None, [facts["error"], facts["known_cause"]])) == "\n".join(
        line
        for line in f"{outcome.sentence}\n{outcome.known_cause}".strip().splitlines()
        if not line.startswith("  fix: ")
    )
    ended, out, err = command(path)
    assert (ended, err, said in out, "None" in out) == (code, "", True, False)


@pytest.mark.parametrize("text", ['"error": 5', '"error": "x', '"error": ' + "[" * 9999, ""])
def test_a_report_of_another_version_or_a_part_of_one(text, tmp_path, command):
    """It is explained without the sentences that it lacks, or refused in one sentence."""
    path, begin = tmp_path / "report.json", as_json("launch", {"cause": "failed"})[:-2]
    path.write_text(f"{begin}, {text}}}" if text else f"{begin}}}")
    code, out, err = command(path)
    assert "Traceback" not in err
    assert (code, out) == (2, "") if text else code == 1 and UNKNOWN in out


HELD_OUT = [
    line.split("\t")
    for line in (TEXTS / "held_out" / "sources.tsv").read_text(encoding="utf-8").splitlines()[1:]
]


def test_the_measure_of_the_table_is_true():
    """docs/evidence/proved.md counts the held-out outputs whose cause is named."""
    found = {
        path.stem: found_in(path.read_text().splitlines()) for path in TEXTS.glob("held_out/*.txt")
    }
    first = {name: rows[0].failure.id if rows else "-" for name, rows in found.items()}
    assert first == {name: id for name, _, _, id, _ in HELD_OUT}
    judged = Counter(judgement for *_, judgement in HELD_OUT)
    named, wrong, neither = (judged[each] for each in ("named", "wrong", "not named"))
    page = " ".join((ROOT / "docs/evidence/proved.md").read_text(encoding="utf-8").split())
    assert f"without these {len(HELD_OUT)} outputs" in page
    assert f"the cause of {named}, a wrong cause for {wrong}, and no cause for {neither}." in page


@pytest.mark.parametrize(
    "prefix",
    [
        *(
            "",
            "[rank3]: ",
            "[1,0]<stderr>:",
            "[rank 3 node2] ",
            "3: ",
            "\x1b[31m",
            "100%|███| 9/9\r",
        ),
        "2026-11-29 23:59:01 [rank 3 node2] ",  # as of --timestamps
        "Nov 29 23:59:01 node2 mpiddp[4711]: ",  # of journald
        "2026-11-29T23:59:01.123456789Z 3: ",  # of kubectl logs --timestamps
    ],
)
def test_a_launchers_prefix_does_no_harm(prefix):
    log = [f"{prefix}ValueError: 3 channels\n", f"{prefix}Killed\n"]
    assert [row.failure.id for row in found_in(log)] == ["own-error", "system-killed"]
    shown = found_in(log)[0].line
    assert shown == "ValueError: 3 channels"


@given(st.lists(st.binary(max_size=200), max_size=20))
@settings(max_examples=200)
def test_any_bytes_are_searched(pieces):
    noise = b"".join(piece.replace(b"\n", b"") for piece in pieces)
    log = noise + b"\n" + noise + b"\nHost key verification failed.\n" + noise
    rows = explain_file(io.BytesIO(log)).explanations
    assert [row.number for row in rows if row.failure.id == "ssh-host-key-unknown"] == [3]
    text = log.decode("utf-8", "surrogateescape")
    assert explain(text.split("\n")) is not None


@pytest.fixture
def command(capsys):
    """`mpiddp explain LOG`: its exit code, stdout and stderr."""

    def run(log):
        code = cli.main(["explain", str(log)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_fix_has_the_words_of_the_line(tmp_path, command):
    log = tmp_path / "train.log"
    log.write_text("ModuleNotFoundError: No module named 'tqdm.auto'\n")
    assert "-m pip install tqdm. If" in command(log)[1]


def test_a_log_is_explained_with_its_line_and_its_fix(tmp_path, command):
    log = tmp_path / "train.log"
    seen = "ORTE was unable to reliably start one or more daemons."
    log.write_text(f"step 1\nHost key verification failed.\n{seen}\n")
    code, out, err = command(log)
    row = BY_ID["ssh-host-key-unknown"]
    assert (code, err) == (0, "")
    assert out == (
        f"{log}:2: Host key verification failed.\n"
        f"{row.id}: {row.cause}\n"
        f"Fix:  {row.fix}\n"
        "\n"
        "Also seen:\n"
        f"  line 3: mpi-host-not-started ({seen})\n"
    )
