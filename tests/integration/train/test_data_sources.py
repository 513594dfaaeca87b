"""CIFAR-10 and Fashion-MNIST: real data is read correctly, anything else is refused in one sentence.

Tests mpiddp/train/data/.
python -m pytest tests/integration/train/test_data_sources.py
"""

import gzip
import hashlib
import os
import pickle
import re
import struct
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mpiddp.errors import UserError
from mpiddp.train.data import cifar10
from mpiddp.train.data.cifar10_files import BIN, PY
from mpiddp.train.data.datasets import DATASETS
from mpiddp.train.opening import default_data_dir, load, open_data
from mpiddp.world import World
from tests.support.errors import error
from tests.support.training import configured

ALONE = World(rank=0, world_size=1, local_rank=0, local_world_size=1)
CIFAR10, FASHION_MNIST = DATASETS["cifar10"], DATASETS["fashion-mnist"]


def test_default_data_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDDP_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    assert default_data_dir() == Path("/home/ada/.cache/mpiddp")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_data_dir() == Path("/cache/mpiddp")
    monkeypatch.setenv("MPIDDP_DATA", "/data")
    assert default_data_dir() == Path("/data")


# Every row of the table


@pytest.mark.parametrize("name", DATASETS)
def test_synthetic_images_have_the_sizes_of_the_row(name: str) -> None:
    spec = DATASETS[name]
    config = configured(f"--dataset={name}", "--use-syn", "--batch-size=2")
    data = open_data(config, ALONE, torch.device("cpu"))
    assert len(spec.mean) == len(spec.std) == spec.channels
    assert data.contents == f"{spec.num_images} + 0 images of {spec.num_classes} classes"
    ((images, labels),) = data.train.batches([torch.arange(2)], epoch=0)
    assert images.shape == (2, spec.channels, spec.size, spec.size)
    assert labels.max() < spec.num_classes


@pytest.mark.parametrize("name", [name for name, spec in DATASETS.items() if spec.layouts])
def test_a_data_set_without_files_names_them_and_where_it_looked(name: str, tmp_path: Path) -> None:
    config = configured(f"--dataset={name}", f"--data-dir={tmp_path}")
    with pytest.raises(UserError) as caught:
        open_data(config, ALONE, torch.device("cpu"))
    message = str(caught.value)
    is_elsewhere = DATASETS[name].fetch or DATASETS[name].system_folder
    sentence = error("copy the", f"no {DATASETS[name].title} (")
    assert re.fullmatch(sentence, message), message
    assert ("--data-dir" in message) == bool(is_elsewhere)
    for layout in DATASETS[name].layouts:
        assert f"{tmp_path}/{layout.folder}" in message
        assert all(file in message for file in layout.files)


# CIFAR-10 from a folder


def test_cifar10_is_found_in_its_folder_and_in_the_parent_folder(
    official: Path, tmp_path: Path
) -> None:
    (tmp_path / "cifar-10-batches-bin").symlink_to(official)
    for folder in (official, tmp_path):
        train, test = load(CIFAR10, folder)
        assert train.images.shape == (50_000, 32, 32, 3)
        assert test.images.shape == (10_000, 32, 32, 3)
        assert train.labels[:5].tolist() == [6, 9, 9, 4, 1]  # a frog, two trucks, …
        assert test.labels.dtype == np.int64
        assert np.bincount(test.labels).tolist() == [1000] * 10


