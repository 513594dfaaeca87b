"""Write a folder of small JPEGs: `python -m benchmarks.gpu.ranks.make_images FOLDER COUNT`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = 80  # pixels
CLASSES = ("cat", "dog", "eel", "fox")


def main(folder: Path, count: int) -> None:
    draw = np.random.default_rng(0)
    for split, images in (("train", count), ("val", count // 4)):
        for number in range(images):
            label = CLASSES[number % len(CLASSES)]
            coarse = draw.integers(0, 256, (4, 4, 3), dtype=np.uint8)
            file = folder / split / label / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(coarse).resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
