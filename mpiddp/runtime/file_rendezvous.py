"""init_method="file://…": the ranks of a script meet in a file, so all hosts have to see the same one.

With a file that another host does not see, a folder that is missing, or the leftover of an earlier job,
torch's ranks wait without a message until the time limit of their process group. So the ranks look at the
file together before torch opens it, and refuse together. torch has no hook for this: its handlers of URLs
are in a dict, and `register_rendezvous_handler` accepts each scheme once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from stat import S_ISDIR
from typing import Any
from urllib.parse import parse_qs, urlparse

from mpiddp.errors import UserError
from mpiddp.paths import cause_of
from mpiddp.runtime.coordinator import Coordinator

_TIMEOUT_S = 1800.0  # torch's own for a process group: a rank may still prepare its data

Handler = Callable[..., Any]


def check_file_rendezvous(coordinator: Coordinator) -> None:
    """From now on, check the file of each init_method="file://…" before the ranks of the job use it."""
    # `torch.distributed.rendezvous` is a function, which has the name of its module.
    handlers: dict[str, Handler] = vars(import_module("torch.distributed.rendezvous"))[
        "_rendezvous_handlers"
    ]
    use_file, pid = handlers["file"], os.getpid()

    def check_and_use_file(url: str, **options: Any) -> Any:
        parts = urlparse(url)
        world_size = parse_qs(parts.query).get("world_size")
        is_whole_job = world_size == [str(coordinator.world.world_size)]
        if is_whole_job and parts.path and os.getpid() == pid:
            _require_usable(Path(parts.path), coordinator)
        return use_file(url, **options)

    handlers["file"] = check_and_use_file


def _require_usable(path: Path, coordinator: Coordinator) -> None:
    """End all ranks unless all hosts see one new file at `path`. All ranks must call this."""
    host, is_rank_0 = coordinator.world.hostname, coordinator.world.rank == 0
    with coordinator.all_or_none():
        if "\0" in str(path):
            raise UserError(f"init_method {str(path)!r}: a path has no zero byte.")
    where = f"init_method file://{path}"
    mark = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        with coordinator.all_or_none(timeout_s=_TIMEOUT_S), _permitted(where, host):
            found = _status(path.parent)
            if found is None or not S_ISDIR(found.st_mode):
                raise UserError(
                    f"{where}: the folder {path.parent} does not exist on {host}. "
                    "Create it on a file system that all hosts share."
                )
            if is_rank_0:
                try:
                    mark.touch()
                except OSError as error:
                    sentence = f"{where}: {host} cannot write into {path.parent}: {error.strerror}."
                    raise cause_of(error)(sentence) from None
        name = coordinator.broadcast_json(mark.name)
        with coordinator.all_or_none(), _permitted(where, host):
            if _status(mark.with_name(name)) is None:
                raise UserError(
                    f"{where}: {host} does not see what {coordinator.hostnames[0]} writes there, so the "
                    "ranks would wait for each other. Name a file on a file system that all hosts share, "
                    "or leave init_method out."
                )
    finally:
        if is_rank_0:
            with contextlib.suppress(OSError):  # it was never made, or the file system is gone
                mark.unlink()
    with coordinator.all_or_none(), _permitted(where, host):
        found = _status(path)
        if found is not None and found.st_size > 0:
            raise UserError(
                f"{where}: the file is left over from an earlier job, and the ranks would read its values. "
                f"Run: rm {path}"
            )


def _status(path: Path) -> os.stat_result | None:
    """None if there is no such file. From Python 3.14 on, Path.exists would say this of any error."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextlib.contextmanager
def _permitted(where: str, host: str) -> Iterator[None]:
    """Raise one sentence where a path cannot be read: it is in a folder of another user, or a disk failed."""
    try:
        yield
    except OSError as error:
        hint = (
            " Name a file in a folder that this user may search on all hosts."
            if isinstance(error, PermissionError)
            else ""
        )
        raise cause_of(error)(
            f"{where}: {host} cannot read {error.filename}: {error.strerror}.{hint}"
        ) from None