def test_the_pickled_layout_gives_the_same_arrays(official: Path, scratch: Path) -> None:
    """The pickles have the format of the official ones, and other names of images, so another hash."""
    expected = load(CIFAR10, official)
    pinned = {}
    for index, name in enumerate(PY):
        part = expected[name == "test_batch"]
        rows = slice(index % 5 * 10_000, (index % 5 + 1) * 10_000)
        pixels = part.images[rows].transpose(0, 3, 1, 2).reshape(10_000, 3072)
        content = python2_pickle(pixels, part.labels[rows].tolist())
        pinned[name] = hashlib.sha256(content).hexdigest()
        (scratch / name).write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = cifar10.read_py([scratch / name for name in PY], pinned)
    for got, right in zip(found, expected, strict=True):
        assert np.array_equal(got.images, right.images)
        assert np.array_equal(got.labels, right.labels)


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch pickled by Python 2, like the official ones."""

    def string(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    dtype = b"cnumpy\ndtype\n" + string(b"u1") + b"K\x00K\x01\x87R"
    dtype += b"(K\x03" + string(b"|") + b"NNN" + 2 * b"J\xff\xff\xff\xff" + b"K\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85"
    array += string(b"b") + b"\x87R"
    array += b"(K\x01M" + struct.pack("<H", 10_000) + b"M" + struct.pack("<H", 3072) + b"\x86"
    array += dtype + b"\x89T" + struct.pack("<i", pixels.size) + pixels.tobytes() + b"tb"
    items = string(b"batch_label") + string(b"training batch 1 of 5")
    items += string(b"labels") + b"](" + b"".join(b"K%c" % label for label in labels) + b"e"
    names = b"".join(
        string(b"toad_s_%06d.png" % number) + b"r" + struct.pack("<I", number + 1)
        for number in range(10_000)
    )
    items += string(b"data") + array + string(b"filenames") + b"](" + names + b"e"
    return b"\x80\x02}(" + items + b"u."


class Malicious:
    """Unpickling it runs `function(argument)`."""

    def __init__(self, function: object, argument: str) -> None:
        self.call = (function, (argument,))

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


def test_no_pickle_is_read_before_its_sha256_matches(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    content = pickle.dumps(Malicious(os.system, f"mkdir {victim}"), protocol=2)
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(CIFAR10, tmp_path)
    values = (hashlib.sha256(content).hexdigest(), PY["data_batch_1"], f" {tmp_path} ", "--dataset")
    sentence = error("not CIFAR-10's", f"{tmp_path}/data_batch_1 ", *values)
    assert re.fullmatch(sentence, str(caught.value))
    assert not victim.exists()

    pickle.loads(content)  # without the refusal, the command runs
    assert victim.exists()


def test_a_file_larger_than_any_batch_is_not_read(tmp_path: Path) -> None:
    for name in ("data_batch_1", "data_batch_1.bin"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(10**12)  # without a block on the disk
        values = (f"{tmp_path / name}: ", "33554432 bytes; ", f" {tmp_path} ")
        with pytest.raises(UserError, match=error(":", *values)):
            load(CIFAR10, tmp_path)
        (tmp_path / name).unlink()


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data_batch_1")
    values = (f"{tmp_path}/data_batch_1: ", "not a regular file; ", f" {tmp_path} ")
    with pytest.raises(UserError, match=error(":", *values)):
        load(CIFAR10, tmp_path)


def linked(official: Path, folder: Path, **changed: bytes) -> Path:
    """The official batches in `folder`, except the changed ones."""
    for name in BIN:
        if (batch := Path(name).stem) in changed:
            (folder / name).write_bytes(changed[batch])
        else:
            (folder / name).symlink_to(official / name)
    return folder


def test_a_flipped_bit_is_detected(official: Path, scratch: Path) -> None:
    content = bytearray((official / "test_batch.bin").read_bytes())
    content[12_345_678] ^= 1
    folder = linked(official, scratch, test_batch=bytes(content))
    values = (f"{folder}/test_batch.bin ", BIN["test_batch.bin"], f" {folder} ")
    with pytest.raises(UserError, match=error("not CIFAR-10's", *values)):
        load(CIFAR10, folder)


def test_a_short_batch_is_named(official: Path, scratch: Path) -> None:
    folder = linked(official, scratch, data_batch_3=b"short")
    values = (f"{folder}/data_batch_3.bin ", hashlib.sha256(b"short").hexdigest())
    with pytest.raises(UserError, match=error("not CIFAR-10's", *values)):
        load(CIFAR10, folder)


def test_a_missing_batch_is_named(official: Path, scratch: Path) -> None:
    folder = linked(official, scratch)
    (folder / "test_batch.bin").unlink()
    values = (f"{folder}/test_batch.bin: ", "No such file", f" {folder} ")
    with pytest.raises(UserError, match=error(":", *values)):
        load(CIFAR10, folder)


def test_no_cifar10_at_all_names_both_layouts(tmp_path: Path) -> None:
    folder = tmp_path / "absent"
    looked = f"{folder}, {folder}/cifar-10-batches-bin, {folder}/cifar-10-batches-py; "
    with pytest.raises(UserError, match=error("copy the", looked)):
        load(CIFAR10, folder)


# Fashion-MNIST


def gz(content: bytes) -> bytes:
    """Compress to the same bytes each time, because they become names of tests."""
    return gzip.compress(content, mtime=0)


def idx(values: np.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.tobytes()


def write_fashion_mnist(folder: Path, **changed: bytes) -> Path:
    """Write five training and three test images, except where `changed` has a file's content."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 5), ("t10k", 3)):
        images = np.arange(count * 28 * 28, dtype=np.uint32).astype(np.uint8)
        contents = {
            "images-idx3": idx(images.reshape(count, 28, 28)),
            "labels-idx1": idx(np.arange(count, dtype=np.uint8)),
        }
        for kind, content in contents.items():
            raw = changed.get(f"{part}_{kind[:6]}", gz(content))
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(raw)
    return folder


