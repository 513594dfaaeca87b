"""How a rank imports torch: its modules are no garbage, and the collector does not visit them again.

Tests mpiddp/runtime/rendezvous/meet.py. python -m pytest tests/ranks/runtime/test_torch_import.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.ranks import LAUNCH, ROOT, clean_env, script

LOOK = """
import gc, sys, weakref
visited = {id(each) for each in gc.get_objects()}
class Node: pass
node = Node(); node.self = node; seen = weakref.ref(node); del node; gc.collect()
print(
    f"torch imported: {'torch' in sys.modules}, enabled: {gc.isenabled()}, "
    f"torch visited: {id(vars(sys.modules.get('torch', sys))) in visited}, "
    f"script visited: {id(globals()) in visited}, collected: {seen() is None}\\n", end="", flush=True
)
"""


@pytest.mark.parametrize(
    "command",
    [[*LAUNCH, "-H", "localhost:2"], [sys.executable, "-m", "mpiddp", "run"]],
    ids=["launch", "alone"],
)
def test_the_collector_visits_a_scripts_objects_and_not_torchs(
    tmp_path: Path, command: list[str]
) -> None:
    done = subprocess.run(
        [*command, script(tmp_path, LOOK)],
        env=clean_env(), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {
        "torch imported: True, enabled: True, torch visited: False, script visited: True, collected: True"
    }
