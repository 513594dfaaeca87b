"""Processes that mpirun leaves behind are killed.

Tests mpiddp/launch/.
python -m pytest tests/integration/launch/test_left_processes.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.patience import PATIENCE_S
from tests.support.ranks import ROOT, clean_env
from tests.support.running import running


def test_processes_that_mpirun_leaves_behind_are_killed(tmp_path: Path) -> None:
    """Even a daemon in its own session that ignores SIGTERM."""
    daemon = tmp_path / "daemon"
    daemon.write_text("#!/bin/sh\ntrap '' TERM\nwhile true; do sleep 0.1; done\n")
    daemon.chmod(0o755)
    supervise(tmp_path, f"setsid {daemon} & sleep 0.3; exit 7", orphans_s=0.3)
    assert running(str(daemon)) == []


def test_a_stopped_process_that_mpirun_leaves_behind_ends_by_itself(tmp_path: Path) -> None:
    """A process that is stopped by SIGSTOP gets the SIGTERM."""
    daemon, ready, ended = (tmp_path / name for name in ("daemon", "ready", "ended"))
    daemon.write_text(f"#!/bin/sh\ntrap 'touch {ended}; exit' TERM\ntouch {ready}\nkill -STOP $$\n")
    daemon.chmod(0o755)
    is_stopped = "$(cut -d' ' -f3 /proc/$!/stat) = T"
    mpirun = f"{daemon} & until [ -e {ready} ] && [ {is_stopped} ]; do sleep 0.05; done; exit 7"
    supervise(tmp_path, mpirun, orphans_s=PATIENCE_S)
    assert ended.exists()


def supervise(folder: Path, mpirun: str, *, orphans_s: float) -> None:
    """Supervise a shell's command line in place of an mpirun. It ends with exit code 7."""
    code = (
        "import sys; from pathlib import Path\n"
        "from mpiddp.launch.options import parse_options\n"
        "from mpiddp.hosts.hostfile import Host, Hosts\n"
        "from mpiddp.launch.starters.command import RankStarter, Request\n"
        "from mpiddp.launch.starters.table import STARTERS\n"
        "from mpiddp.launch.supervise import run\n"
        "from mpiddp.launch.supervise.attempt import Terms\n"
        "from mpiddp.launch.supervise.signals import queued_signals\n"
        f"run.ORPHANS_S = {orphans_s}\n"
        "starter = RankStarter(STARTERS[-2], '4.3.1', Path(sys.argv[1]))\n"
        "hosts = Hosts('a test', (Host('localhost', ranks=1),))\n"
        "request = Request(hosts, ('true',), '.')\n"
        "terms = Terms(parse_options(['--', 'true']))\n"
        "with queued_signals() as signals:\n"
        "    print(run.run_attempt(terms, starter, request, signals).sentence)"
    )
    program = folder / "mpirun"
    program.write_text(f"#!/bin/sh\n{mpirun}\n")
    program.chmod(0o755)
    command = [sys.executable, "-c", code, str(program)]
    done = subprocess.run(
        command, env=clean_env(), cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S
    )
    assert done.stdout == "the job failed: mpirun ended with exit code 7.\n"
