"""Count files, lines and code patterns of one or several checkouts, from their syntax trees.

python -m benchmarks.code_metrics ../mpiddp-before .
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import start
from mpiddp.arguments import OneSentenceParser
from mpiddp.bench.report import markdown
from mpiddp.errors import UserError

PACKAGE = "mpiddp"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    path: Path  # relative to the checkout
    lines: int
    tree: ast.Module


def main() -> None:
    parser = OneSentenceParser(
        prog="python -m benchmarks.code_metrics",
        description="Count files, lines and code patterns of one or several checkouts.",
        allow_abbrev=False,
    )
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path()], metavar="PATH")
    checkouts: list[Path] = parser.parse_args().checkouts
    columns = [_counts(checkout) for checkout in checkouts]
    rows = [[what, *(column[what] for column in columns)] for what in columns[0]]
    print(markdown(("what", *map(str, checkouts)), rows))


def _counts(checkout: Path) -> dict[str, str]:
    package, tests, benchmarks = (
        _sources(checkout, folder) for folder in (PACKAGE, "tests", "benchmarks")
    )
    if not package:
        raise UserError(f"{checkout} has no package {PACKAGE}. Expected a checkout of the project.")
    in_root = [source for source in package if len(source.path.parts) == 2]
    largest = max(package, key=lambda source: source.lines)
    longest = max(_functions(package))
    return {
        "files in the package's root": str(len(in_root)),
        "files of the package": str(len(package)),
        "lines of the package": f"{sum(source.lines for source in package):,}",
        "files of tests": str(len(tests)),
        "lines of tests": f"{sum(source.lines for source in tests):,}",
        "files of benchmarks": str(len(benchmarks)),
        "lines of benchmarks": f"{sum(source.lines for source in benchmarks):,}",
        "largest file": f"{largest.lines} ({largest.path})",
        "longest function": f"{longest[0]} ({longest[1]})",
        "Any": str(_count(package, _is_any)),
        "argparse.Namespace": str(_count(package, _is_namespace)),
        "assert … is not None": str(_count(package, _asserts_not_none)),
        "names reassigned with global": str(len(set(_globals(package)))),
    }


def _sources(checkout: Path, folder: str) -> list[Source]:
    sources = []
    for path in sorted((checkout / folder).rglob("*.py")):
        text = path.read_text()
        lines = len(text.splitlines())
        sources.append(Source(path.relative_to(checkout), lines, ast.parse(text)))
    return sources


def _functions(sources: list[Source]) -> Iterator[tuple[int, str]]:
    """Each function's number of lines, without its decorators, and its name."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, FUNCTIONS):
                assert node.end_lineno is not None
                yield node.end_lineno - node.lineno + 1, f"{source.path}:{node.name}"


def _count(sources: list[Source], matches: Callable[[ast.AST], bool]) -> int:
    return sum(matches(node) for source in sources for node in ast.walk(source.tree))


def _is_any(node: ast.AST) -> bool:
    """A use of typing's Any, but not its import."""
    is_name = isinstance(node, ast.Name) and node.id == "Any"
    return is_name or (isinstance(node, ast.Attribute) and node.attr == "Any")


def _is_namespace(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "Namespace"


def _asserts_not_none(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assert):
        return False
    return any(
        isinstance(each, ast.Compare)
        and isinstance(each.ops[0], ast.IsNot)
        and isinstance(each.comparators[0], ast.Constant)
        and each.comparators[0].value is None
        for each in ast.walk(node.test)
    )


def _globals(sources: list[Source]) -> Iterator[tuple[Path, str]]:
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Global):
                yield from ((source.path, name) for name in node.names)


if __name__ == "__main__":
    start(main)
