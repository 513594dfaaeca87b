"""A failed job's verdict is followed by the known cause of what its ranks printed, and by no guess.

Tests mpiddp/launch/supervise/known_cause.py.
python -m pytest tests/ranks/launch/test_cause_of_failure.py
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mpiddp.explain.failures import FAILURES
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, launch, script

HOSTS = ("-H", "localhost:2")
FULL = "open('/dev/full', 'w').write('x' * 100_000)"
OTHER = "raise ValueError('3 channels')"


def causes(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if " has a known cause. " in line]


def test_the_known_cause_stands_below_the_verdict(tmp_path: Path) -> None:
    done = launch(*HOSTS, script(tmp_path, FULL))
    row = next(failure for failure in FAILURES if failure.id == "system-disk-full")
    verdict, cause = done.stderr.splitlines()[-2:]
    assert done.returncode == 1
    assert verdict.endswith("No space left on device. The other ranks were stopped.")
    assert cause == (
        'mpiddp: "OSError: [Errno 28] No space left on device" has a known cause. '
        f"The system: {row.cause} Mend it: {row.fix} More: docs/troubleshooting.md#{row.id}"
    )
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert f"### {row.id}\n" in page


def test_each_attempt_has_its_own(tmp_path: Path) -> None:
    done = launch(*HOSTS, "--max-restarts", "1", script(tmp_path, FULL))
    assert done.returncode == 1
    assert len(causes(done.stderr)) == 2


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (OTHER, 1),
        # Another rank's words are no cause of the first rank's own error.
        (f"import os, sys\nif os.environ['RANK'] == '0': {OTHER}\n"
         "print('Host key verification failed.', file=sys.stderr)\nsys.stdin.read()", 1),
        # Whatever a job prints that has not failed.
        ("import sys; print('Host key verification failed.', file=sys.stderr)", 0),
    ],
    ids=["unknown", "of another rank", "success"],
)  # fmt: skip
def test_nothing_is_said_without_a_known_cause(tmp_path: Path, text: str, code: int) -> None:
    done = launch(*HOSTS, script(tmp_path, text))
    assert done.returncode == code, done.stderr
    assert causes(done.stderr) == []


def test_a_rank_that_is_not_shown_is_explained_by_its_error(tmp_path: Path) -> None:
    done = launch(*HOSTS, "--log-ranks", "none", script(tmp_path, FULL))
    assert len(causes(done.stderr)) == 1, done.stderr


def test_a_kill_for_lack_of_memory_is_said_with_its_limit(tmp_path: Path) -> None:
    memory = Path("/sys/fs/cgroup/memory")
    if os.geteuid() != 0 or not (memory / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and the memory controller of cgroup v1")
    group = memory / f"mpiddp-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(3 << 29))
        path = script(tmp_path, "import os\nif os.environ['RANK'] == '1': bytearray(3 << 30)")
        enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        done = subprocess.run(
            [*enter, *LAUNCH, *HOSTS, path],
            env=clean_env(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    finally:
        group.rmdir()
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "mpiddp: the kernel has killed a process here since the start, because its control group's limit of "
        "1.6 GB was reached (oom_kill). Mend it: "
    )
