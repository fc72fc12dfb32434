"""What is shown is what the model does: maps, rollout, explanations, classes; and the model stays as it was."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import pytest
import timm
import torch
from matplotlib import pyplot
from torch import Tensor

import vitruvius
from families import FAMILIES, randomise, vit
from vitruvius.analysis import explain
from vitruvius.analysis.rollout import Rollout
from vitruvius.attention.base import attention_map
from vitruvius.look.looking import Packed, moved
from vitruvius.models import PixelModel
from vitruvius.surgery import record, survey
from vitruvius.surgery.recording import core_of


@pytest.fixture
def model() -> PixelModel:
    """Two blocks on 32 x 32 images, 17 tokens; large enough numbers that attention is far from uniform."""
    torch.manual_seed(0)
    made = vit()()
    randomise(made, 0.3)
    return PixelModel(made).eval()


@pytest.fixture
def image() -> Tensor:
    return torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(1))


def upstream_maps(model: PixelModel, image: Tensor) -> list[Tensor]:
    """What timm's own attention multiplies its values with, without any code of ours."""
    maps: list[Tensor] = []
    plain = copy.deepcopy(model)
    for block in plain.model.blocks:  # type: ignore[union-attr]
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, args, out: maps.append(args[0].detach()))
    with torch.no_grad():
        plain(image[None])
    return maps


def test_maps_of_a_plain_model_are_the_softmax_that_timm_computes(model: PixelModel, image: Tensor) -> None:
    (view,) = vitruvius.look(model, image).views
    expected = upstream_maps(model, image)
    assert [layer.name for layer in view.layers] == ["blocks.0.attn", "blocks.1.attn"]
    for layer, map_ in zip(view.layers, expected, strict=True):
        assert np.abs(layer.maps - map_[0].numpy()).max() <= 1e-5
        assert map_.max() > 0.5, "the maps are far from uniform"
        assert (layer.kind, layer.grid, layer.prefix, layer.answering) == ("tokens", (4, 4), ("class token",), 0)


def test_maps_of_rpc_are_its_last_softmax_and_give_its_output(model: PixelModel, image: Tensor) -> None:
    rewired = vitruvius.rewire(model, "rpc:iterations=2")
    outputs: dict[str, Tensor] = {}
    for name in survey(rewired):
        core: Any = core_of(rewired, name)
        core.register_forward_hook(lambda _, __, out, name=name: outputs.__setitem__(name, out.detach()))
    with record(rewired) as seen, torch.no_grad():
        rewired(image[None])
    put_out = dict(outputs)  # to look runs the model again
    (view,) = vitruvius.look(rewired, image).views
    for layer in view.layers:
        core = core_of(rewired, layer.name)
        assert core is not None
        last = core.kernel.last_softmax(core.run_stages(seen[layer.name]).heads)
        assert last is not None
        assert np.abs(layer.maps - attention_map(last)[0].detach().numpy()).max() <= 1e-5
        assert torch.allclose(torch.from_numpy(layer.maps) @ seen[layer.name].v[0], put_out[layer.name][0], atol=1e-3)
        assert "rpc" in layer.core


def test_the_model_is_left_as_it_was(model: PixelModel, image: Tensor) -> None:
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    kinds = [type(module) for module in model.modules()]
    vitruvius.look(model, image, attention=["rpc"], sparsity=0.5, threat="fgsm:eps=2/255")
    assert [type(module) for module in model.modules()] == kinds
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_rollout_and_relevance_are_those_of_the_analyses(model: PixelModel, image: Tensor) -> None:
    (view,) = vitruvius.look(model, image).views
    follow = Rollout()
    with record(model) as seen, torch.no_grad():
        logits = model(image[None])
    for name, site in survey(model).items():
        follow.see(seen[name], site)
    assert view.rollout is not None
    assert np.allclose(view.rollout.ravel(), follow.result()["map"][0], atol=1e-5)
    best = logits[0].topk(5)
    assert [answer.number for answer in view.answers] == best.indices.tolist()
    assert np.allclose([a.probability for a in view.answers], logits[0].softmax(-1).topk(5).values, atol=1e-6)
    for answer in view.answers:
        expected = explain(model, image[None], "relevance", classes=torch.tensor([answer.number]))[0]
        assert np.allclose(view.relevance[answer.name], expected.detach(), atol=1e-4)


