"""Install mpiddp beside the versions that it claims to run with, and do in each what a user does first.

    .venv/bin/python -m pip install -c constraints.txt uv
    .venv/bin/python -m benchmarks.versions --out versions.jsonl            # about 40 minutes on 2 cores
    .venv/bin/python -m benchmarks.versions --only 3.13-newest --out versions.jsonl
    .venv/bin/python -m benchmarks.versions --table --out versions.jsonl    # docs/dependencies.md's table

The environments stay in .versions/, about 20 GB, and are brought up to date by the next run. Each result is
appended to --out. After an interruption the same command runs only what has not passed yet. What cannot be
installed is a row that says why.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import start
from benchmarks.versions import environments
from benchmarks.versions.environments import KINDS, Environment, NotBuilt
from benchmarks.versions.results import Result, append, newest, table
from benchmarks.versions.smoke import smoke
from mpiddp.arguments import DefaultsShown, OneSentenceParser, whole
from mpiddp.bench.options import picked
from mpiddp.text import duration


@dataclass(frozen=True)
class Options:
    out: Path
    only: str
    python: tuple[tuple[str, str], ...]
    build_timeout: int
    check_timeout: int
    table: bool


def main() -> int:
    options = _options()
    wheel = environments.build_wheel(options.build_timeout)
    pythons = dict.fromkeys(environments.claimed_pythons(wheel), "") | dict(options.python)
    planned = [
        Environment(version, kind, path) for kind in KINDS for version, path in pythons.items()
    ]
    if not options.table:
        for environment in planned:
            _run(environment, wheel, options)
    results = newest(options.out)
    print(table([results.get(each.name, _not_run(each)) for each in planned]))
    return int(any(result.state == "failed" for result in results.values()))


def _run(environment: Environment, wheel: Path, options: Options) -> None:
    """Try the environment, unless it has passed before."""
    known = newest(options.out).get(environment.name)
    if options.only not in environment.name or (known is not None and known.state == "passed"):
        return
    _note(f"{environment.name}: installing …")
    result = _try(environment, wheel, options)
    append(options.out, result)
    reason = f": {result.reason}" if result.reason else ""
    _note(f"{environment.name}: {result.state} after {duration(result.seconds)}{reason}")


def _not_run(environment: Environment) -> Result:
    return Result(environment.version, environment.kind.name, "not run yet")


def _try(environment: Environment, wheel: Path, options: Options) -> Result:
    try:
        environments.make(environment, wheel, options.build_timeout)
    except NotBuilt as reason:
        return Result(environment.version, environment.kind.name, "not built", str(reason))
    return smoke(environment, options.check_timeout)


def _note(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _python(text: str) -> tuple[str, str]:
    version, _, path = text.partition("=")
    if path and not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"{path} is not a file")
    return version, path


def _options() -> Options:
    parser = OneSentenceParser(
        prog="python -m benchmarks.versions",
        description="Install mpiddp beside the versions that it claims to run with, and try each.",
        allow_abbrev=False,
        formatter_class=DefaultsShown,
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="append a line of JSON per result"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only environments whose name contains TEXT"
    )
    parser.add_argument(
        "--python",
        type=_python,
        action="append",
        default=[],
        metavar="3.14[=PATH]",
        help="another Python than those of setup.py's classifiers, or its program; may be repeated",
    )
    parser.add_argument(
        "--build-timeout", type=whole(1), default=1800, metavar="S", help="seconds for each install"
    )
    parser.add_argument(
        "--check-timeout", type=whole(1), default=600, metavar="S", help="seconds for each command"
    )
    parser.add_argument("--table", action="store_true", help="only print the table of --out")
    return picked(Options, parser.parse_args())


if __name__ == "__main__":
    start(main)
