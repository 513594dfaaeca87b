"""A rank of a benchmark sends what it measured to the launching process as one marked line of stdout.

mpirun carries stdout from every host, so the hosts need to share nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

Result = dict[str, Any]  # JSON, whose keys the two ends of a benchmark agree on

_MARK = "mpiddp-bench: "


def emit(result: Result) -> None:
    print(_MARK + json.dumps(result), flush=True)


def read_results(lines: Iterable[str]) -> list[Result]:
    """The results among the lines of a job's stdout."""
    marked = (line.partition(_MARK) for line in lines)
    return [json.loads(text) for _, mark, text in marked if mark]
