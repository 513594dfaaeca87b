"""Read files of torch.save without running any code that they name.

torch.load(weights_only=True) refuses code, but prints a page of advice on how to allow it, and reports
damage by a dozen types of exception. This module raises one type, with a reason for the user.
"""

from __future__ import annotations

import pickle
import re
import struct
import warnings
from pathlib import Path
from typing import Any

import torch

# The exceptions of torch.load on thousands of files with changed, missing or random bytes.
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
    """The file contains no tensors that can be read. The message is a phrase for a sentence."""


def load_tensors(path: Path) -> Any:
    """The tensors, containers and numbers in the file. The tensors are on the CPU.

    Raises:
        OSError: the file is missing or must not be read.
        Unreadable: the file is damaged, of another format, or contains code.
    """
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of code that it then refuses
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except _DAMAGED as error:
            if code := re.search(r"GLOBAL (\S+)", str(error)):
                raise Unreadable(f"it contains code ({code[1]}), which is refused") from None
            if isinstance(error, pickle.UnpicklingError):
                raise Unreadable("it is not a file that torch.save wrote") from None
            reason = re.split(r"\. |\n", str(error))[0] or type(error).__name__
            raise Unreadable(f"torch.load cannot read it ({reason})") from None
