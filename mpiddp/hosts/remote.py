"""A program of ours on another host, which has none of our modules: it brings their sources along.

program = program_that_prints((interfaces, gpus, facts), "links()")
found, failures, answers = ask_hosts(hosts, program, work_s=30)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from mpiddp.hosts.complaints import INSTALL, Answer, no_answer
from mpiddp.hosts.hostfile import Host
from mpiddp.hosts.ssh import Logins, run_on_hosts
from mpiddp.hosts.transport import SSH, Transport

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
    work_s: float = 0.0,  # beside the time of a login
    python: str = "python3",
    transport: Transport = SSH,
    fix: str = INSTALL,  # for a host without that Python
    logins: Logins | None = None,
) -> tuple[dict[Host, Any], dict[Host, str], dict[Host, Answer]]:
    """The JSON that `program` prints, a sentence for each other host, and all answers."""
    more: dict[str, Any] = {
        "python": python,
        "work_s": work_s,
        "transport": transport,
        "logins": logins,
    }
    answers = run_on_hosts(hosts, program, **more)
    found, failures = dict[Host, Any](), dict[Host, str]()
    for host, answer in answers.items():
        for line in answer.stdout.splitlines() if answer.exit_code == 0 else ():
            with suppress(ValueError):  # a shell of the host may print lines around it
                found[host] = json.loads(line)
        if host not in found:
            failures[host] = no_answer(host, python, answer, transport, fix)
    return found, failures, answers
