"""The corruptions on a GPU give what they give on the CPU.

Run by hand:  python scripts/gpu_tests.py tests/gpu/test_corruptions_gpu.py
"""

import pytest
import torch
from torch.nn.functional import interpolate

from vitruvius.corruptions import corruptions
from vitruvius.corruptions.base import IMAGENET_C

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def scenes(size, count=6):
    coarse = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    return (interpolate(coarse, size=(size, size), mode="bicubic").clamp(0, 1) * 255).round() / 255


@pytest.mark.parametrize("size", [32, 224])
@pytest.mark.parametrize("name", IMAGENET_C)
def test_the_gpu_corrupts_as_the_cpu_does(name, size):
    x = scenes(size)
    for severity in (1, 3, 5):
        corrupt = corruptions[name](severity=severity)
        ids = torch.arange(len(x))
        expected, found = corrupt.apply(x, ids=ids), corrupt.apply(x.cuda(), ids=ids)
        assert found.is_cuda
        levels = 255 * (found.cpu() - expected).abs()
        if name == "jpeg_compression":  # on the CPU libjpeg's own; now and then a coefficient rounds otherwise
            assert levels.mean() < 0.5, (severity, levels.mean())
            assert (levels > 1.5).float().mean() < 0.06, severity
            continue
        assert levels.mean() < 0.02, (
            severity,
            levels.mean(),
        )  # rounding moves some pixels by a level
        assert (levels > 1.5).float().mean() < 1e-4, (severity, levels.max())
