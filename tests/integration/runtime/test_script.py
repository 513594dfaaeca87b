"""A script in its process: its first line, the steps that its optimizers count, its files and its end.

Tests mpiddp/runtime/{script,child,join}.py, and the end of a script alone in checkpoints/checkpoints.py.
"""

import json
import os
import signal
import sys

import pytest

from mpiddp.hosts.gpus import VISIBLE  # a rank with a choice of GPUs imports more
from mpiddp.runtime.child import Child, reap
from mpiddp.runtime.program import COMMAND, Program
from mpiddp.runtime.rank import Rank
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
    [((*LAUNCH, "-H", "localhost:2"), 18), ((sys.executable, "-m", "mpiddp", "run"), 18)],
    ids=["launch", "alone"],
)
def test_a_script_begins_after_few_modules(tmp_path, monkeypatch, command, most):
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


def test_a_script_that_does_not_name_torch_begins_without_it(tmp_path):
    """It may still import it: then rank 0's own process serves the store."""
    done = run_command([*LAUNCH, "-H", "localhost:2", script(tmp_path, HIDES_TORCH)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["False 2"] * 2


FOLDS_AND_A_GAN = """
import torch
from types import SimpleNamespace
from mpiddp.runtime.patches import optimizer_steps

told = []
progress = SimpleNamespace(count=lambda steps, by: told.append(steps))
ranks = SimpleNamespace(has_launcher=True)
session = SimpleNamespace(coordinator=ranks, progress=progress)
optimizer_steps(SimpleNamespace(session=session, imports_torch=True))
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.zeros(1)
for fold in range(3):
    optimizer = torch.optim.SGD([parameter])
    for step in range(2):
        optimizer.step()
print(told)
told.clear()
both = [torch.optim.SGD([parameter]) for _ in range(2)]
for step in range(2):
    for optimizer in both:
        optimizer.step()
print(told)
"""


def test_a_later_optimizer_goes_on_and_two_of_one_step_count_once():
    done = run_command([sys.executable, "-c", FOLDS_AND_A_GAN])
    assert done.stdout == "[1, 2, 2, 3, 3, 4]\n[4, 4, 5, 5]\n"


def test_a_signal_that_comes_before_a_command_reaches_it(monkeypatch):
    child = Child(Rank.from_env(Program(COMMAND, "sleep", ("600",))))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "of a rank that has joined")
    child.pass_on(signal.SIGTERM)
    child.start(os.environ)
    while child.status is None:
        reap()
    assert child.status == -signal.SIGTERM
