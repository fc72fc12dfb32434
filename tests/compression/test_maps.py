"""Average maps are plain means of the maps the softmax makes."""

from __future__ import annotations

import pytest
import torch

import vitruvius
from vitruvius._errors import DataError
from vitruvius._files import load_tensors
from vitruvius.attention import part
from vitruvius.compression import average_maps, save_maps


def small(**kwargs: object) -> torch.nn.Module:
    return vitruvius.create_model("vitruvius/vit_digits", depth=2, **kwargs)  # type: ignore[arg-type]


def test_the_mean_map_equals_a_slow_loop_over_images() -> None:
    model = small()
    x = torch.rand(7, 3, 8, 8)
    batches = [(x[:4], torch.zeros(4, dtype=torch.long)), (x[4:], torch.zeros(3, dtype=torch.long))]
    expected = torch.zeros(3, 16, 16, dtype=torch.float64)
    for image in x:
        with vitruvius.record(model) as seen, torch.no_grad():
            model(image[None])
        q, k = seen["blocks.1.attn"].q[0].double(), seen["blocks.1.attn"].k[0].double()
        for head in range(3):
            for query in range(16):
                logits = torch.stack([(q[head, query] * k[head, key]).sum() / 16**0.5 for key in range(16)])
                expected[head, query] += logits.softmax(0) / len(x)
    maps = average_maps(model, batches)
    assert set(maps) == {"blocks.0.attn", "blocks.1.attn"}
    torch.testing.assert_close(maps["blocks.1.attn"].double(), expected, atol=1e-6, rtol=1e-5)


def test_rows_sum_to_one_and_stages_are_seen() -> None:
    keep = torch.ones(3, 16, 16, dtype=torch.bool)
    keep[:, :, 5] = False
    model = small(attention=[part("mask", keep=keep)])
    maps = average_maps(model, [(torch.rand(3, 3, 8, 8), torch.zeros(3, dtype=torch.long))])
    for map_ in maps.values():
        torch.testing.assert_close(map_.sum(-1), torch.ones(3, 16))
        assert (map_[:, :, 5] == 0).all()


def test_maps_are_saved_with_what_they_are(tmp_path: object) -> None:
    file = tmp_path / "maps.safetensors"  # type: ignore[operator]
    save_maps(file, {"blocks.0.attn": torch.eye(3)[None]}, data="digits")
    tensors, metadata = load_tensors(file)
    assert torch.equal(tensors["blocks.0.attn"], torch.eye(3)[None])
    assert metadata["data"] == '"digits"'


def test_no_images_is_an_error() -> None:
    with pytest.raises(DataError, match="no images"):
        average_maps(small(), [])
