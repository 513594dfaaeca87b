"""Read a pickle of CIFAR-10's `cifar-10-batches-py` without Python's unpickler.

Python's unpickler runs what a pickle names, takes a gigabyte for a file of nine bytes, and crashes on deeply
nested tuples. This reader knows only what a batch consists of, as Python 2 and 3 write it under protocol
2: a dict of bytes, lists, numbers and one array. No object becomes larger than the file or deeply nested.
"""

from __future__ import annotations

import pickletools
from typing import Any

from mpiddp.text import escaped

MAX_OPCODES = 200_000  # 10,000 labels, and 10,000 names of files with 8 opcodes each
_MAX_TUPLE = 8  # items; the state of a dtype has them
_MAX_RECORDED = 8  # an array and its dtype are two


class Recorded:
    """An object that a pickle would build. Its arguments and its state are recorded, and nothing runs."""

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments
        self.state: tuple[Any, ...] = ()


_RECORD, _ENCODE = object(), object()
_NAMES = {
    "numpy.core.multiarray _reconstruct": _RECORD,
    "numpy._core.multiarray _reconstruct": _RECORD,  # its name in NumPy 2
    "numpy ndarray": _RECORD,
    "numpy dtype": _RECORD,
    "_codecs encode": _ENCODE,  # Python 3's way to pickle bytes under protocol 2
}
_LENGTHS = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_VALUES = (int, bytes, str)
_NESTED = "its objects are nested in another way than a batch's"


def loads(content: bytes) -> Any:
    """The object in the pickle; in place of arrays, what describes them.

    Raises:
        ValueError, LookupError, AttributeError, TypeError: it is damaged, or holds anything else.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    num_recorded = num_encoded = 0

    def pop(count: int) -> list[Any]:
        items = stack[-count:]
        del stack[-count:]
        return items

    def pop_to_mark() -> list[Any]:
        mark = marks.pop()
        items = stack[mark:]
        del stack[mark:]
        return items

    argument: Any
    for number, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if number == MAX_OPCODES:
            raise ValueError(f"it has more than {MAX_OPCODES:,} opcodes")
        match opcode.name:
            case "PROTO":
                pass
            case "STOP":
                break
            case "MARK":
                marks.append(len(stack))
            case "NONE":
                stack.append(None)
            case "NEWFALSE" | "NEWTRUE":
                stack.append(opcode.name == "NEWTRUE")
            case "BININT" | "BININT1" | "BININT2" | "BINUNICODE":
                stack.append(argument)
            case "BINSTRING" | "SHORT_BINSTRING":
                stack.append(argument.encode("latin1"))
            case "GLOBAL":
                if argument not in _NAMES:
                    name = escaped(argument[:80].replace(" ", "."))
                    raise ValueError(f"it contains {name}, which is refused")
                stack.append(_NAMES[argument])
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "EMPTY_DICT":
                stack.append({})
            case "SETITEM" | "SETITEMS":
                items = pop(2) if opcode.name == "SETITEM" else pop_to_mark()
                _fill(stack[-1], items)
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND" | "APPENDS":
                items = pop(1) if opcode.name == "APPEND" else pop_to_mark()
                _extend(stack[-1], items)
            case "TUPLE":
                stack.append(_tuple(pop_to_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(_tuple(pop(_LENGTHS[opcode.name])))
            case "REDUCE":
                function, arguments = pop(2)
                if function is _ENCODE:
                    num_encoded += len(arguments[0])
                    if num_encoded > len(content):  # one text, encoded again and again
                        raise ValueError("its texts are larger than the file")
                    stack.append(arguments[0].encode("latin1"))
                elif function is _RECORD and num_recorded < _MAX_RECORDED:
                    num_recorded += 1
                    stack.append(Recorded(arguments))
                else:
                    raise ValueError("it builds another object than an array")
            case "BUILD":
                (state,) = pop(1)
                if not isinstance(stack[-1], Recorded):
                    raise ValueError("it changes another object than an array")
                stack[-1].state = state
            case _:
                raise ValueError(f"it contains {opcode.name}, which is refused")
    return stack.pop()


def _fill(target: Any, items: list[Any]) -> None:
    if type(target) is not dict or any(type(value) is dict for value in items):
        raise ValueError(_NESTED)
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) not in _VALUES:  # Python computes the hash of nested tuples without a limit
            raise ValueError(f"one of its keys is a {type(key).__name__}")
        target[key] = value


def _extend(target: Any, items: list[Any]) -> None:
    if type(target) is not list or any(type(item) not in _VALUES for item in items):
        raise ValueError(_NESTED)
    target.extend(items)


def _tuple(items: list[Any]) -> tuple[Any, ...]:
    """A tuple of a few items, which may be tuples that contain no tuple."""
    parts = [part for item in items for part in (item if type(item) is tuple else (item,))]
    if len(items) > _MAX_TUPLE or any(type(part) in (tuple, list, dict) for part in parts):
        raise ValueError(_NESTED)
    return tuple(items)
