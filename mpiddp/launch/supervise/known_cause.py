"""The known cause of a failed job, by what its ranks and mpirun have printed on stderr.

Only a failure needs the table of `mpiddp.doctor`, which takes some 50 ms to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpiddp.doctor.memory import OomKills, oom_kills
from mpiddp.errors import FAILED
from mpiddp.hosts.names import is_this_host
from mpiddp.launch.streams.tail import Tail
from mpiddp.launch.supervise.verdict import (
    FirstFailure,
    History,
    Verdict,
    host_at_fault,
    host_of_killed,
    says_cause,
)
from mpiddp.text import size_text

if TYPE_CHECKING:
    from mpiddp.doctor.explanations import Explanation

# Rows whose cause is the host of the rank that failed first, whatever its script does.
OF_THE_HOST = ("cuda-hardware", "cuda-fabric-manager", "cuda-driver-mismatch", "system-disk-failed")


def look_into(
    history: History, found: Verdict, tail: Tail, kills_before: OomKills | None
) -> tuple[str, str]:
    """The known cause of a failure, as a sentence, and the host that is at fault; "" for unknown."""
    if found.code != FAILED:
        return "", ""
    killed_on = host_of_killed(history)
    if killed_on and is_this_host(killed_on) and (kill := oom_sentence(kills_before, oom_kills())):
        return kill, ""  # the job needs more memory than it was given
    host = host_at_fault(history)
    cause = None if says_cause(history) else known_cause(found.first, tail)
    if cause is None:
        return "", host
    row = cause.failure
    if row.id in OF_THE_HOST and found.first:
        host = history.ranks.hosts[found.first.rank]
    sentence = (
        f'"{cause.line}" has a known cause. {row.program}: {row.cause} Mend it: {row.mend} '
        f"More: docs/troubleshooting.md#{row.id}"
    )
    return sentence, host


def known_cause(first: FirstFailure | None, tail: Tail) -> Explanation | None:
    """The known failure that explains the end of the job; None if no row of the table does.

    The words of the rank that failed first count before those of the others. An exception of its own that no
    row knows is its cause: then whatever the others have printed is none.
    """
    try:
        from mpiddp.doctor.explanations import explain
        from mpiddp.doctor.failures import Weight
    except (
        ImportError,
        OSError,
    ):  # this process has no files left, or the installation has changed
        return None
    lines = tail.by_rank()
    own: list[str] = []
    if first is not None:
        own = [*first.error.splitlines(), *lines.pop(first.rank, [])]
        found = explain(own)
        if found and found.failure.weight is Weight.CAUSE:
            return found
        if first.error and (found is None or found.failure.weight is Weight.EXCEPTION):
            return None
    found = explain([*own, *(line for each in lines.values() for line in each)])
    is_cause = found is not None and found.failure.weight in (Weight.CAUSE, Weight.SYMPTOM)
    return found if is_cause else None


def oom_sentence(before: OomKills | None, after: OomKills | None) -> str:
    """What the kernel's count says about the job; "" if it has killed nothing meanwhile."""
    if before is None or after is None or after.count <= before.count:
        return ""
    count, limit = after.count - before.count, after.limit_bytes
    killed = "a process" if count == 1 else f"{count} processes"
    full = f"its control group's limit of {size_text(limit)}" if limit else "this host's memory"
    return (
        f"the kernel has killed {killed} here since the start, because {full} was reached (oom_kill). "
        "Mend it: a smaller batch, fewer DataLoader workers, or more memory. "
        "More: docs/troubleshooting.md#system-out-of-memory"
    )
