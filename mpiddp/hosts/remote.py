"""A program of ours on another host, which has none of our modules: it brings their sources along.

program = program_that_prints((interfaces, gpus, facts), "links()")
found, failures, answers = ask_hosts(hosts, program, timeout_s=30)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import Answer, Logins, no_answer, run_on_hosts
from mpiddp.hosts.transport import SSH, Transport

INSTALL = "Install it there."  # a Python
# The first lines of each program.
CHECK_PYTHON = """
import sys
if sys.version_info < (3, 8):
    sys.exit("it is Python %d.%d, and 3.8 or newer is needed" % sys.version_info[:2])
"""
_LOAD = """
import types
for name, source in SOURCES.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), module.__dict__)
"""


def program_that_prints(modules: Sequence[ModuleType], call: str) -> str:
    """A program that prints the JSON of a call of a function of the last one of `modules`. It is ASCII.

    Each module stands after those that it imports.
    """
    sources: dict[str, str] = {}
    for module in modules:
        # The names by which they import each other, with empty parent packages.
        for name in accumulate(module.__name__.split("."), "{}.{}".format):
            sources.setdefault(name, "")
        sources[module.__name__] = Path(str(module.__file__)).read_text(encoding="utf-8")
    then = f"import json; print(json.dumps(sys.modules[{modules[-1].__name__!r}].{call}))"
    return f"{CHECK_PYTHON}\nSOURCES = {sources!a}\n{_LOAD}{then}\n"


def ask_hosts(
    hosts: Sequence[Host],
    program: str,
    *,
    timeout_s: float | None = None,  # that of a login
    work_s: float = 0.0,
    python: str = "python3",
    transport: Transport = SSH,
    fix: str = INSTALL,  # for a host without that Python
    logins: Logins | None = None,
) -> tuple[dict[Host, Any], dict[Host, str], dict[Host, Answer]]:
    """The JSON that `program` prints, a sentence for each other host, and all answers."""
    more: dict[str, Any] = {"timeout_s": timeout_s, "work_s": work_s, "logins": logins}
    answers = run_on_hosts(hosts, python, program, **more, transport=transport)
    found, failures = dict[Host, Any](), dict[Host, str]()
    for host, answer in answers.items():
        for line in answer.stdout.splitlines() if answer.exit_code == 0 else ():
            with suppress(ValueError):  # a shell of the host may print lines around it
                found[host] = json.loads(line)
        if host not in found:
            failures[host] = no_answer(host, python, answer, timeout_s, fix, transport)
    return found, failures, answers
