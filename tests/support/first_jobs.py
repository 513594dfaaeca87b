"""Small jobs that print who they are, or sleep until somebody ends them."""

from __future__ import annotations

import subprocess

from tests.support.ranks import LAUNCH, ROOT, clean_env

PRINT_IDENTITY = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
print(json.dumps([[int(os.environ[name]) for name in names], sys.argv[1:], os.getcwd()]), flush=True)
"""
SLEEP = """
import os, signal, sys, time
if "ignores_sigterm" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"received\\n"))  # a print may be under way
print("ready", flush=True)
time.sleep(1000)
"""


def started(arguments: list[str]) -> subprocess.Popen[str]:
    """A launcher whose two ranks have printed that they are ready."""
    launcher = subprocess.Popen(
        [*LAUNCH, *arguments],
        env=clean_env(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    return launcher
