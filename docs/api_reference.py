"""The reference of the public Python names, from their docstrings, and the rules that the docstrings follow.

    python -m docs.api_reference     # writes docs/api/index.html; needs: pip install -c constraints.txt pdoc

The names are those of `__all__` in PAGES. Each has a docstring that describes every parameter, under "Args:",
and every field of a record, under "Attributes:". So has every public method of a class.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType

PAGES = ("mpiddp", "mpiddp.train.resnet")
FOLDER = Path(__file__).parent / "api"
_OF_THE_CALLED = ("self", "cls")


def problems() -> list[str]:
    """What breaks a rule, as sentences."""
    return [sentence for page in PAGES for sentence in _of_page(loaded(page))]


def loaded(page: str) -> ModuleType:
    """The module with all its public names, which the package loads on first use."""
    module = import_module(page)
    for name in module.__all__:
        vars(module)[name] = getattr(module, name)
    return module


def _of_page(module: ModuleType) -> Iterator[str]:
    if not module.__doc__:
        yield f"{module.__name__} has no docstring."
    for name in module.__all__:
        value = getattr(module, name)
        full_name = f"{module.__name__}.{name}"
        if inspect.isclass(value):
            yield from of_class(value, full_name)
        elif inspect.isroutine(value):
            yield from of_function(value, full_name)
        elif not variable_docstring(module, name):
            yield f"{full_name} has no docstring below it."


def of_class(kind: type, name: str) -> Iterator[str]:
    """What a class and its public members break."""
    docstring = vars(kind).get("__doc__")  # not that of a base
    if not docstring:
        yield f"{name} has no docstring."
    constructor = vars(kind).get("__init__")
    if dataclasses.is_dataclass(kind):
        fields = {field.name for field in dataclasses.fields(kind)}
        yield from _compare(name, fields, _described(docstring, "Attributes"))
    elif constructor is not None:
        described = _described(docstring, "Args") | _described(constructor.__doc__, "Args")
        yield from _compare(name, _parameters(constructor), described)
    for member, value in vars(kind).items():
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, (classmethod, staticmethod)):
            value = value.__func__
        if inspect.isfunction(value):
            yield from of_function(value, f"{name}.{member}")


def of_function(function: object, name: str) -> Iterator[str]:
    """What a function breaks."""
    function = function.func if isinstance(function, partial) else function
    docstring = function.__doc__
    if not docstring:
        yield f"{name} has no docstring."
    yield from _compare(name, _parameters(function), _described(docstring, "Args"))


def variable_docstring(module: ModuleType, name: str) -> str:
    """The string below the assignment of a module's variable, "" if there is none."""
    body = ast.parse(inspect.getsource(module)).body
    for statement, below in pairwise(body):
        targets = getattr(statement, "targets", [getattr(statement, "target", None)])
        is_its = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if is_its and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            return str(below.value.value)
    return ""


def _parameters(function: object) -> set[str]:
    assert callable(function)
    return set(inspect.signature(function).parameters) - set(_OF_THE_CALLED)


def _compare(name: str, actual: set[str], described: set[str]) -> Iterator[str]:
    for each in sorted(actual - described):
        yield f"{name}: its docstring does not describe {each}."
    for each in sorted(described - actual):
        yield f"{name}: its docstring describes {each}, which it does not have."


def _described(docstring: str | None, section: str) -> set[str]:
    """The names that a section of a docstring in Google's style describes: "name:", or "name, name:"."""
    text = inspect.cleandoc(docstring or "")
    found = re.search(rf"^{section}:\n((?:[ \t]+.*\n?|\n)+)", text, re.MULTILINE)
    names: set[str] = set()
    for line in found[1].splitlines() if found else []:
        if heading := re.match(r" {4}(\w+(?:, \w+)*):(?= |$)", line):
            names.update(heading[1].split(", "))
    return names


def build(folder: Path) -> None:
    """Write the pages into the folder. A warning of the generator is an error."""
    import pdoc.render

    for page in PAGES:
        loaded(page)
    version = vars(import_module(PAGES[0]))["__version__"]
    pdoc.render.configure(
        docformat="google", show_source=False, footer_text=f"{PAGES[0]} {version}"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The pages of modules that are no part of the interface are left out.
        pdoc.pdoc(PAGES[0], rf"!{PAGES[0]}\..+", *PAGES[1:], output_directory=folder)


def main() -> int:
    found = problems()
    for sentence in found:
        print(sentence, file=sys.stderr)
    if found:
        return 1
    build(FOLDER)
    print(f"{FOLDER}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
