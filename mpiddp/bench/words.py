"""What a rank of a benchmark has found goes to the launching process as one marked line of stdout.

mpirun carries stdout from every host, so nothing has to be shared between them.
"""

from __future__ import annotations

import json
from typing import Any

MARK = "mpiddp-bench: "


def emit(found: dict[str, Any]) -> None:
    print(MARK + json.dumps(found), flush=True)


def parse(line: str) -> dict[str, Any] | None:
    """What a rank has emitted, None for a line that is something else."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    found: dict[str, Any] = json.loads(text)
    return found
