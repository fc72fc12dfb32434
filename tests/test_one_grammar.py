"""One grammar for a piece with its settings: every public function takes all three forms, and refuses the same way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.convmixer import ConvMixer
from torch import nn

from vitruvius import create_model, initialise, rewire, survey
from vitruvius._errors import ConfigError, UnknownName
from vitruvius.attention import attentions, part
from vitruvius.converters import convert
from vitruvius.init import inits
from vitruvius.models.config import AttentionRule
from vitruvius.surgery.base import inner
from vitruvius.surgery.convmixer import use_filters

SMALL = {"img_size": 32, "patch_size": 16, "embed_dim": 48, "num_heads": 3, "depth": 1, "num_classes": 2}


def vit() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **SMALL)
    return model


def mixer() -> nn.Module:
    return ConvMixer(dim=8, depth=1, num_classes=2)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def iterations_of(model: nn.Module) -> int:
    made: Any = inner(model).get_submodule("blocks.0.attn.core.rpc")
    return int(made.iterations)


RPC = ["rpc:iterations=2", {"use": "rpc", "iterations": 2}, part("rpc", iterations=2)]
MIMETIC = ["mimetic:alpha=0.6", {"use": "mimetic", "alpha": 0.6}]


@pytest.mark.parametrize("spec", RPC, ids=["text", "mapping", "object"])
def test_an_attention_is_written_in_three_forms(spec: Any) -> None:
    assert iterations_of(rewire(vit(), spec)) == 2
    for attention in (spec, [spec], [AttentionRule(parts=[spec])], AttentionRule(parts=[spec])):
        assert iterations_of(create_model("vit_tiny_patch16_224", attention=attention, **SMALL)) == 2


def test_a_rule_may_be_written_as_a_recipe_writes_it() -> None:
    rule = {"where": "blocks.0.*", "parts": ["rpc:iterations=2"]}
    assert iterations_of(create_model("vit_tiny_patch16_224", attention=[rule], **SMALL)) == 2


@pytest.mark.parametrize("spec", MIMETIC, ids=["text", "mapping"])
def test_a_start_is_written_in_three_forms(spec: Any) -> None:
    expected = initialise(vit(), "mimetic", alpha=0.6, generator=seeded()).state_dict()
    found = initialise(vit(), spec, generator=seeded()).state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    made = [create_model("vit_tiny_patch16_224", init=init, seed=3, **SMALL) for init in (*MIMETIC, "mimetic")]
    weights = [inner(model).state_dict()["blocks.0.attn.qkv.weight"] for model in made]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_where_and_base_may_stand_among_the_settings_of_a_start_and_a_base_has_settings_too() -> None:
    expected = initialise(vit(), "mimetic", base="trunc_normal:std=0.1", where="blocks.0.*", generator=seeded())
    spec = {"use": "mimetic", "base": {"use": "trunc_normal", "std": 0.1}, "where": "blocks.0.*"}
    found = initialise(vit(), spec, generator=seeded()).state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.state_dict().items())


@pytest.mark.parametrize("spec", ["box:taps=2", {"use": "box", "taps": 2}])
def test_filters_are_written_in_the_same_forms(spec: Any) -> None:
    expected = use_filters(mixer(), "box", taps=2, generator=seeded()).state_dict()
    found = use_filters(mixer(), spec, generator=seeded()).state_dict()
    assert torch.equal(found["blocks.0.0.fn.0.weight"], expected["blocks.0.0.fn.0.weight"])


FUNCTIONS: dict[str, tuple[str, str, str, Callable[[Any], object]]] = {  # a name, a setting, its kind, the call
    "part": ("rpc", "iterations", "attention", part),
    "rewire": ("rpc", "iterations", "attention", lambda spec: rewire(vit(), spec)),
    "attention": (
        "rpc",
        "iterations",
        "attention",
        lambda spec: create_model("vit_tiny_patch16_224", attention=[spec], **SMALL),
    ),
    "rule": (
        "rpc",
        "iterations",
        "attention",
        lambda spec: create_model("vit_tiny_patch16_224", attention=[{"parts": [spec]}], **SMALL),
    ),
    "initialise": ("mimetic", "alpha", "init", lambda spec: initialise(vit(), spec, generator=seeded())),
    "init": ("mimetic", "alpha", "init", lambda spec: create_model("vit_tiny_patch16_224", init=spec, **SMALL)),
    "base": (
        "trunc_normal",
        "std",
        "base init",
        lambda spec: initialise(vit(), "mimetic", base=spec, generator=seeded()),
    ),
    "filters": ("gauss", "variance", "filter", lambda spec: use_filters(mixer(), spec, generator=seeded())),
    "convert": ("vitcod", "model_name", "converter", lambda spec: convert("nowhere.pth", spec)),
}
WRONG: dict[str, tuple[Callable[[str, str], Any], str]] = {  # what is written, of name and setting; what is said
    "unknown name": (lambda name, key: f"{name}x", "no {kind} named '{name}x'; did you mean '{name}'"),
    "unknown name in a mapping": (lambda name, key: {"use": f"{name}x"}, "no {kind} named '{name}x'"),
    "unknown setting": (lambda name, key: f"{name}:{key}s=2", "unknown key '{name}.{key}s'; did you mean '{key}'"),
    "unknown setting in a mapping": (lambda name, key: {"use": name, f"{key}s": 2}, "unknown key '{name}.{key}s'"),
    "setting without a value": (lambda name, key: f"{name}:{key}", "'{key}' in '{name}:{key}' is not of the form"),
    "setting twice": (lambda name, key: f"{name}:{key}=1,{key}=2", "sets '{key}' twice"),
    "no name": (lambda name, key: f":{key}=2", "does not begin with a name"),
    "nothing": (lambda name, key: "", "does not begin with a name"),
    "mapping without use": (lambda name, key: {key: 2}, "does not say which piece to use; add a key `use:`"),
    "use is not a name": (lambda name, key: {"use": 3}, "use = 3, expected the name of a piece"),
    "wrong type": (lambda name, key: {"use": name, key: [1, {}]}, r"{name}.{key} = \[1, {{}}\], expected"),
    "a number": (lambda name, key: 3, "3 is not an? {kind}; expected a name such as"),
    "a list": (lambda name, key: [name], r"\['{name}'\] is not an? {kind}; expected a name such as"),
}


CASES = [("part", wrong) for wrong in WRONG]
CASES += [(name, wrong) for name in FUNCTIONS for wrong in ("unknown name", "unknown setting in a mapping", "a number")]


@pytest.mark.parametrize(("function", "wrong"), sorted(set(CASES)))
def test_a_wrong_form_gets_the_same_words_everywhere(function: str, wrong: str) -> None:
    name, key, kind, call = FUNCTIONS[function]
    write, words = WRONG[wrong]
    with pytest.raises((ConfigError, UnknownName), match=words.format(name=name, key=key, kind=kind)):
        call(write(name, key))


def test_a_part_that_was_made_for_a_site_is_not_taken_for_one_that_makes() -> None:
    made = attentions["softmax"](survey(vit())["blocks.0.attn"])
    with pytest.raises(ConfigError, match="is not an attention; expected a name such as"):
        rewire(vit(), made)  # type: ignore[arg-type]


def test_a_setting_given_in_the_text_and_beside_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="'alpha' of 'mimetic' is set twice"):
        initialise(vit(), "mimetic:alpha=0.6", alpha=0.7, generator=seeded())
    assert "mimetic" in inits


def test_a_refusal_comes_before_the_checkpoint_is_read_and_leaves_the_model_alone(tmp_path: Path) -> None:
    model = vit()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ConfigError):
        rewire(model, "rpc:iterations=2", {"iterations": 2})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(ConfigError, match="unknown key"):
        convert(tmp_path / "missing.pth", "vitcod:nonsense=1")
