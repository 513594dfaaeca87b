"""A fault of the launcher itself: what only looks on is dropped, and any other error still cleans up."""

import json
import shlex
import sys

import pytest

from tests.support.patience import eventually

# A real launch, in which a part of the launcher raises an error from the first step on.
LAUNCHES = """
import sys
from mpiddp.launch.main import main
from mpiddp.launch.run import {module} as module
part = module.{part}
before = getattr(part, {method!r})
def fails(self, *args):
    if self.{record}.paces:
        raise LookupError("no such rank")
    return before(self, *args)
setattr(part, {method!r}, fails)
sys.exit(main(sys.argv[1:]))
"""
STEPS = """
import sys, time, mpiddp
for step in range(30):
    mpiddp.progress(step)
    print(f"step {step}", flush=True)
    time.sleep(0.1)
"""


def launch(place, module, part, method, *options, record="record"):
    code = LAUNCHES.format(module=module, part=part, method=method, record=record)
    driver = place.script(code, "driver.py")
    job = (*place.where(2), *options, place.script(STEPS))
    return place.run(sys.executable, driver, *job)


@pytest.mark.parametrize(
    ("part", "method"),
    [
        ("Stragglers", "look"),
        ("Hangs", "on_event"),
        ("GraceTime", "look"),
        ("RecordFile", "on_event"),
    ],
)
def test_a_watcher_that_fails(here, part, method):
    """What only looks on cannot end a job: it is dropped, which one line says, and the job goes on."""
    done = launch(here, "watchers", part, method).assert_ok()
    failed = f"the launcher's {part} has failed (LookupError: no such rank (driver.py:9))."
    assert done.said == [f"{failed} The job goes on without it."]
    assert done.lines[-1] == "step 29"


def test_a_launcher_that_fails(hosts):
    """Whatever ends the launcher, the report says so, --on-end runs, and no process of the job is left."""
    on_end = hosts.script("open('ended', 'a').write('x')", "on_end.py")
    end = ("--report", "report.json", "--on-end", shlex.join([sys.executable, on_end]))
    done = launch(hosts, "attempt", "Attempt", "look", *end).assert_code(1)
    sentence = "the launcher itself has failed: LookupError: no such rank (driver.py:9)."
    assert sentence in done.said
    assert "Traceback" in done.stderr
    report = json.loads((hosts.folder / "report.json").read_text())
    assert (report["cause"], report["error"]) == ("failed", sentence)
    assert (hosts.folder / "ended").read_text() == "x"
    eventually(lambda: not hosts.processes())
