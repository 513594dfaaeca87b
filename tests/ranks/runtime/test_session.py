"""A process has one session, which a forked child does not share, and a script begins after few modules.

Tests mpiddp/runtime/job/session.py, mpiddp/runtime/start/run.py.
python -m pytest tests/ranks/runtime/test_session.py
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import mpiddp
from mpiddp.hosts.gpus import VISIBLE  # a rank with a choice of GPUs imports more
from mpiddp.runtime.job.session import current
from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, script

RUNTIME = Path(mpiddp.__file__).parent / "runtime"


def test_a_process_has_one_session() -> None:
    assert current() is current()
    assert current().is_of_this_process


def test_a_forked_child_is_not_a_rank() -> None:
    session = current()
    session.stop.is_requested = True
    child = os.fork()
    if child == 0:
        is_new = current() is not session and not current().stop.is_requested
        os._exit(0 if is_new and not session.is_of_this_process and session.channel is None else 1)
    session.stop.is_requested = False
    assert os.waitpid(child, 0)[1] == 0
    assert current() is session


def test_the_session_is_the_only_mutable_global_of_the_runtime() -> None:
    found = [
        (path.name, name)
        for path in sorted(RUNTIME.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
        for name in node.names
    ]
    assert set(found) == {("session.py", "_current")}


# The modules of mpiddp, without packages, before a script's first line.
COUNT = """
import sys
ours = {name for name, each in sys.modules.items() if name.startswith("mpiddp.")}
print(*sorted(name for name in ours if not hasattr(sys.modules[name], "__path__")))
"""
# What only another way to run, or to meet, needs.
NOT_OF_A_SCRIPT = (
    "command",
    "function",
    "guardian",
    "own_gpu",
    "plain_store",
    "torch_store",
    "address",
)


def modules(*command: str) -> list[str]:
    env = {name: value for name, value in clean_env().items() if name not in VISIBLE}
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[0].split()  # of one rank


def test_a_script_alone_begins_after_few_modules(tmp_path: Path) -> None:
    found = modules(sys.executable, "-m", "mpiddp", "run", script(tmp_path, COUNT))
    assert len(found) <= 30, found
    assert not [name for name in found if name.startswith("mpiddp.runtime.torch")]
    assert not [name for name in found if name.rpartition(".")[2] in ("mpi", "client", "output")]


def test_a_script_under_the_launcher_imports_what_it_needs(tmp_path: Path) -> None:
    found = modules(*LAUNCH, "-H", "localhost:2", "--prefix", "never", script(tmp_path, COUNT))
    assert len(found) <= 38, found
    assert not [name for name in found if name.rpartition(".")[2] in NOT_OF_A_SCRIPT]
    assert not [name for name in found if name.startswith("mpiddp.runtime.torch")]
