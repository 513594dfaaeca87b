"""CIFAR-10 and Fashion-MNIST: real data is read correctly, anything else is refused in one sentence.

Tests mpiddp/train/data/.
python -m pytest tests/test_data_sources.py
"""

import gzip
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mpiddp.errors import UserError
from mpiddp.train.data import cifar10, fashion_mnist
from mpiddp.train.data.arrays import ArrayDataset, ImageArrays, default_data_dir, sha256

BATCHES = cifar10.TRAIN_BATCHES + cifar10.TEST_BATCHES


# Arrays


def test_sha256_covers_images_and_labels() -> None:
    def dataset(image: int = 1, label: int = 2) -> ArrayDataset:
        part = ImageArrays(np.full((1, 2, 2, 3), image, np.uint8), np.array([label], np.int64))
        return ArrayDataset("tiny", 3, part, part)

    assert sha256(dataset()) == sha256(dataset())
    assert len({sha256(dataset()), sha256(dataset(image=0)), sha256(dataset(label=0))}) == 3


def test_default_data_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPIDDP_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    assert default_data_dir() == Path("/home/ada/.cache/mpiddp")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert default_data_dir() == Path("/cache/mpiddp")
    monkeypatch.setenv("MPIDDP_DATA", "/data")
    assert default_data_dir() == Path("/data")


# CIFAR-10 from a folder


def test_cifar10_is_found_in_its_folder_and_in_the_parent_folder(
    official: Path, tmp_path: Path
) -> None:
    (tmp_path / "cifar-10-batches-bin").symlink_to(official)
    for folder in (official, tmp_path):
        dataset = cifar10.load(folder)
        assert (dataset.name, dataset.num_classes) == ("cifar10", 10)
        assert dataset.train.images.shape == (50_000, 32, 32, 3)
        assert dataset.test.images.shape == (10_000, 32, 32, 3)
        assert dataset.train.labels[:5].tolist() == [6, 9, 9, 4, 1]  # a frog, two trucks, …
        assert dataset.test.labels.dtype == np.int64
        assert np.bincount(dataset.test.labels).tolist() == [1000] * 10


def test_the_pickled_layout_gives_the_same_arrays(official: Path, scratch: Path) -> None:
    dataset = cifar10.load(official)
    folder = scratch / "cifar-10-batches-py"
    folder.mkdir()
    for index, name in enumerate(BATCHES):
        part = dataset.test if name == "test_batch" else dataset.train
        rows = slice(index % 5 * 10_000, (index % 5 + 1) * 10_000)
        pixels = part.images[rows].transpose(0, 3, 1, 2).reshape(10_000, 3072)
        labels = part.labels[rows].tolist()
        if name == "data_batch_1":  # as Python 3 pickles it
            names = [f"leptodactylus_s_{number:06}.png".encode() for number in range(10_000)]
            batch = {b"data": pixels, b"labels": labels, b"filenames": names}
            content = pickle.dumps(batch, protocol=2)
        else:
            content = python2_pickle(pixels, labels)
        (folder / name).write_bytes(content)

    assert sha256(cifar10.load(scratch)) == sha256(dataset)


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


