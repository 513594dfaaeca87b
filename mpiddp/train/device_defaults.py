"""The defaults of `mpiddp train` that depend on the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceDefaults:
    """The defaults of a run on one kind of device."""

    arch: str
    batch_size: int  # images per rank and backward pass
    epochs: int
    low_res: float  # the share of the epochs that are trained on smaller images
    max_shift: int  # pixels


# Small and quick: a few epochs learn more from images that change little.
ON_CPU = DeviceDefaults("wide_resnet14_2", batch_size=64, epochs=7, low_res=0.5, max_shift=2)
ON_GPU = DeviceDefaults("resnet18", batch_size=256, epochs=30, low_res=0.0, max_shift=4)
