"""The little YAML that the manifest of examples/kubernetes needs."""

from __future__ import annotations

import re
from typing import Any


def read_yaml(text: str) -> Any:
    """The mappings, lists and plain scalars of a manifest. Scalars stay text."""
    lines = []
    for line in text.splitlines():
        content = re.sub(r"(^|\s)#.*", "", line).rstrip()
        if content:
            # "- name: x" is a list's item whose first key stands two columns further right.
            while found := re.match(r"( *)- (?=\S+:( |$))", content):
                lines.append(f"{found[1]}-")
                content = f"{found[1]}  {content[found.end() :]}"
            lines.append(content)
    value, rest = _block(lines)
    assert not rest, rest
    return value


def _block(lines: list[str]) -> tuple[Any, list[str]]:
    depth = _depth(lines[0])
    items: list[Any] = []
    mapping: dict[str, Any] = {}
    while lines and _depth(lines[0]) == depth:
        line, lines = lines[0].strip(), lines[1:]
        if line == "-":
            value, lines = _block(lines)
            items.append(value)
        elif line.startswith("- "):
            items.append(line[2:])
        else:
            key, _, value = line.partition(":")
            assert key not in mapping, key
            if not value:
                value, lines = _block(lines)
            mapping[key] = value.strip() if isinstance(value, str) else value
    assert not lines or _depth(lines[0]) < depth, lines[0]
    return items or mapping, lines


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