@pytest.mark.parametrize(("function", "named"), [(os.system, "posix.system"), (eval, "eval")])
def test_a_malicious_pickle_is_refused_and_runs_nothing(
    function: object, named: str, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    command = (
        f"mkdir {victim}" if function is os.system else f"__import__('os').mkdir({str(victim)!r})"
    )
    content = pickle.dumps({b"labels": [], b"data": Malicious(function, command)}, protocol=2)
    (tmp_path / "data_batch_1").write_bytes(content)

    with pytest.raises(UserError, match=rf"data_batch_1: .*{named}, which is refused"):
        cifar10.load(tmp_path)
    assert not victim.exists()

    pickle.loads(content)  # without the refusal, the command runs
    assert victim.exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "pickle exhausted before seeing STOP"),
        (b"no pickle", "not one of CIFAR-10's batches"),
        (pickle.dumps([]), "not one of CIFAR-10's batches"),
        (pickle.dumps({b"data": 1, b"labels": [1]}), "not one of CIFAR-10's batches"),
        (pickle.dumps({b"data": np.zeros(3), b"labels": [1]}, 2), "'f8' instead of 'u1'"),
        (
            pickle.dumps({b"data": np.zeros((2, 2), np.uint8), b"labels": [1]}, 2),
            r"\(1,\) labels and \(2, 2\) pixels",
        ),
    ],
)
def test_a_damaged_pickle_is_one_sentence(content: bytes, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        cifar10.load(tmp_path)


# Loads CIFAR-10 from each folder, and prints the error, and by how many MB the peak of memory has risen.
PEAK = """
import resource, sys
from pathlib import Path
from mpiddp.errors import UserError
from mpiddp.train.data import cifar10
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for folder in sys.argv[1:]:
    try:
        cifar10.load(Path(folder))
    except UserError as error:
        print(error)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10, flush=True)
"""


def short(opcode: bytes, size: int) -> bytes:
    """A pickle of 9 or 13 bytes with one opcode that announces a size or an index."""
    return b"\x80\x02N" + opcode + struct.pack("<I", size) + b"."


HOSTILE_PICKLES = [
    (short(b"r", 0x04FF_FFFF), "'NoneType' object"),
    (short(b"T", 0x7FFF_FFFF), "expected 2147483647 bytes in a string4, but only 1 remain"),
    (short(b"X", 0x7FFF_FFFF), "expected 2147483647 bytes in a unicodestring4"),
    (short(b"B", 0xFFFF_FFFF), "expected 4294967295 bytes in a bytes4"),
    (short(b"\x8b", 0x7FFF_FFFF), "not enough data in stream to read long4"),
    (short(b"\x8e\0\0\0\0", 1), "expected 4294967296 bytes in a bytes8"),
    (short(b"\x96\0\0\0\0", 1), "expected 4294967296 bytes in a bytearray8"),
    (short(b"\x95\0\0\0\0", 1), "it contains FRAME, which is refused"),
    (b"\x80\x02p83886079\n.", "it contains PUT, which is refused"),
    (b"\x80\x02}(" + b"N" * 300_000 + b"u.", "it has more than 200,000 opcodes"),
    (
        # One text of 1 MB, encoded a thousand times.
        b"\x80\x02]X"
        + struct.pack("<I", 1 << 20)
        + b"x" * (1 << 20)
        + b"q\0("
        + b"c_codecs\nencode\nh\0X\6\0\0\0latin1\x86R" * 1000
        + b"e.",
        "its texts are larger than the file",
    ),
    (b"\x80\x02}N" + b"\x85" * 150_000 + b"Ns.", "nested in another way"),
    (b"\x80\x02}K\1\x85K\1s.", "one of its keys is a tuple"),
    (b"\x80\x02" + b"]" * 150_000 + b"a" * 149_999 + b".", "nested in another way"),
    (b"\x80\x02" + b"}K\1" * 60_000 + b"}" + b"s" * 60_000 + b".", "nested in another way"),
    (b"\x80\x02}K\1" + b"}K\1" * 9 + b"}\x85" + b"s\x85" * 9 + b"s.", "nested in another"),
    (
        b"\x80\x02" + b"cnumpy\ndtype\n" * 9 + b"K\1\x85R" + b"\x85R" * 8 + b".",
        "it builds another object",
    ),
]


def test_no_pickle_takes_more_memory_than_a_batch(tmp_path: Path) -> None:
    folders = [str(tmp_path / str(number)) for number in range(len(HOSTILE_PICKLES))]
    for folder, (content, _) in zip(folders, HOSTILE_PICKLES, strict=True):
        Path(folder).mkdir()
        (Path(folder) / "data_batch_1").write_bytes(content)
    done = subprocess.run([sys.executable, "-c", PEAK, *folders], capture_output=True, text=True)
    printed = done.stdout.splitlines()
    for folder, (_, complaint) in zip(folders, HOSTILE_PICKLES, strict=True):
        sentence, peak_mb = printed[:2]
        del printed[:2]
        assert f"{folder}/data_batch_1: not one of CIFAR-10's batches (" in sentence
        assert complaint in sentence
        assert int(peak_mb) < 100
    assert (printed, done.returncode, done.stderr) == ([], 0, "")


def test_a_file_larger_than_any_batch_is_not_read(tmp_path: Path) -> None:
    for name, complaint in (
        ("data_batch_1", "is not a file of at most 67,108,864 bytes"),
        ("data_batch_1.bin", "has 1,000,000,000,000 bytes instead of 30,730,000"),
    ):
        with (tmp_path / name).open("wb") as file:
            file.truncate(10**12)  # without a block on the disk
        with pytest.raises(UserError, match=f"{name} {complaint}"):
            cifar10.load(tmp_path)
        (tmp_path / name).unlink()


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "data_batch_1")
    with pytest.raises(UserError, match="data_batch_1 is not a file of at most"):
        cifar10.load(tmp_path)


