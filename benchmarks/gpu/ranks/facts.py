"""What torch says of this machine, and the precision of fp32 on it.

python -m benchmarks.gpu.ranks.facts
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mpiddp.bench.result_lines import emit


def main() -> None:
    has_gpu = torch.cuda.is_available()
    found: dict[str, Any] = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }
    if has_gpu:
        free, total = torch.cuda.mem_get_info(0)
        found |= {
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "capability": list(torch.cuda.get_device_capability(0)),
            "memory_total_bytes": total,
            "memory_free_bytes": free,
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        }
    found |= _errors(torch.device("cuda" if has_gpu else "cpu"))
    emit(found)


def _errors(device: torch.device) -> dict[str, float]:
    """The relative errors of fp32 against fp64: near 1e-7 in fp32, above 1e-5 in TF32."""
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(8, 64, 32, 32, generator=draw, dtype=torch.float64)
    weights = torch.randn(64, 64, 3, 3, generator=draw, dtype=torch.float64)
    matrix = torch.randn(512, 512, generator=draw, dtype=torch.float64)
    return {
        "conv_error": _error(lambda a, b: F.conv2d(a, b, padding=1), images, weights, device),
        "matmul_error": _error(torch.matmul, matrix, matrix, device),
    }


def _error(
    function: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, device: torch.device
) -> float:
    exact = function(a, b)
    found = function(a.float().to(device), b.float().to(device)).double().cpu()
    return float((found - exact).norm() / exact.norm())


if __name__ == "__main__":
    main()
