"""The state of a process at the first line of its script: few modules, and torch out of the collector's way.

python -m pytest tests/integration/runtime/test_first_line.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mpiddp.hosts.gpus import VISIBLE  # a rank with a choice of GPUs imports more
from tests.support.ranks import LAUNCH, run_command, script

LOOK = """
import gc, json, os, sys, weakref
visited = {id(each) for each in gc.get_objects()}
class Node: pass
node = Node(); node.self = node; seen = weakref.ref(node); del node; gc.collect()
modules = [name for name in sys.modules if name.startswith("mpiddp.")]
found = {
    "torch is imported": "torch" in sys.modules,
    "torch is visited": id(vars(sys.modules.get("torch", sys))) in visited,
    "garbage is collected": gc.isenabled() and seen() is None,
    "modules": [name for name in modules if not hasattr(sys.modules[name], "__path__")],
}
os.write(1, f"{json.dumps(found)}\\n".encode())
"""


@pytest.mark.parametrize(
    ("command", "most"),
    [((*LAUNCH, "-H", "localhost:2"), 15), ((sys.executable, "-m", "mpiddp", "run"), 15)],
    ids=["launch", "alone"],
)
def test_a_script_begins_after_few_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], most: int
) -> None:
    """The garbage collector does not visit torch's objects."""
    for name in VISIBLE:
        monkeypatch.delenv(name, raising=False)
    done = run_command([*command, script(tmp_path, LOOK)])
    assert done.returncode == 0, done.stderr
    for found in map(json.loads, done.stdout.splitlines()):
        modules = found.pop("modules")
        assert len(modules) <= most, modules
        assert not [name for name in modules if name.startswith("mpiddp.runtime.torch")]
        visits = {"torch is imported": True, "torch is visited": False}
        assert found == {**visits, "garbage is collected": True}


HIDES_TORCH = """
import os, sys
name = "tor" + "ch"
before = name in sys.modules
group = getattr(__builtins__, "__imp" + "ort__")(f"{name}.distributed").distributed
group.init_process_group("gloo")
os.write(1, f"{before} {group.get_world_size()}\\n".encode())
group.destroy_process_group()
"""


def test_a_script_that_does_not_name_torch_begins_without_it(tmp_path: Path) -> None:
    """It may still import it: then rank 0's own process serves the store."""
    done = run_command([*LAUNCH, "-H", "localhost:2", script(tmp_path, HIDES_TORCH)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False 2"] * 2