def linked(official: Path, folder: Path, **changed: bytes) -> Path:
    """The official batches in `folder`, except the changed ones."""
    for name in BATCHES:
        if name in changed:
            (folder / f"{name}.bin").write_bytes(changed[name])
        else:
            (folder / f"{name}.bin").symlink_to(official / f"{name}.bin")
    return folder


def test_a_flipped_bit_is_detected(official: Path, scratch: Path) -> None:
    content = bytearray((official / "test_batch.bin").read_bytes())
    content[12_345_678] ^= 1
    folder = linked(official, scratch, test_batch=bytes(content))
    with pytest.raises(
        UserError, match=f"^{folder}: .*SHA-256 .*{cifar10.SHA256}; remove {folder}"
    ):
        cifar10.load(folder)


def test_a_short_batch_is_named(official: Path, scratch: Path) -> None:
    folder = linked(official, scratch, data_batch_3=b"short")
    with pytest.raises(UserError, match=r"data_batch_3.bin has 5 bytes instead of 30,730,000"):
        cifar10.load(folder)


def test_a_missing_batch_is_named(official: Path, scratch: Path) -> None:
    folder = linked(official, scratch)
    (folder / "test_batch.bin").unlink()
    with pytest.raises(UserError, match=r"test_batch.bin: No such file.*; remove"):
        cifar10.load(folder)


def test_no_cifar10_at_all_names_both_layouts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cifar-10-batches-bin .* or cifar-10-batches-py"):
        cifar10.load(tmp_path / "absent")


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
    dataset = fashion_mnist.load(tmp_path, tmp_path / "debian")
    assert (dataset.name, dataset.num_classes) == ("fashion-mnist", 10)
    assert dataset.train.images.shape == (5, 28, 28, 1)
    assert dataset.train.images[1, 0, :3, 0].tolist() == [16, 17, 18]  # 28 × 28 is 16 above 3 × 256
    assert dataset.test.labels.tolist() == [0, 1, 2]
    assert dataset.train.images.dtype == np.uint8
    assert dataset.train.labels.dtype == np.int64
    assert dataset.train.images.flags.writeable


def test_debians_fashion_mnist(tmp_path: Path) -> None:
    if not fashion_mnist.DEBIAN_DIR.exists():
        pytest.skip("no real Fashion-MNIST here: apt-get install dataset-fashion-mnist")
    dataset = fashion_mnist.load(tmp_path, fashion_mnist.DEBIAN_DIR)
    assert dataset.train.images.shape == (60_000, 28, 28, 1)
    assert np.bincount(dataset.train.labels).tolist() == [6000] * 10
    assert np.bincount(dataset.test.labels).tolist() == [1000] * 10
    assert dataset.train.images.mean() / 255 == pytest.approx(0.2860, abs=1e-4)  # as published


def test_without_fashion_mnist_the_folders_and_the_package_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        fashion_mnist.load(tmp_path, tmp_path / "debian")
    for expected in (f"{tmp_path}, ", f"{tmp_path}/fashion-mnist, ", f"{tmp_path}/debian; "):
        assert expected in str(caught.value)
    assert "apt-get install dataset-fashion-mnist" in str(caught.value)


IMAGES = idx(np.zeros((5, 28, 28), np.uint8))


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("train_images", gz(IMAGES)[:-20], "not a readable gzip file"),
        ("train_images", b"plain", "not a readable gzip file"),
        ("train_images", gz(b"\0\0\x08"), "3 bytes, too short"),
        ("train_images", gz(b"\x89PNG" + IMAGES), "starts with 89504e47 instead of 00"),
        ("train_images", gz(IMAGES[:-1]), "5 × 28 × 28 bytes and 3,919 follow"),
        ("train_images", gz(idx(np.zeros((5, 9, 9), np.uint8))), r"of \(9, 9\) pixels"),
        ("t10k_labels", gz(idx(np.zeros(4, np.uint8))), "4 labels for the 3 images"),
        ("t10k_labels", gz(idx(np.array([0, 10, 1], np.uint8))), "label 10 is not one"),
    ],
)
def test_a_damaged_fashion_mnist_file_is_one_sentence(
    name: str, content: bytes, complaint: str, tmp_path: Path
) -> None:
    part, kind = name.split("_")
    write_fashion_mnist(tmp_path, **{name: content})
    with pytest.raises(UserError, match=rf"{part}-{kind}-idx\d-ubyte.gz.*{complaint}"):
        fashion_mnist.load(tmp_path)
