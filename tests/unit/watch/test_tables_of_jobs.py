"""The tables of `mpiddp ps` and `mpiddp top`, from the reports of ranks, and which job a name means.

Tests mpiddp/watch, mpiddp/launch/status.py.
python -m pytest tests/unit/watch/test_tables_of_jobs.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

import mpiddp
from mpiddp.errors import UserError
from mpiddp.launch.events import Event, Record
from mpiddp.launch.status import job_facts
from mpiddp.watch import jobs, stop_and_stacks
from mpiddp.watch.jobs import Job
from mpiddp.watch.table import head_lines, job_lines, rank_lines, sorted_ranks
from tests.support.channels import progress
from tests.support.errors import error


@pytest.fixture(name="facts")
def facts_of_a_job():
    """A job of four ranks on two hosts: two make steps, one saves, one has not started."""
    record = Record(("a", "a", "b", "b"))
    for rank in (0, 1, 2):
        record.add(Event("started", rank, {"host": "ab"[rank // 2], "pid": 10 + rank}, 0.0))
        record.add(Event("joining", rank, {"timeout_s": 60}, 0.0))
    for second in range(10):
        for rank, own in ((0, 0.1), (1, 0.9)):
            facts = progress(second * 2, own_s=second * own)
            record.add(Event("progress", rank, facts, 100.0 + second))
    record.add(Event("saving", 2, {"active": True}, 101.0))
    latest = {0: b"epoch 1\n 10%\r 20%\x1b[2J\n\n", 2: b"\xff\n"}
    job = {"pid": 7, "name": "train.py", "age_s": 720.0, "attempt": 2, "phase": "running"}
    facts = job_facts(record, latest, 112.0) | job
    decoded: dict[str, Any] = json.loads(json.dumps(facts))
    return decoded


def test_every_rank_has_a_line(facts):
    assert head_lines(facts) == [
        "train.py (pid 7), running, 4 ranks on 2 hosts, step 18, 2/s, attempt 2, 12 min"
    ]
    assert rank_lines(sorted_ranks(facts, "rank", "")) == [
        "RANK  HOST  STATE     STEP  RATE     OWN    WAIT  CPU  MEMORY  AGO  LAST LINE",
        "   0  a     running     18   2/s   50 ms  450 ms  10%  1.1 GB  3 s   20%\\x1b[2J",
        "   1  a     running     18   2/s  450 ms   50 ms  90%  1.1 GB  3 s",
        "   2  b     saving       -     -       -       -    -       -    -  \ufffd",
        "   3  b     starting     -     -       -       -    -       -    -",
    ]


def reading(rank, use, **more):
    facts = {"rank": rank, "use": use, "memory": 40 << 30, "memory_total": 80 << 30}
    return facts | {"temperature": 61, "slowed": "", **more}


def test_the_gpus_of_ranks_have_columns_and_one_that_idles_a_sentence():
    record = Record("ab")
    for rank in (0, 1):
        record.add(Event("joining", rank, {"timeout_s": 60}, 0.0))
    facts: dict[str, Any] = {}
    for idle in (98, 3, 2, 9):
        assert not facts or facts["idle_gpus"] == ""
        use = [reading(0, 97), reading(1, idle, temperature=88, slowed="heat")]
        record.add(Event("gpus", 0, {"ranks": use}, 1.0))
        facts = job_facts(record, {}, 2.0) | {"pid": 7, "name": "train.py", "age_s": 9.0}
    said = "the GPU of rank 1 on b idles, and those of the others are in use (97%)."
    assert head_lines(facts)[1:] == [said]
    table = [line.split() for line in rank_lines(sorted_ranks(facts, "gpu", ""))]
    assert table[0][-7:] == ["GPU", "GPU-MEMORY", "TEMP", "SLOWED", "AGO", "LAST", "LINE"]
    assert [" ".join(row[-7:]) for row in table[1:]] == [
        "9% 42.9 GB 88 °C heat -",
        "97% 42.9 GB 61 °C - -",
    ]
    summary = {"use": 28.0, "memory": 40 << 30, "temperature": 88, "memory_total": 80 << 30}
    assert record.gpus[1].summary == {**summary, "slowed": ["heat"]}
    silent = reading(0, None, memory=None, memory_total=None, temperature=None)
    record.add(Event("gpus", 0, {"ranks": [silent, reading(1, 0)]}, 1.0))
    ranks = sorted_ranks(job_facts(record, {}, 2.0), "gpu", "")
    rows = [" ".join(line.split()[-6:]) for line in rank_lines(ranks)[1:]]
    assert rows == ["0% 42.9 GB 61 °C -", "- - - - - -"]
    for _ in range(3):
        record.add(Event("gpus", 0, {"ranks": [reading(0, 1), reading(1, 1)]}, 1.0))
    assert job_facts(record, {}, 2.0)["idle_gpus"] == "the GPUs of rank 0 on a, rank 1 on b idle."


def test_the_state_of_a_rank_is_that_of_its_latest_report():
    record = Record("abcde")
    for rank, kind in enumerate(("done", "exited", "lost", "started")):
        record.add(Event(kind, rank, {"host": "a", "silent": False}, 0.0))
    states = [facts["state"] for facts in job_facts(record, {}, 1.0)["ranks"]]
    assert states == ["done", "done", "failed", "joining", "starting"]


def test_ranks_are_sorted_and_those_of_a_host_are_chosen(facts):
    def ranks(sort, host=""):
        return [rank["rank"] for rank in sorted_ranks(facts, sort, host)]

    assert ranks("own") == [1, 0, 2, 3]
    assert ranks("wait") == [0, 1, 2, 3]
    assert ranks("rank", "b") == [2, 3]


def test_jobs_have_a_line_each_also_one_that_does_not_answer(facts):
    assert job_lines([Job(Path(), 7, "train.py", facts), Job(Path(), 8, "b.py", {})]).split(
        "\n"
    ) == [
        "PID  NAME      HOSTS  RANKS  STEP  RATE  STATE      AGE",
        "  7  train.py  a,b        4    18   2/s  running    12 min",
        "  8  b.py      -          -     -     -  no answer  -",
    ]


def test_a_job_is_named_by_its_pid_or_its_name(monkeypatch):
    found = [Job(Path(), pid, name, {}) for pid, name in ((7, "a.py"), (8, "b.py"), (9, "b.py"))]
    monkeypatch.setattr(jobs, "running_jobs", lambda: found)
    assert jobs.find_job("a.py") is jobs.find_job("7") is found[0]
    for name, sentence in {
        None: error("several jobs", ": 7 (a.py), 8 (b.py), 9 (b.py)."),
        "b.py": error("several jobs", ": 8 (b.py), 9 (b.py)."),
        "c": error("There are", " c.", ": 7 (a.py), 8 (b.py), 9 (b.py)."),
    }.items():
        with pytest.raises(UserError, match=rf"^{sentence}$"):
            jobs.find_job(name)
    found.clear()
    with pytest.raises(UserError, match=error("yours runs")):
        jobs.find_job(None)


def test_a_rank_without_a_step_for_ten_of_its_steps_is_quiet_and_its_rate_falls():
    record = Record(("a",))
    record.add(Event("started", 0, {"host": "a", "pid": 7}, 0.0))
    record.add(Event("joining", 0, {"timeout_s": 60}, 0.0))
    for second in range(3):
        record.add(Event("progress", 0, progress(second), float(second)))
    running, quiet = (job_facts(record, {}, at)["ranks"][0] for at in (11.0, 42.0))
    assert (running["state"], running["rate"]) == ("running", 1.0)
    assert (quiet["state"], quiet["rate"]) == ("quiet", 1 / 40)


def test_a_stack_begins_where_the_script_is(monkeypatch, capsys):
    ours = Path(mpiddp.__file__).with_name("__main__.py")
    stack = (
        "thread MainThread:\n"
        '  File "<frozen runpy>", line 198, in _run_module_as_main\n'
        f'  File "{ours}", line 7, in <module>\n    sys.exit(main())\n'
        '  File "/home/me/mpiddp/train.py", line 3, in <module>\n    main()\n'
    )
    job = Job(Path("x"), 7, "train.py", {"ranks": [{}]})
    answer = {"sentence": "rank 0 is in main.", "stacks": {"0": stack}}
    monkeypatch.setattr(Job, "ask", lambda self, view: answer)
    monkeypatch.setattr(stop_and_stacks, "find_job", lambda name: job)
    assert stop_and_stacks.stacks(["--rank", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[2:4] == [
        "thread MainThread:",
        '  File "/home/me/mpiddp/train.py", line 3, in <module>',
    ]
