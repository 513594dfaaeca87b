"""How a restart resumes a script: by the arguments that it announced, or else by those of --restart-args.

mpiddp sees no save of a script that announces nothing. So the paths in its --restart-args must exist on the
host of rank 0: until then, it has not saved.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from mpiddp.errors import JobFailed
from mpiddp.hosts.ssh import ask_hosts
from mpiddp.launch.judge.events import Announcement
from mpiddp.launch.plan.job_plan import Plan
from mpiddp.text import with_fix

_FIX = "--restart-args '--resume last.pt', or as docs/your-own-script.md says in section 2"
_SUFFIX = re.compile(r"\.[A-Za-z]\w*$")  # not that of a number


def is_known(plan: Plan, latest: Announcement) -> bool:
    """Whether anything has told the launcher how the script resumes. `latest` is the present attempt's word."""
    return bool(plan.options.restart_args) or {plan.past.announced, latest} != {Announcement()}


def anew_sentence(subject: str) -> str:
    why = "nothing told mpiddp how it resumes (unless it finds its checkpoint itself)"
    return with_fix(f"{subject} anew, because {why}.", _FIX)


def added(command: Sequence[str], args: Sequence[str]) -> list[str]:
    """The command with these arguments at its end, where a command that resumes has them already."""
    has_args = bool(args) and [*command[-len(args) :]] == [*args]
    return [*command] if has_args else [*command, *args]


def missing_path(args: Sequence[str], plan: Plan) -> tuple[str, str]:
    """The first path among these arguments that the host of rank 0 lacks, "" if it has all; and that host.

    A word with a slash, or with a suffix such as .pt, is a path. Raises JobFailed if the host does not answer.
    """
    words = [word.partition("=")[2] if word.startswith("-") else word for word in args]
    paths = [word for word in words if "://" not in word and ("/" in word or _SUFFIX.search(word))]
    host = plan.request.hosts.hosts[0]
    if not paths:
        return "", host.name
    exist = f"[*map(os.path.exists, {paths!a})]"
    program = f"import json, os; os.chdir({plan.request.folder!a}); print(json.dumps({exist}))"
    answer = ask_hosts([host], program, transport=plan.request.hosts.transport)[host]
    if answer.why:
        raise JobFailed(answer.why)
    answers = zip(paths, answer.value, strict=True)
    return next((path for path, exists in answers if not exists), ""), host.name


def missing_sentence(path: str, host: str) -> str:
    return (
        f"the script begins anew, because {shlex.quote(path)} of --restart-args is not on {host}."
    )
