"""A rank of a benchmark sends its results to the launching process as one marked line of stdout.

mpirun forwards stdout from every host, so the hosts need no shared file system.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

Result = dict[str, Any]  # JSON; the two ends of a benchmark use the same keys

_MARK = "mpiddp-bench: "


def emit(result: Result) -> None:
    print(_MARK + json.dumps(result), flush=True)


def read_results(lines: Iterable[str]) -> list[Result]:
    """Read the results among the lines of a job's stdout."""
    marked = (line.partition(_MARK) for line in lines)
    return [json.loads(text) for _, mark, text in marked if mark]
