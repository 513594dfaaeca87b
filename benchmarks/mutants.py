"""How many small faults in the launcher's code do the tests notice that start no rank?

    python -m benchmarks.mutants --seed 1 --number 50

Each mutant is one change to one expression of `mpiddp/launch` or `mpiddp/hosts`: a comparison negated, `and`
and `or` swapped, a `not` dropped, a returned value lost, a constant changed. It is made in a copy of the
repository, where the tests then run until the first one fails. Those that no test notices are printed.

The tests run in namespaces of their own: a mutant may signal every process that it sees, or end a network.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mpiddp/launch", "mpiddp/hosts")
# Those that start no rank: the record of every command line, the units, what a user mistypes.
GOLDEN = "tests/promises/test_variables.py::test_the_command_line_of_each_mpi"
TESTS = (GOLDEN, "tests/unit", "tests/refusals")
COPIED = ("mpiddp", "tests", "docs", "examples", "hostfiles", "README.md", "pyproject.toml")
ALONE = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
WITH_LOOPBACK = ("sh", "-c", 'ip link set lo up; "$@"', "sh")
LONGEST = 4  # times as long as without a mutant: one that makes a test wait for ever is noticed too

_PAIRS: tuple[tuple[type[ast.cmpop], type[ast.cmpop]], ...] = (
    *((ast.Eq, ast.NotEq), (ast.Lt, ast.GtE), (ast.Gt, ast.LtE)),
    *((ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
)
_OPPOSITE = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}


@dataclass(frozen=True)
class Mutant:
    """A file with one expression replaced."""

    file: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before}  ->  {self.after}"


def sites(source: str) -> list[tuple[int, str]]:
    """The expressions of a module that have mutants: their positions in `ast.walk`, and a name of each."""
    tree = ast.parse(source)
    left_out = set(map(id, _not_run(tree)))
    equal = Counter[str]()
    found = []
    for number, node in enumerate(ast.walk(tree)):
        if id(node) not in left_out and _changed(node):
            text = ast.unparse(node)
            found.append((number, f"{text} {equal[text]}"))
            equal[text] += 1
    return found


def mutant_at(file: str, source: str, site: int) -> Mutant:
    tree = ast.parse(source)
    node = list(ast.walk(tree))[site]
    changed = _changed(node)
    assert isinstance(node, (ast.expr, ast.stmt))
    assert changed is not None
    before = ast.unparse(node)
    _replace(tree, node, changed)
    text = ast.unparse(ast.fix_missing_locations(tree))
    return Mutant(file, node.lineno, before, ast.unparse(changed), text)


def _changed(node: ast.AST) -> ast.AST | None:
    """The node with its opposite meaning, None if there is none."""
    changed = copy.deepcopy(node)
    match changed:
        case ast.Compare(ops=[operator, *_]):
            changed.ops[0] = _OPPOSITE[type(operator)]()
        case ast.BoolOp(op=operator):
            changed.op = ast.Or() if isinstance(operator, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Return(value=ast.Constant()) | ast.Return(value=ast.List() | ast.Tuple(elts=[])):
            return None  # a constant has mutants of its own; nothing is as false as None
        case ast.Return(value=ast.expr()):
            changed.value = ast.Constant(None)
        case ast.Constant(value=bool() as value):
            changed.value = not value
        case ast.Constant(value=int() as value):
            changed.value = value + 1
        case ast.Constant(value=float() as value):
            changed.value = 0.0 if value else 1.0  # most are limits: a second more is the same
        case ast.Constant(value=str() as value) if value and not any(map(str.isspace, value)):
            changed.value = f"{value}x"  # the words of a sentence may change
        case _:
            return None
    return changed


def _not_run(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are no code: annotations, the parts of f-strings, what only a type checker reads."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(annotation=ast.expr() as unused) | ast.AnnAssign(annotation=unused):
                yield from ast.walk(unused)
            case ast.FunctionDef(returns=ast.expr() as unused):
                yield from ast.walk(unused)
            case ast.JoinedStr():
                yield from (each for each in node.values if isinstance(each, ast.Constant))
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from ast.walk(node)
            case ast.ClassDef():
                yield from (each for part in node.decorator_list for each in ast.walk(part))
            case ast.keyword(arg="metavar"):  # words of a help
                yield node.value


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, name, new)
            elif isinstance(value, list):
                value[:] = [new if each is old else each for each in value]


def sample(number: int, seed: int) -> list[Mutant]:
    """As many mutants as `number`, those whose names have the lowest digests with this seed.

    An edit of the code so leaves the others of a sample as they were.
    """
    found = []
    for path in sorted(each for package in PACKAGES for each in (ROOT / package).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for site, name in sites(path.read_text(encoding="utf-8")):
            digest = hashlib.sha256(f"{seed} {file} {name}".encode()).digest()
            found.append((digest, file, site))
    chosen = sorted(found)[:number]
    return [
        mutant_at(file, (ROOT / file).read_text(encoding="utf-8"), site) for _, file, site in chosen
    ]


def is_noticed(folder: Path, tests: Sequence[str], limit_s: float | None = None) -> bool:
    """Whether a test fails in this copy of the repository. One that waits for ever does."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*ALONE, *WITH_LOOPBACK, *pytest, *tests],
            cwd=folder,
            env=env,
            capture_output=True,
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main() -> int:
    about = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutants", description=about)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=50)
    parser.add_argument("tests", nargs="*", default=TESTS, metavar="TESTS")
    options = parser.parse_args()
    mutants = sample(options.number, options.seed)
    noticed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in COPIED:
            copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copied(ROOT / name, Path(scratch, name))
        Path(scratch, ".mpi").symlink_to(ROOT / ".mpi")
        began = time.monotonic()
        if is_noticed(Path(scratch), options.tests):
            raise SystemExit("the tests fail without any mutant")
        limit_s = LONGEST * (time.monotonic() - began)
        for mutant in mutants:
            file = Path(scratch, mutant.file)
            file.write_text(mutant.source, encoding="utf-8")
            if is_noticed(Path(scratch), options.tests, limit_s):
                noticed += 1
            else:
                print(mutant, flush=True)
            shutil.copy(ROOT / mutant.file, file)
    print(f"{noticed} of {len(mutants)} mutants are noticed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
