"""`mpiddp explain`: what a saved log says about why a job failed.

mpiddp explain train.log
squeue --me; mpiddp explain slurm-4711.out
mpirun -n 4 python train.py 2>&1 | tee train.log | mpiddp explain -
"""

from __future__ import annotations

import os
import sys
from typing import BinaryIO

from mpiddp.arguments import OneSentenceParser
from mpiddp.doctor.explanations import Explanation, explain_file
from mpiddp.errors import DONE, FAILED, UserError
from mpiddp.text import escaped

_PAGE = "docs/troubleshooting.md"
_SAMPLE = 4096  # bytes that show whether a file is text
_CONTROLS = bytes(range(9)) + bytes(range(14, 27)) + bytes(range(28, 32))
_MOST_CONTROLS = 0.05  # of a text: Open MPI writes a NUL here and there


def main(argv: list[str]) -> int:
    """Run `mpiddp explain ARGV`. Returns 0 if a known failure was found, 1 if not.

    Raises:
        UserError: bad usage, or no log that can be read.
    """
    parser = OneSentenceParser(
        prog="mpiddp explain",
        description="Say which known failures a log shows: the root cause, what mends it, and what else it "
        "shows. For logs of mpiddp, mpirun, torchrun and Slurm.",
        epilog="Exit codes: 0 explained, 1 nothing known in it, 2 no such log.",
        allow_abbrev=False,
    )
    parser.add_argument("log", metavar="LOGFILE", help="a file, or - for stdin")
    name: str = parser.parse_args(argv).log
    found = _explained(name)
    if not found:
        print(
            f"{escaped(name)}: no known failure in it. To ask somebody, send the command and the first error "
            "with 20 lines around it. NCCL_DEBUG=WARN and TORCH_DISTRIBUTED_DEBUG=DETAIL add facts."
        )
        return FAILED
    print(_report(name, found))
    return DONE


def _explained(name: str) -> list[Explanation]:
    try:
        if name == "-":
            return explain_file(_text(name, sys.stdin.buffer))
        with open(name, "rb") as file:  # noqa: PTH123 - a Path would change //server/log
            return explain_file(_text(name, file))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = (
            os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        )
        raise UserError(f"{escaped(name)} cannot be read ({reason}).") from None


def _text(name: str, file: BinaryIO) -> BinaryIO:
    """The file, if its beginning is text."""
    sample = file.peek(_SAMPLE)[:_SAMPLE]  # type: ignore[attr-defined]
    if len(sample) - len(sample.translate(None, _CONTROLS)) > _MOST_CONTROLS * len(sample):
        raise UserError(
            f"{escaped(name)} is not text. If it is compressed: zcat FILE | mpiddp explain -"
        )
    return file


def _report(name: str, found: list[Explanation]) -> str:
    first, *others = found
    failure = first.failure
    lines = [
        f"{escaped(name)}:{first.number}: {first.line}",
        f"{failure.program}: {failure.cause}",
        f"Mend it: {failure.mend}",
        f"More:    {_PAGE}#{failure.id}",
    ]
    if others:
        lines += ["", "Also found; these may be consequences:"]
        lines += [
            f"  line {other.number}: {other.failure.id} ({other.line[:60]})" for other in others
        ]
    return "\n".join(lines)
