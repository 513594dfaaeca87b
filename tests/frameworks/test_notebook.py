"""`mpiddp.spawn` in the cells of a real Jupyter kernel: results, output, an exception, an interrupt.

Tests mpiddp/spawning/launcher.py.
python -m tests.support.frameworks install; python -m pytest tests/frameworks/test_notebook.py
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import frameworks
from tests.support.patience import PATIENCE_S
from tests.support.ranks import ALL_OUTPUT, clean_env

FUNCTIONS = """
import os, sys, time
import mpiddp

FACTOR = 10

def work(shift):
    rank = int(os.environ["RANK"])
    print("out", rank)
    print("err", rank, file=sys.stderr)
    return FACTOR * rank + shift

def fails():
    if os.environ["RANK"] == "1":
        raise LookupError("no such thing")
    time.sleep(1000)

def sleeps():
    print("pid", os.getpid())
    time.sleep(1000)
"""


@dataclass
class Shown:
    """What a cell shows."""

    out: str = ""
    err: str = ""
    result: str = ""
    error: str = ""
    traceback: list[str] = field(default_factory=list)


class Kernel:
    """A running kernel, and a client of it."""

    def __init__(self, manager: Any, client: Any) -> None:
        self.manager = manager
        self._client = client

    def run(self, code: str, *, on_output: Callable[[Shown], None] = lambda shown: None) -> Shown:
        """Execute a cell. `on_output` is called after each piece of output."""
        request = self._client.execute(code)
        shown = Shown()
        deadline = time.monotonic() + PATIENCE_S
        while True:
            message = self._client.get_iopub_msg(timeout=deadline - time.monotonic())
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    name = "out" if content["name"] == "stdout" else "err"
                    setattr(shown, name, getattr(shown, name) + content["text"])
                    on_output(shown)
                case "execute_result":
                    shown.result = content["data"]["text/plain"]
                case "error":
                    shown.error = f"{content['ename']}: {content['evalue']}"
                    shown.traceback = content["traceback"]
                case "status" if content["execution_state"] == "idle":
                    return shown


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    env = clean_env(frameworks.environment("ipykernel"))
    for name in ALL_OUTPUT:
        del env[name]
    sys.path.append(str(frameworks.folder()))
    from jupyter_client.manager import KernelManager

    manager: Any = KernelManager()
    manager.start_kernel(env=env)
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=PATIENCE_S)
        kernel = Kernel(manager, client)
        assert kernel.run(FUNCTIONS).error == ""
        yield kernel
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        sys.path.remove(str(frameworks.folder()))


def test_results_and_output_of_the_ranks_reach_the_cell(kernel: Kernel) -> None:
    shown = kernel.run("mpiddp.spawn(work, 5, hosts='localhost:2', log_ranks='all')")
    assert shown.error == ""
    assert shown.result == "[5, 15]"
    lines = [re.sub(r"^\[rank (\d) \S+\]", r"[\1]", line) for line in shown.out.splitlines()]
    assert sorted(lines) == ["[0] out 0", "[1] out 1"]
    assert re.search(r"^\[rank 1 \S+\] err 1$", shown.err, re.MULTILINE)
    changed = kernel.run("FACTOR = 100\nmpiddp.spawn(lambda: work(1), hosts='localhost:2')")
    assert changed.result == "[1, 101]", changed


def test_an_exception_of_a_rank_is_shown_with_the_line_of_the_cell(kernel: Kernel) -> None:
    shown = kernel.run("mpiddp.spawn(fails, hosts='localhost:2')")
    assert shown.error.startswith("RankFailed: rank 1 on ")
    assert "failed first: LookupError: no such thing." in shown.error
    assert 'raise LookupError("no such thing")' in shown.error
    assert any("LookupError" in part for part in shown.traceback)


def test_the_interruption_of_a_cell_ends_the_job(kernel: Kernel) -> None:
    is_interrupted = []

    def interrupt(shown: Shown) -> None:
        if shown.out.count("pid") == 2 and not is_interrupted:
            is_interrupted.append(True)
            kernel.manager.interrupt_kernel()

    code = "mpiddp.spawn(sleeps, hosts='localhost:2', log_ranks='all')"
    shown = kernel.run(code, on_output=interrupt)
    assert shown.error.startswith("KeyboardInterrupt"), shown
    pids = re.findall(r"pid (\d+)", shown.out)
    assert len(pids) == 2
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert kernel.run("1 + 1").result == "2"
