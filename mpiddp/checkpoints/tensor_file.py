"""Write files of torch.save, and read them without running any code that they name.

torch.load(weights_only=True) refuses code, but prints a page of advice on how to allow it, and reports
damage by a dozen types of exception. This module raises one type, with a reason for the user.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of, read_error

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


class HashedFile:
    """A new file, and the SHA-256 of the bytes written to it, computed in the same pass.

    `close` raises an error of the disk, because a writer such as torch.save would replace it by another.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._digest = hashlib.sha256()
        self._error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        rest = memoryview(data)
        self._digest.update(rest)
        try:
            while rest and self._error is None:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self._error = error
        return len(data)

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> str:
        """The SHA-256 of the file. Raises the first OSError of the writes."""
        self._file.close()
        if self._error is not None:
            raise self._error
        return self._digest.hexdigest()


def write_tensors(folder: Path, contents: Mapping[str, Any]) -> dict[str, str]:
    """Write each entry into a file of its own, NAME.pt, and return the SHA-256 of the files by name.

    Raises:
        OSError: a file cannot be written, for example because the disk is full.
    """
    hashes = {}
    for name, nested in contents.items():
        file = HashedFile(folder / f"{name}.pt")
        torch.save(nested, file)  # type: ignore[arg-type]
        hashes[f"{name}.pt"] = file.close()
    return hashes


def load_tensors(path: Path) -> Any:
    """The tensors, containers and numbers in the file. The tensors are on the CPU.

    Raises:
        OSError: the file is missing, must not be read, or lies on a disk that fails.
        Unreadable: the file is damaged, of another format, or contains code.
    """
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of code that it then refuses
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except _DAMAGED as error:
            if isinstance(error, OSError) and error.errno and cause_of(error) is JobFailed:
                raise  # not of the bytes, which make torch seek to no position at most
            if code := re.search(r"GLOBAL (\S+)", str(error)):
                raise Unreadable(f"it contains code ({code[1]}), which is refused") from None
            if isinstance(error, pickle.UnpicklingError):
                raise Unreadable("it is not a file that torch.save wrote") from None
            reason = re.split(r"\. |\n", str(error))[0] or type(error).__name__
            raise Unreadable(f"torch.load cannot read it ({reason})") from None


def read_tensors(path: Path) -> Any:
    """The contents of a checkpoint's file, with errors of one sentence.

    Raises:
        UserError: it is missing, must not be read, or is no such file.
        JobFailed: a disk has failed.
    """
    try:
        return load_tensors(path)
    except OSError as error:
        raise read_error(str(path), error) from None
    except Unreadable as error:
        raise UserError(f"{path} was not written by mpiddp: {error}.") from None
