"""Small image data sets as arrays in memory: a batch is selected by an index."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class ImageArrays:
    """Images and their classes: `images` uint8 [N, H, W, C], `labels` int64 [N]; writable."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
