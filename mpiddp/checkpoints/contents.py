"""Read the files that every program's checkpoints have: state.json, and files of tensors.

The errors are sentences that name the folder and the file. `manifest` and `directory` find damage; this finds
that another program has written the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mpiddp.checkpoints.tensor_file import Unreadable, load_tensors
from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of, read_error, read_limited

_STATE = "state.json"
_MAX_STATE_BYTES = 16 << 20


def read_state(folder: Path) -> dict[str, Any]:
    """The contents of state.json, which any program may have written; {} if it is missing or no such table.

    Raises:
        JobFailed: a disk has failed.
    """
    try:
        state = json.loads(read_limited(folder / _STATE, _MAX_STATE_BYTES))
    except OSError as error:
        if cause_of(error) is JobFailed:
            raise read_error(f"{folder}: {_STATE}", error) from None
        return {}
    except (ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def read_tensors(folder: Path, file: str, *, writer: str = "mpiddp") -> Any:
    """The contents of a file of tensors, which the program `writer` must have written.

    Raises:
        UserError: it is missing, must not be read, or is no such file.
        JobFailed: a disk has failed.
    """
    try:
        return load_tensors(folder / file)
    except OSError as error:
        raise read_error(f"{folder}: {file}", error) from None
    except Unreadable as error:
        raise UserError(f"{folder}: {file} was not written by {writer}: {error}.") from None
