"""Files that torch.save wrote, read without running anything that they name.

torch.load(weights_only=True) refuses code, but in a page of advice on how to allow it, and reports
damage by a dozen kinds of exception. Here it is one kind, with a reason that a user can be told.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
from pathlib import Path
from typing import Any

import torch

# What its readers raised over thousands of files with some bytes changed, cut off or drawn at random.
_DAMAGED = (
    pickle.UnpicklingError,
    struct.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Unreadable(Exception):
    """No file of tensors; the reason is a phrase for a sentence."""


def load_tensors(path: Path) -> Any:
    """The tensors, containers and numbers in the file; tensors on the CPU.

    Raises:
        OSError: it is missing, or may not be read.
        Unreadable: it is damaged, of another kind, or names code.
    """
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what it refuses a moment later
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except _DAMAGED as error:
            if code := re.search(r"GLOBAL (\S+)", str(error)):
                raise Unreadable(f"it names code ({code[1]}), which is refused") from None
            if isinstance(error, pickle.UnpicklingError):
                raise Unreadable("it is not a file that torch.save wrote") from None
            reason = re.split(r"\. |\n", str(error))[0] or type(error).__name__
            raise Unreadable(f"torch.load cannot read it ({reason})") from None
