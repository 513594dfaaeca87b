"""The known cause of a failed job, by what its ranks and mpirun have printed on stderr.

Only a failure needs the table of `mpiddp.explain`, which takes some 50 ms to load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpiddp.errors import FAILED
from mpiddp.launch.streams.tail import Tail
from mpiddp.launch.supervise.verdict import (
    FirstFailure,
    History,
    Verdict,
    host_at_fault,
    says_cause,
)

if TYPE_CHECKING:
    from mpiddp.explain.explain import Explanation

# Rows whose cause is the host of the rank that failed first, whatever its script does.
OF_THE_HOST = ("cuda-hardware", "cuda-fabric-manager", "cuda-driver-mismatch", "system-disk-failed")


def look_into(history: History, found: Verdict, tail: Tail, kill: str = "") -> tuple[str, str]:
    """The known cause of a failure, as a sentence, and the host that is at fault; "" for unknown.

    Args:
        kill: of the kernel, for lack of memory, see `mpiddp.launch.supervise.kernel_kills`.
    """
    if found.code != FAILED:
        return "", ""
    if kill:
        return kill, ""  # the job needs more memory than it was given
    host = host_at_fault(history)
    cause = None if says_cause(history) else known_cause(found.first, tail)
    if cause is None:
        return "", host
    row = cause.failure
    if row.id in OF_THE_HOST and found.first:
        host = history.ranks.hosts[found.first.rank]
    sentence = (
        f'"{cause.line}" has a known cause. {row.program}: {row.cause} Fix: {row.fix} '
        f"More: docs/troubleshooting.md#{row.id}"
    )
    return sentence, host


def known_cause(first: FirstFailure | None, tail: Tail) -> Explanation | None:
    """The known failure that explains the end of the job; None if no row of the table does.

    The words of the rank that failed first count before those of the others. An exception of its own that no
    row knows is its cause: then whatever the others have printed is none.
    """
    try:
        from mpiddp.explain.explain import explain
        from mpiddp.explain.failures import Weight
    except (ImportError, OSError):  # no files left, or the installation has changed
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