def test_relevance_of_many_tokens_is_found_class_by_class(
    model: PixelModel, image: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = vitruvius.look(model, image).views[0].relevance
    monkeypatch.setattr(sys.modules["vitruvius.look.looking"], "AT_ONCE", 1)
    alone = vitruvius.look(model, image).views[0].relevance
    assert list(together) == list(alone)
    assert all(np.allclose(together[name], alone[name], atol=1e-5) for name in alone)


def test_integrated_gradients_are_captums_for_the_class_asked_about(model: PixelModel, image: Tensor) -> None:
    captum = pytest.importorskip("captum.attr", reason="integrated gradients need captum, which is not installed")
    (view,) = vitruvius.look(model, image, of_class=3).views
    expected = captum.IntegratedGradients(model).attribute(image[None], target=3, n_steps=20).sum(1).abs()[0]
    assert list(view.gradients) == list(view.relevance) == ["class 3"]
    assert np.allclose(view.gradients["class 3"], expected, atol=1e-5)


def test_without_captum_a_note_says_what_to_install(
    model: PixelModel, image: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("captum", "captum.attr"):
        monkeypatch.setitem(sys.modules, name, None)
    (view,) = vitruvius.look(model, image).views
    assert not view.gradients
    assert any("pip install" in note for note in view.notes)


def test_a_threat_stays_in_its_ball_and_how_attention_moved_is_told(model: PixelModel, image: Tensor) -> None:
    clean, attacked = vitruvius.look(model, image, threat="pgd:eps=2/255,steps=3").views
    assert (clean.threat, attacked.threat) == ("", "pgd(eps=2/255, steps=3)")
    difference = (attacked.pixels - clean.pixels).abs().max()
    assert 0 < difference <= 2 / 255 + 1e-6
    with torch.no_grad():
        left = model(attacked.pixels[None]).softmax(-1)[0, clean.answers[0].number]
    assert left < clean.answers[0].probability
    expected = np.abs(attacked.layers[0].maps - clean.layers[0].maps).sum(-1).mean() / 2
    assert moved(clean.layers[0], attacked.layers[0]) == pytest.approx(expected)
    assert moved(clean.layers[0], clean.layers[0]) == 0


def test_attentions_stand_side_by_side_and_softmax_is_the_model_itself(model: PixelModel, image: Tensor) -> None:
    names = [view.model for view in vitruvius.look(model, image, attention="rpc:iterations=2").views]
    assert names == ["VisionTransformer", "rpc:iterations=2"]
    rpc, softmax = vitruvius.look(model, image, attention=["rpc:iterations=2", "softmax"]).views
    plain = vitruvius.look(model, image).views[0]
    assert np.allclose(softmax.layers[1].maps, plain.layers[1].maps, atol=2e-5)
    assert not np.allclose(rpc.layers[1].maps, plain.layers[1].maps, atol=1e-2)


def test_another_model_stands_beside(model: PixelModel, image: Tensor) -> None:
    other = copy.deepcopy(model)
    randomise(other, 0.1)
    first, second = vitruvius.look(model, image, beside=other).views
    assert first.answers != second.answers
    assert len(second.layers) == 2


def test_pruning_removes_the_share_asked_for_and_keeps_other_attention(model: PixelModel, image: Tensor) -> None:
    vitruvius.rewire(model, "rpc:iterations=2")
    plain, pruned = vitruvius.look(model, image, sparsity=0.5).views
    zeros = np.mean([(layer.maps < 1e-5).mean() for layer in pruned.layers])
    assert zeros >= 0.49
    assert pruned.layers[0].core == f"mask → {plain.layers[0].core}"
    assert pruned.model.endswith("50 % pruned")


def test_masks_of_a_file_are_used(model: PixelModel, image: Tensor, tmp_path: Any) -> None:
    from vitruvius.compression import average_maps, make_masks, save_masks

    maps = average_maps(model, [(image[None], torch.zeros(1, dtype=torch.int64))])
    masks = make_masks(maps, sparsity=0.5, sites=survey(model))
    save_masks(tmp_path / "masks.safetensors", masks)
    _, pruned = vitruvius.look(model, image, masks=tmp_path / "masks.safetensors").views
    for layer in pruned.layers:
        assert (layer.maps[~masks.keep[layer.name].numpy()] < 1e-5).all()


def test_a_model_without_a_head_shows_its_maps_and_says_so(image: Tensor) -> None:
    model = vit(num_classes=0)().eval()
    found = vitruvius.look(model, image, threat="fog:severity=2")
    assert all(len(view.layers) == 2 and view.rollout is not None and not view.answers for view in found.views)
    assert "no head" in str(found)


def test_registers_are_named_and_the_mean_of_patches_answers(image: Tensor) -> None:
    model, _ = next(family for family in FAMILIES if str(family) == "vit_registers").randomised()
    layer = vitruvius.look(model, image).views[0].layers[0]
    assert layer.prefix == ("register 1", "register 2", "register 3", "register 4")
    assert layer.answering == -1


def test_windows_lie_where_swin_puts_them(image: Tensor) -> None:
    """An oracle without our arithmetic: mark one patch, let timm roll and cut, and see in which window it lands."""
    from timm.models.swin_transformer import window_partition

    model, _ = next(family for family in FAMILIES if str(family) == "swin").randomised()
    (view,) = vitruvius.look(model, image).views
    shifted = [layer for layer in view.layers if layer.kind == "windows" and any(layer.shift)]
    assert shifted, "the second block shifts its windows"
    for layer in view.layers:
        assert layer.kind == "windows"
        assert layer.grid is not None
        patches = torch.arange(layer.grid[0] * layer.grid[1]).view(1, *layer.grid, 1)
        rolled = torch.roll(patches, shifts=(-layer.shift[0], -layer.shift[1]), dims=(1, 2))
        places = window_partition(rolled, layer.window).flatten(1).squeeze(-1)  # (W, tokens) → patch
        assert (layer.in_windows(places.numpy()) == patches.view(layer.grid).numpy()).all()
    assert any("rollout" in note for note in view.notes)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_family_shows_what_it_can(family: Any) -> None:
    """Nothing raises, and what is not shown is said."""
    model, x = family.randomised()
    (view,) = vitruvius.look(model, torch.rand(x.shape[1:])).views
    assert view.layers or view.notes
    assert len(view.layers) + len([note for note in view.notes if "attn" in note or "map" in note]) > 0
    for layer in view.layers:
        assert np.isfinite(layer.maps).all()


def test_a_model_without_attention_shows_its_classes(image: Tensor) -> None:
    model = timm.create_model("resnet18", num_classes=1000).eval()
    (view,) = vitruvius.look(model, torch.rand(3, 64, 64)).views
    assert not view.layers
    assert len(view.answers) == 5
    assert not view.answers[0].name.startswith("class ")
    assert any("no attention" in note for note in view.notes)


def test_packed_numbers_are_within_a_hundred_thousandth() -> None:
    for values in (torch.rand(1, 2, 50, 50).pow(6), torch.randn(1, 2, 9, 9)):
        packed = Packed.of(values)
        assert np.abs(packed.numpy() - values.numpy()).max() <= 1e-5 * (packed.high - packed.low)


def test_several_pictures_keep_their_names_apart_and_progress_counts_views(model: PixelModel, image: Tensor) -> None:
    told: list[tuple[float, float | None]] = []
    found = vitruvius.look(model, [image, image], progress=lambda done, total, text="": told.append((done, total)))
    assert [view.picture for view in found.views] == ["image 0", "image 0 (2)"]
    assert told[0] == (0, 2)
    assert told[-1] == (2, 2)


def test_a_result_is_short_in_print_and_a_page_in_a_notebook(model: PixelModel, image: Tensor) -> None:
    found = vitruvius.look(model, image)
    assert repr(found) == "<Look: VisionTransformer on image 0, 1 views>"
    assert found._repr_html_().startswith("<iframe srcdoc=")
    before = pyplot.get_fignums()
    axes = found.plot(layer=0, head=1)
    assert axes.shape[0] == 1
    assert len(pyplot.get_fignums()) == len(before) + 1, "where a notebook shows it"
    assert axes[0, 1].get_title("left").startswith("blocks.0.attn")
    with pytest.raises(ValueError, match="no layer"):
        found.plot(layer="blocks.7.attn")
    assert len(pyplot.get_fignums()) == len(before) + 1


def test_figures_are_written_as_png_and_pdf(model: PixelModel, image: Tensor, tmp_path: Any) -> None:
    files = vitruvius.look(model, image, threat="fgsm:eps=4/255").save_figures(tmp_path / "figures")
    expected = {f"1-image-0-{kind}.{suffix}" for kind in ("heads", "overview") for suffix in ("pdf", "png")}
    assert {file.name for file in files} == expected
    assert all(file.stat().st_size > 2000 for file in files)


def test_the_frame_holds_the_map_over_the_patches_head_by_head(model: PixelModel, image: Tensor, tmp_path: Any) -> None:
    pandas = pytest.importorskip("pandas", reason="frames need pandas, which is not installed")
    found = vitruvius.look(model, image, attention="rpc:iterations=2")
    frame = found.to_frame()
    assert len(frame) == 2 * 2 * 2 * 16, "attentions, layers, heads, patches"
    layer = found.views[1].layers[1]
    chosen = frame[(frame.model == "rpc:iterations=2") & (frame.layer == layer.name) & (frame["head"] == 1)]
    assert np.allclose(chosen.weight.to_numpy(), layer.maps[1, 0, 1:])
    assert found.to_csv(tmp_path / "look.csv") == (tmp_path / "look.csv").read_text()
    assert pandas.read_csv(tmp_path / "look.csv").weight.sum() == pytest.approx(frame.weight.sum())
