"""`mpiddp explain LOGFILE`: say why a job failed, from its log.

mpiddp explain train.log
mpiddp explain ssh-key-refused                        # a known failure, by its id
squeue --me; mpiddp explain slurm-4711.out
mpirun -n 4 python train.py 2>&1 | tee train.log | mpiddp explain -
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from mpiddp.arguments import OneSentenceParser, Option
from mpiddp.errors import DONE, FAILED, UserError, named_by
from mpiddp.explain.explain import OURS, Explanation, explain, explain_file
from mpiddp.explain.failures import FAILURES, PROGRAMS
from mpiddp.text import as_json, did_you_mean, escaped

_REPORT = as_json("launch", {})[:-2].encode()  # the beginning of a job's own report
_BY_ID = {row.id: row for row in FAILURES}
_TO_ASK = (
    "To ask somebody, send the command and the first error with 20 lines around it. "
    "NCCL_DEBUG=WARN and TORCH_DISTRIBUTED_DEBUG=DETAIL add facts."
)


def main(argv: list[str]) -> int:
    """Run `mpiddp explain ARGV`. Returns 0 if a failure is explained, 1 if not. Raises UserError."""
    parser = OneSentenceParser(
        prog="mpiddp explain",
        description="Say why a job failed, from its log: the root cause, what fixes it, and what else is in "
        "it. For logs of mpiddp, mpirun, torchrun and Slurm. The id of a known failure is explained too.",
        epilog="Exit codes: 0 explained, 1 nothing failed or nothing known in it, 2 no such log.",
    )
    Option(
        "log", value="LOGFILE", help="a log, the file of launch --report, - for stdin, or an id"
    ).add_to(parser)
    name: str = parser.parse_args(argv).log
    if name != "-" and re.fullmatch("[a-z-]+", name) and not Path(name).exists():
        return _explain_id(name)
    # A Path would change //server/log
    with named_by(""), sys.stdin.buffer if name == "-" else open(name, "rb") as file:  # noqa: PTH123
        begin = file.peek(1)  # type: ignore[union-attr]
        if begin.startswith(_REPORT):
            return _explain_report(escaped(name), _read_report(escaped(name), file))
        is_empty, log = not begin, explain_file(file)
    name = "stdin" if name == "-" and is_empty else escaped(name)
    explanations = log.explanations
    if log.stop is not None:
        number, sentence = log.stop
        print(f"{name}:{number}: {sentence}\nThe job did not fail: it was stopped on request.")
        if log.resume:
            print(f"To resume: {escaped(log.resume)}")
        return FAILED
    if explanations and not log.survived:
        return _print_cause(f"{name}:{explanations[0].number}", *explanations)
    if is_empty:
        print(f"{name} is empty.")
    elif explanations:
        first = explanations[0]
        more = f" More: mpiddp explain {first.failure.id}" if first.failure.cause else ""
        print(
            f'{name}: nothing failed for good. Line {first.number} says "{first.line}", but {log.survived}.{more}'
        )
    else:
        last = escaped(log.last_sentence.removeprefix(OURS))
        sentence = f'The last sentence of mpiddp in it is: "{last}". ' if last else ""
        print(f"{name}: no known failure in it. {sentence}{_TO_ASK}")
    return FAILED


def _read_report(name: str, file: BinaryIO) -> dict[str, str]:
    """The sentences of a job's report, "" for each that it lacks. Raises UserError if it is broken."""
    try:
        report = json.load(file)
    except (ValueError, RecursionError):
        raise UserError(f"{name} is a part of a report, or no report.") from None
    keys = ("cause", "error", "known_cause", "fix")
    texts = {key: report.get(key) or "" for key in keys}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise UserError(f'{name}: "{key}" of a report is a text.')
    return {key: escaped(text, keep="\n") for key, text in texts.items()}


def _explain_report(name: str, report: Mapping[str, str]) -> int:
    """Print how a job has ended, by its own report. Its fields are facts, so no line has to be recognized."""
    error, cause, fix = report["error"], report["known_cause"], report["fix"]
    if report["cause"] not in ("failed", "bad_input"):
        # A person may end a job that hangs.
        if report["cause"] == "interrupted" and (hang := explain([f"{OURS}{error}"])):
            return _print_cause(name, hang)
        print(f"{name}: no failure: the job is {report['cause']}.")
        return FAILED
    print(f"{name}: {error or 'it has no sentence, because the ranks or mpirun have printed it.'}")
    if cause:
        print(cause)
    print("Fix:  " + fix.replace("\n", "\n      ") if fix else f"No known failure. {_TO_ASK}")
    return DONE if cause or fix else FAILED


def _print_cause(name: str, first: Explanation, *others: Explanation) -> int:
    """Print the root cause, its row if the table has one, and the other failures in the log."""
    row = first.failure
    print(f"{name}: {first.line}")
    explained = f"{row.id}: {row.cause}\nFix:  {first.fix}"
    print(explained if row.cause else f"No known failure. {_TO_ASK}")
    print("\nAlso seen:\n" if others else "", end="")
    for other in others:
        line = other.line[:60]
        row_and_line = f"{other.failure.id} ({line})" if other.failure.cause else line
        print(f"  line {other.number}: {row_and_line}")
    return DONE if row.cause else FAILED


def _explain_id(name: str) -> int:
    """Print the row with this id. Raises UserError, with the ids that may be meant, if there is none."""
    if row := _BY_ID.get(name):
        print(f"{row.id}: {row.cause}\nFix:  {row.fix}")
        return DONE
    ids = [id for id in _BY_ID if id.startswith(f"{name}-")]
    hint = "" if ids else did_you_mean(name, _BY_ID)
    fix = (
        f"choose one of its ids: {', '.join(ids)}"
        if ids
        else f"an id begins with one of: {', '.join(PROGRAMS)}"
    )
    raise UserError(
        f"{name} is no file, and not the id of a known failure.{hint}", fix="" if hint else fix
    )
