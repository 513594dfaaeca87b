"""Failures from their records: what the launcher says of each, and its exit code, as in the file beside it.

Most are of real jobs (`tests.support.records` runs them again); the others are of what is hard to provoke.
Tests mpiddp/launch/{events,verdict,watch}.py. No process starts here.
"""

import pytest

from mpiddp.launch.events import Record
from mpiddp.protocol.server import Event
from tests.support.channels import progress
from tests.support.records import FOLDER, JOBS, events, replay

RECORDS = sorted(FOLDER.glob("*.jsonl"))


def test_there_is_a_record_of_each_job():
    assert JOBS.keys() <= {path.stem for path in RECORDS}


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_what_is_said_of_a_record(path):
    assert replay(path) == path.with_suffix(".txt").read_text(encoding="utf-8")


def test_a_record_is_written_as_it_grows_and_read_back(tmp_path):
    path = tmp_path / "logs" / "attempt_2.jsonl"
    written = Record(["a", "b"], path, attempt=2, here=[0])
    written.add(Event("progress", 1, progress(7), 2.5, from_script=True))
    written.note("stop", by="BY_USER", reason="SIGINT", signal=2)
    *_, (read, last) = events(path)
    assert last == written.own("stop")
    assert (read.hosts, read.began_at) == (written.hosts, written.began_at)
    assert read.latest == written.latest
    written.close()
