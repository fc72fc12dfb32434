"""Explanations against gradients through written-out maps, loops, and models whose reasons are known."""

import importlib.util
from typing import ClassVar

import pytest
import torch
from torch import nn

from vitruvius._errors import ConfigError, DataError, MissingExtra, UnsuitableSite
from vitruvius.analysis import Table, analyse, analysing, explain, explanations
from vitruvius.analysis.explanations import attended_layers, attention_gradient, chance_map, relevance, score
from vitruvius.attention import part
from vitruvius.attention.base import DenseKernel, attention_map
from vitruvius.models import create_model

NAME = "vitruvius/vit_digits"


class Written(DenseKernel):
    """Softmax with its map in the graph, for these tests to differentiate."""

    maps: ClassVar[list] = []

    def __init__(self, site):
        super().__init__()

    def map(self, heads):
        found = attention_map(heads)
        if torch.is_grad_enabled():
            self.maps.append(found)
        return found


def images():
    return torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_the_gradient_of_a_map_is_that_of_a_map_in_the_graph():
    x, classes = images(), torch.tensor([1, 4, 7])
    layers = attended_layers(create_model(NAME, seed=2).eval(), x, classes)
    written = create_model(NAME, seed=2, attention=[Written]).eval()
    Written.maps.clear()
    total = written(x).gather(1, classes[:, None]).sum()
    expected = torch.autograd.grad(total, Written.maps)
    assert len(layers) == len(expected) > 1
    for layer, own, gradient in zip(layers, Written.maps, expected, strict=True):
        torch.testing.assert_close(layer.map, own.detach(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(layer.gradient, gradient, rtol=1e-3, atol=1e-6)


def test_relevance_is_the_rule_of_the_paper_written_out():
    model, x, classes = create_model(NAME, seed=2).eval(), images(), torch.tensor([1, 4, 7])
    layers = attended_layers(model, x, classes)
    site, tokens = layers[0].site, layers[0].map.shape[-1]
    flow = torch.eye(tokens).repeat(3, 1, 1)
    for layer in layers:
        step = torch.zeros(3, tokens, tokens)
        for h in range(layer.map.shape[1]):
            step += (layer.map[:, h] * layer.gradient[:, h]).clamp(min=0) / layer.map.shape[1]
        flow = flow + step @ flow
    expected = flow[:, 0, 1:] if site.num_prefix_tokens else flow.mean(1)
    torch.testing.assert_close(relevance(model, x, classes).flatten(1), expected)
    last = (layers[-1].map * layers[-1].gradient).clamp(min=0).mean(1)
    expected = last[:, 0, 1:] if site.num_prefix_tokens else last.mean(1)
    torch.testing.assert_close(attention_gradient(model, x, classes).flatten(1), expected)


DISTILLED = {"img_size": 32, "embed_dim": 12, "depth": 2}


@pytest.mark.parametrize(
    ("name", "settings", "answering"),
    [
        (NAME, {"global_pool": "avg", "class_token": True}, slice(1, None)),
        (NAME, {"global_pool": "avg", "class_token": False, "reg_tokens": 2}, slice(2, None)),
        ("deit_tiny_distilled_patch16_224", DISTILLED, slice(0, 2)),
    ],
    ids=["averaged", "registers", "distilled"],
)
def test_an_explanation_begins_at_the_tokens_that_the_head_sees(name, settings, answering):
    model = create_model(name, seed=2, **settings).eval()
    x = torch.rand(2, *model.data_config["input_size"], generator=torch.Generator().manual_seed(0))
    last = attended_layers(model, x, torch.tensor([1, 4]))[-1]
    step = (last.map * last.gradient).clamp(min=0).mean(1)
    others = torch.ones(step.shape[-1], dtype=torch.bool)
    others[answering] = False
    assert not step[:, others].any()  # whose gradient is zero
    found = attention_gradient(model, x, torch.tensor([1, 4]))
    torch.testing.assert_close(found.flatten(1), step[:, answering, last.site.num_prefix_tokens :].mean(1))
    assert (found.sum((1, 2)) > 0).all()


@pytest.mark.parametrize("spec", ["rpc", "twicing", "value_residual", "scaled:form=alpha", "sink"])
def test_other_attention_is_explained_by_its_true_maps(spec):
    model = create_model(NAME, seed=2, attention=[spec]).eval()
    found = explain(model, images(), "relevance")
    assert found.isfinite().all()
    assert (found >= 0).all()
    assert all(p.grad is None for p in model.parameters())


def test_what_does_more_than_weigh_values_is_refused_by_name():
    for name in ("differential", "gated"):
        with pytest.raises(UnsuitableSite, match=name):
            explain(create_model(NAME, attention=[name]).eval(), images())
    with pytest.raises(UnsuitableSite, match="merge or shift"):
        explain(create_model(NAME, attention=[part("tome", r=2)]).eval(), images())
    with pytest.raises(ConfigError, match="one class per image"):
        explain(create_model(NAME).eval(), images(), classes=torch.tensor([1]))


class Corner(nn.Module):
    """Answers by the brightness of its upper left corner alone."""

    def forward(self, x):
        bright = x[:, :, :2, :2].mean((1, 2, 3))
        return 8 * torch.stack([bright, 1 - bright], 1)


def test_an_explanation_that_knows_beats_chance_in_both_scores():
    x = images()
    x[:, :, :2, :2] = 1.0
    right = torch.zeros(3, 4, 4)
    right[:, 0, 0] = 1
    model = Corner().eval()
    knows = score(model, x, right)
    chances = [score(model, x, chance_map(right, seed=seed)) for seed in range(5)]
    assert knows.deletion.mean() < torch.stack([c.deletion for c in chances]).mean() - 0.05
    assert knows.insertion.mean() > torch.stack([c.insertion for c in chances]).mean() + 0.05


@pytest.mark.skipif(importlib.util.find_spec("captum") is not None, reason="captum is installed")
def test_without_captum_the_extra_is_named():
    with pytest.raises(MissingExtra, match="explain"):
        explain(create_model(NAME).eval(), images(), "integrated_gradients")


def test_integrated_gradients_are_captums():
    pytest.importorskip("captum")
    x = images()
    found = explain(Corner().eval(), x, "integrated_gradients:steps=8", classes=torch.zeros(3, dtype=torch.long))
    assert found.shape == (3, 8, 8)
    assert (found[:, 2:] == 0).all()


def test_explanations_of_many_images_have_scores_beside_chance_clean_and_attacked_and_keep_some_maps(monkeypatch):
    monkeypatch.setattr(analysing, "SHOWN", 2)
    model, x = create_model(NAME, seed=2).eval(), images()
    table = analyse(model, [x[:2], x[2:]], "relevance", attack="pgd:eps=0.1,steps=2", seed=3)
    assert [row.statistic for row in table.rows] == ["deletion", "insertion", "deletion_attacked", "insertion_attacked"]
    assert {(row.null, row.n, row.null_n) for row in table.rows} == {("chance", 3, 3)}
    assert table.facts["attack"] == "pgd(eps=0.1, steps=2)"
    maps = explain(model, x, "relevance")
    expected = score(model, x, maps)
    assert [row.mean for row in table.rows[:2]] == pytest.approx([float(part.mean()) for part in expected])
    kept = table.pictures["relevance"]
    assert torch.equal(kept.clean, x[:2])
    torch.testing.assert_close(kept.clean_map, maps[:2])
    assert 0 < (kept.attacked - kept.clean).abs().max() <= 0.1 + 1e-6
    again = analyse(model, [x], "relevance", attack=None, seed=3)
    assert [row.null_mean for row in again.rows] == pytest.approx([row.null_mean for row in table.rows[:2]])
    assert again.pictures["relevance"].attacked is None


@pytest.fixture
def corner():
    """The name of an explanation that points at the upper left corner."""
    name = "upper_left"

    @explanations.register(name)
    def point(model, x, classes):
        found = torch.zeros(len(x), 4, 4)
        found[:, 0, 0] = 1
        return found

    yield name
    del explanations._pieces[name]


def test_an_explanation_that_knows_is_told_to_beat_chance(corner, tmp_path):
    x = torch.rand(30, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    x[:, :, :2, :2] = 1.0
    table = analyse(Corner().eval(), [x], corner, attack=None)
    deletion, insertion = table.rows
    assert deletion.claim.startswith("below chance")
    assert insertion.claim.startswith("above chance")
    table.save(tmp_path)
    loaded = Table.load(tmp_path)
    assert loaded == table
    for mine, theirs in zip(loaded.pictures[corner], table.pictures[corner], strict=True):
        assert mine is theirs or torch.equal(mine, theirs)


@pytest.mark.parametrize("classes", [None, torch.tensor([0, 1])])
@pytest.mark.parametrize(
    ("images", "said"),
    [
        (torch.rand(2, 8, 8, 3), "channels last"),
        (torch.rand(2, 3, 16, 16), "resize them"),
        (torch.rand(3, 8, 8), r"images are \(3, 8, 8\); expected a tensor .*, of one image image\[None\]"),
        (torch.rand(2, 3, 8, 8).numpy(), "images are ndarray"),
    ],
)
def test_images_that_a_model_does_not_take_are_refused_in_one_sentence(images, said, classes):
    with pytest.raises(DataError, match=said):
        explain(create_model(NAME, depth=1).eval(), images, classes=classes)


def test_a_model_without_a_head_is_refused_as_on_the_command_line():
    headless = create_model(NAME, depth=1, num_classes=0).eval()
    images = torch.rand(2, 3, 8, 8)
    with pytest.raises(ConfigError, match="no head"):
        explain(headless, images)
    with pytest.raises(ConfigError, match="no head"):
        analyse(headless, [images], "relevance")
    assert analyse(headless, [images], "entropy", nulls=False).rows