@pytest.mark.parametrize("folder", ["", "fashion-mnist", "debian"])
def test_fashion_mnist_is_read_from_each_folder(folder: str, tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path / folder)
    train, test = load(FASHION_MNIST, tmp_path, tmp_path / "debian")
    assert train.images.shape == (5, 28, 28, 1)
    assert train.images[1, 0, :3, 0].tolist() == [16, 17, 18]  # 28 × 28 is 16 above 3 × 256
    assert test.labels.tolist() == [0, 1, 2]
    assert train.images.dtype == np.uint8
    assert train.labels.dtype == np.int64
    assert train.images.flags.writeable


def test_debians_fashion_mnist(tmp_path: Path) -> None:
    assert FASHION_MNIST.system_folder is not None
    if not FASHION_MNIST.system_folder.exists():
        pytest.skip("no real Fashion-MNIST here: apt-get install dataset-fashion-mnist")
    train, test = load(FASHION_MNIST, tmp_path, FASHION_MNIST.system_folder)
    assert train.images.shape == (60_000, 28, 28, 1)
    assert np.bincount(train.labels).tolist() == [6000] * 10
    assert np.bincount(test.labels).tolist() == [1000] * 10
    assert train.images.mean() / 255 == pytest.approx(0.2860, abs=1e-4)  # as published


def test_without_fashion_mnist_the_folders_and_the_package_are_named(tmp_path: Path) -> None:
    spec = replace(FASHION_MNIST, system_folder=tmp_path / "debian")
    package = ": apt-get install dataset-fashion-mnist "
    with pytest.raises(UserError, match=error("copy the", package)) as caught:
        load(spec, tmp_path, tmp_path / "debian")
    for expected in (f"{tmp_path}, ", f"{tmp_path}/fashion-mnist, ", f"{tmp_path}/debian, "):
        assert expected in str(caught.value)
    with pytest.raises(UserError, match=error("copy the", "--data-dir ")):
        load(spec, tmp_path)


def test_a_missing_fashion_mnist_file_is_named(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    values = (f"{tmp_path}/t10k-labels-idx1-ubyte.gz ", "(No such file")
    with pytest.raises(UserError, match=error("cannot be read", *values)):
        load(FASHION_MNIST, tmp_path)


IMAGES = idx(np.zeros((5, 28, 28), np.uint8))


@pytest.mark.parametrize(
    ("name", "content", "id", "values"),
    [
        ("train_images", gz(IMAGES)[:-20], "a readable", [": ", "("]),
        ("train_images", b"plain", "a readable", [": ", "("]),
        ("train_images", gz(b"\0\0\x08"), "bytes, too", [": 3 bytes"]),
        (
            "train_images",
            gz(b"\x89PNG" + IMAGES),
            "dimensions",
            [": ", "89504e47 ", "00000803,", "3 dimensions"],
        ),
        ("train_images", gz(IMAGES[:-1]), "bytes and", [": ", "5 × 28 × 28 bytes ", "3,919 "]),
        (
            "t10k_labels",
            gz(idx(np.zeros(4, np.uint8))),
            "labels for",
            [" ", "4 labels ", "3 images ", "t10k-images-idx3-ubyte.gz"],
        ),
    ],
)
def test_a_damaged_fashion_mnist_file_is_one_sentence(
    name: str, content: bytes, id: str, values: list[str], tmp_path: Path
) -> None:
    write_fashion_mnist(tmp_path, **{name: content})
    file = {"train_images": "train-images-idx3", "t10k_labels": "t10k-labels-idx1"}[name]
    sentence = error(id, f"{tmp_path}/{file}-ubyte.gz", *values)
    with pytest.raises(UserError, match=f"^{sentence}$"):
        load(FASHION_MNIST, tmp_path)


@pytest.mark.parametrize(
    ("changed", "id", "values"),
    [
        (
            {"train_images": gz(idx(np.zeros((5, 9, 9), np.uint8)))},
            "its images",
            ["9 × 9 × 1 ", "28 × 28 × 1"],
        ),
        (
            {"t10k_labels": gz(idx(np.array([0, 10, 1], np.uint8)))},
            "one of 0",
            ["label 10 ", "0 to 9"],
        ),
        (
            {
                "t10k_images": gz(idx(np.zeros((0, 28, 28), np.uint8))),
                "t10k_labels": gz(idx(np.zeros(0, np.uint8))),
            },
            "there are",
            ["testing"],
        ),
    ],
)
def test_data_in_the_same_format_of_another_data_set(
    changed: dict[str, bytes], id: str, values: list[str], tmp_path: Path
) -> None:
    write_fashion_mnist(tmp_path, **changed)
    sentence = error(id, f"{tmp_path}: ", *values)
    with pytest.raises(UserError, match=f"^{sentence}$"):
        load(FASHION_MNIST, tmp_path)
