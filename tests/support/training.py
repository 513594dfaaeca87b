"""What a run has written, read as docs/checkpoints.md describes its files."""

import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpiddp
from mpiddp.checkpoints.tensor_files import read_tensors
from mpiddp.train.config import Config, parse, resolve
from mpiddp.train.data import Data, DeviceImages
from mpiddp.train.trainer import Trainer


def configured(*options: str, ranks: int = 1) -> Config:
    """The configuration of `mpiddp train OPTIONS…` on the CPUs of so many ranks."""
    return resolve(parse(list(options)), ranks, torch.device("cpu"))


CPU = torch.device("cpu")
HALF = (0.5, 0.5, 0.5)  # the mean of random images; twice their deviation does as well


def images(number: int, **options: Any) -> DeviceImages:
    """Random images in CIFAR-10's shape, of 10 classes."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (number, 32, 32, 3), dtype=np.uint8)
    labels = draw.integers(0, 10, number)
    return DeviceImages(pixels, labels, CPU, mean=HALF, std=HALF, **options)


def training_of(
    config: Config, train: DeviceImages, test: DeviceImages | None = None, kind: Any = Trainer
) -> Trainer:
    """A fresh training on these images. It needs a process group."""
    trainer: Trainer = kind(config, Data("", 10, 32, train, test), mpiddp.World.from_env(), Path())
    return trainer


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:08d}"


def by_hand(job: Path) -> Path:
    """A copy of an example for ranks that are forks, for which no agent has made a store."""
    line, copy = (
        'dist.init_process_group("nccl" if on_gpu else "gloo")',
        job.with_name(f"by_hand_{job.name}"),
    )
    copy.write_text(job.read_text(encoding="utf-8").replace(line, 'mpiddp.init(backend="gloo")'))
    return copy


def crashed_after(step: int, run: Path, copy: Path) -> Path:
    """A copy of a run, as a crash after the save of a step leaves it."""
    shutil.copytree(run, copy)
    for kept in steps_kept(copy):
        if kept > step:
            shutil.rmtree(step_folder(copy, kept))
    (copy / "summary.json").unlink()
    return copy


def verified(folder: Path) -> Path:
    """The folder of a checkpoint, after every byte of it was compared with its hash."""
    manifest = (folder / "manifest.json").read_bytes()
    assert (folder / "COMPLETE").read_text().strip() == sha256(manifest).hexdigest()
    entries = json.loads(manifest)
    names = {path.name for path in folder.iterdir()}
    assert names == {*entries, "manifest.json", "COMPLETE"}, folder
    for name, entry in entries.items():
        content = (folder / name).read_bytes()
        assert (len(content), sha256(content).hexdigest()) == (entry["bytes"], entry["sha256"])
    return folder


def steps_kept(run: Path) -> list[int]:
    """The steps of a run's checkpoints, each of which is verified."""
    folders = sorted((run / "checkpoints").glob("step_????????"))
    return [int(verified(folder).name.removeprefix("step_")) for folder in folders]


def contents(run: Path, step: int) -> dict[str, Any]:
    """All that a checkpoint has, by the names of its files; the entry "training" names the run's folder."""
    folder = verified(step_folder(run, step))
    tree = torch.load(folder / "tree.pt")
    tree["state"].pop("training", None)
    return {
        "tree": tree,
        **{path.stem: read_tensors(path)[0] for path in folder.glob("*.safetensors")},
    }


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same bits and shape, and batches of images the same memory format."""
    is_image = a.dim() == 4 and a.layout == torch.strided
    if a.dtype != b.dtype or a.shape != b.shape or (is_image and a.stride() != b.stride()):
        return False
    if a.layout == torch.strided and not a.is_quantized:
        a, b = (as_bytes(tensor) for tensor in (a, b))  # for torch.equal, -0.0 is 0.0
    return torch.equal(a, b)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    resolved = tensor.detach().resolve_conj().resolve_neg()
    return resolved.contiguous().reshape(-1).view(torch.uint8)


def unequal(a: Any, b: Any, where: str = "") -> list[str]:
    """The paths at which two nested structures of tensors differ in any bit; [] if they are equal."""
    if isinstance(a, torch.Tensor):
        return [] if same_bits(a, b) else [where]
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        return [path for key in a for path in unequal(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, (list, tuple)):
        pairs = enumerate(zip(a, b, strict=True))
        return [path for i, (x, y) in pairs for path in unequal(x, y, f"{where}/{i}")]
    return [] if a == b else [where]


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> dict[int, float]:
    """The training loss of each recorded step."""
    return {
        record["step"]: record["train_loss"] for record in records(run) if "train_loss" in record
    }


def summary(run: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return loaded
