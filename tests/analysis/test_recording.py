"""What a page shows of the model itself, recorded from tiny real models; and how it is made to fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import vitruvius
from families import FAMILIES
from vitruvius._errors import DataError, NoSiteError
from vitruvius.analysis.explanations import relevance
from vitruvius.analysis.recording import (
    MAX_PICTURES,
    Examples,
    SiteMaps,
    fit,
    pool,
    record_examples,
    save_model_facts,
)
from vitruvius.attention import part
from vitruvius.report.run import read_examples
from vitruvius.surgery import rewire

Tiny = tuple[nn.Module, Tensor]


def maps_of_first_block(model: nn.Module, x: Tensor, *, symmetric: bool) -> Tensor:
    """softmax(q kᵀ · scale) written out, from what enters blocks.0.attn; with k for q where symmetric."""
    attn: Any = model.get_submodule("model.blocks.0.attn" if hasattr(model, "model") else "blocks.0.attn")
    taken: list[Tensor] = []
    handle = attn.register_forward_pre_hook(lambda _, args: taken.append(args[0]))
    model(x)
    handle.remove()
    q, k, _ = attn.qkv(taken[0]).unflatten(-1, (3, attn.num_heads, attn.head_dim)).permute(2, 0, 3, 1, 4)
    q, k = attn.q_norm(q), attn.k_norm(k)
    return ((k if symmetric else q) @ k.mT * attn.scale).softmax(-1).detach()


def test_recorded_maps_are_the_softmax_of_the_model(tiny_vit: Tiny, tmp_path: Path) -> None:
    model, x = tiny_vit
    before = model(x)
    kept = record_examples(tmp_path, model, x, labels=["a", "b"])
    assert torch.equal(model(x), before)
    assert not any("core" in name for name, _ in model.named_modules())
    found = read_examples(tmp_path, remarks := [])
    assert remarks == []
    assert found is not None
    assert [site.name for site in found.sites] == kept
    assert found.predictions == [str(answer) for answer in model(x).argmax(-1).tolist()]
    expected = maps_of_first_block(model, x, symmetric=False)
    torch.testing.assert_close(torch.from_numpy(found.sites[0].maps).float(), expected, atol=1e-3, rtol=1e-3)


def test_a_picture_is_kept_clean_and_attacked_with_the_names_of_its_classes(tiny_vit: Tiny, tmp_path: Path) -> None:
    model, x = tiny_vit
    names = [f"class {number}" for number in range(1000)]
    record_examples(tmp_path, model, x, [3, 4], attacked=x.flip(-1), threat="flipped", names=names, pictures=["p", "q"])
    found = read_examples(tmp_path, remarks := [])
    assert remarks == []
    assert found is not None
    assert found.pictures == ["p", "p", "q", "q"]
    assert found.threats == ["", "flipped"] * 2
    assert found.labels == ["class 3", "class 3", "class 4", "class 4"]
    answers = model(torch.stack([x, x.flip(-1)], 1).flatten(0, 1)).argmax(-1).tolist()
    assert found.predictions == [f"class {answer}" for answer in answers]
    maps = maps_of_first_block(model, x.flip(-1), symmetric=False)
    torch.testing.assert_close(torch.from_numpy(found.sites[0].maps[1::2]).float(), maps, atol=1e-3, rtol=1e-3)
    views = torch.stack([x[0], x[0].flip(-1)])
    rests_on = relevance(model, views, model(views).argmax(-1))
    assert found.relevance is not None
    torch.testing.assert_close(torch.from_numpy(found.relevance[:2]), rests_on, atol=1e-5, rtol=1e-4)


def test_a_model_without_a_head_has_maps_and_no_predictions(tmp_path: Path) -> None:
    model = vitruvius.create_model("vitruvius/vit_digits", num_classes=0, depth=1)
    record_examples(tmp_path, model, torch.rand(2, 3, 8, 8), ["cat", "dog"])
    found = read_examples(tmp_path, [])
    assert found is not None
    assert found.predictions == ["", ""]
    assert found.labels == ["cat", "dog"]
    assert found.relevance is None


def test_attacked_images_of_another_size_are_refused(tiny_vit: Tiny, tmp_path: Path) -> None:
    model, x = tiny_vit
    with pytest.raises(DataError, match="attacked images are"):
        record_examples(tmp_path, model, x, attacked=x[:1])
    assert list(tmp_path.iterdir()) == []


def test_a_stage_shows_in_the_maps(tiny_vit: Tiny, tmp_path: Path) -> None:
    model, x = tiny_vit
    expected = maps_of_first_block(model, x, symmetric=True)
    rewire(model, "symmetric", "softmax", where="blocks.0.attn")
    record_examples(tmp_path, model, x)
    found = read_examples(tmp_path, [])
    assert found is not None
    torch.testing.assert_close(torch.from_numpy(found.sites[0].maps).float(), expected, atol=1e-3, rtol=1e-3)


def test_a_model_without_a_grid_of_tokens_is_refused(tmp_path: Path) -> None:
    model, x = next(family for family in FAMILIES if str(family).startswith("xcit")).randomised()
    with pytest.raises(NoSiteError, match="nothing to view"):
        record_examples(tmp_path, model, x, where="blocks.*")
    assert list(tmp_path.iterdir()) == []


def test_facts_of_the_model_name_parameters_sites_and_cores(tiny_vit: Tiny, tmp_path: Path) -> None:
    model, _ = tiny_vit
    rewire(model, part("low_rank", rank=1), "softmax", where="blocks.0.attn")
    save_model_facts(tmp_path, model)
    facts = json.loads((tmp_path / "model.json").read_text())
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert [site["core"] for site in facts["sites"]][:2] == ["low_rank → softmax", "upstream"]
    assert facts["sites"][0]["name"] == "blocks.0.attn"
    assert facts["sites"][0]["num_queries"] == facts["sites"][0]["num_keys"] > 1


def test_a_model_without_attention_has_facts_too(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet")
    save_model_facts(tmp_path, model)
    parameters = sum(p.numel() for p in model.parameters())
    assert json.loads((tmp_path / "model.json").read_text()) == {"parameters": parameters, "sites": []}


def random_site(random: np.random.Generator, n: int, heads: int, grid: tuple[int, int], prefix: int) -> SiteMaps:
    tokens = prefix + grid[0] * grid[1]
    maps = random.random((n, heads, tokens, tokens)).astype(np.float32)
    return SiteMaps(name="a", maps=maps / maps.sum(-1, keepdims=True), grid=grid, num_prefix_tokens=prefix)


def test_pooled_patches_are_means_over_queries_and_sums_over_keys() -> None:
    site = random_site(np.random.default_rng(1), 2, 3, (3, 4), 1)
    small = pool(site)
    assert small.grid == (2, 2)
    np.testing.assert_allclose(small.maps.sum(-1), 1, rtol=1e-5)
    group = lambda token: 0 if token == 0 else 1 + ((token - 1) // 4 // 2) * 2 + (token - 1) % 4 // 2  # noqa: E731
    expected = np.zeros((2, 3, 5, 5))
    for q in range(13):
        for k in range(13):
            expected[..., group(q), group(k)] += site.maps[..., q, k]
    sizes = np.bincount([group(q) for q in range(13)])
    np.testing.assert_allclose(small.maps, expected / sizes[:, None], rtol=1e-5)


@pytest.mark.parametrize(
    ("grid", "count", "said"),
    [
        ((4, 4), 2, ""),
        ((4, 4), 30, f"{MAX_PICTURES} of 30 images are shown to keep the page small."),
        ((14, 14), 2, "2 × 2 patches are taken together to keep the page small."),
        ((3, 90), 2, "1 of 2 images are shown, 1 of 4 sites are shown to keep the page small."),
    ],
)
def test_examples_are_made_to_fit(grid: tuple[int, int], count: int, said: str) -> None:
    random = np.random.default_rng(3)
    sites = [random_site(random, count, 1, grid, 1) for _ in range(4)]
    words = [str(place) for place in range(count)]
    told = dict.fromkeys(("labels", "predictions", "pictures"), words) | {"threats": [""] * count}
    limit = 80_000
    smaller, note = fit(Examples(images=np.zeros((count, 3, 4, 4), np.uint8), sites=sites, **told), limit)
    assert note == said
    assert sum(site.maps.size for site in smaller.sites) <= limit
    assert len(smaller.images) == len(smaller.labels) == len(smaller.sites[0].maps)
