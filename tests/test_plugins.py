"""A piece of one's own is one file outside the package: here that file is written, named under `plugins:`, and used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch

import vitruvius
from small_run import RECIPE, SMALL
from vitruvius._registry import load_plugins
from vitruvius.attacks.base import attacks
from vitruvius.attention import attentions
from vitruvius.cli import main
from vitruvius.corruptions import corruptions
from vitruvius.listing import listing
from vitruvius.surgery import base as _socket

Plugin = Callable[[str, str], None]

SOCKET = '''
from timm.models.davit import WindowAttention

from vitruvius.heads import Heads
from vitruvius.surgery.base import Socket, fused_head_weights, merge_heads, split_heads


class DaViTSocket(Socket, WindowAttention):
    """DaViT: attention in windows."""

    family = "davit"
    attends = "windows"

    def forward(self, x):
        q, k, v = split_heads(self.qkv(x), 3, self.num_heads)
        return self.proj(merge_heads(self.core(Heads(q, k, v, None, self.scale, 0.0))))

    def head_weights(self):
        return fused_head_weights(self.qkv, self.proj, self.num_heads)

    def grid(self):
        return tuple(self.window_size)
'''

ATTENTION = '''
from vitruvius.attention import Stage, attentions


@attentions.register("louder")
class Louder(Stage):
    """Scores times a factor."""

    def __init__(self, site, *, factor: float = 2.0):
        super().__init__()
        self.factor = factor

    def forward(self, heads):
        return heads._replace(scale=heads.scale * self.factor)
'''

ATTACK = '''
from dataclasses import dataclass

from vitruvius.attacks.base import attacks


@attacks.register("brighten")
@dataclass(frozen=True, kw_only=True)
class Brighten:
    """Every pixel brighter by eps."""

    eps: float

    def __call__(self, model, x, y):
        return (x + self.eps).clamp(0, 1)
'''

CORRUPTION = '''
from dataclasses import dataclass
from typing import ClassVar

from vitruvius.corruptions.base import Corruption, corruptions


@corruptions.register("dusk")
@dataclass(frozen=True, kw_only=True)
class Dusk(Corruption):
    """Less light."""

    name: ClassVar = "dusk"
    imagenet: ClassVar = (0.9, 0.8, 0.7, 0.6, 0.5)
    cifar: ClassVar = imagenet

    def disturb(self, x, dice, /, left):
        return x * left
'''


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plugin:
    """Write a module into the current folder and load it as a recipe does; forget afterwards what it registered."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_socket, "_SOCKETS", dict(_socket._SOCKETS))
    for registry in (attentions, attacks, corruptions):
        everything = {name: registry[name] for name in registry}  # loads all of them first
        monkeypatch.setattr(registry, "_pieces", everything)

    def write(name: str, text: str) -> None:
        (tmp_path / f"{name}.py").write_text(text)
        load_plugins([name])

    return write


def test_a_model_family_is_one_file(plugin: Plugin) -> None:
    plugin("my_davit", SOCKET)
    torch.manual_seed(0)
    sizes = {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (2, 4), "num_classes": 10}
    model, x = timm.create_model("davit_tiny", **sizes).eval(), torch.rand(2, 3, 56, 56)
    expected = model(x)
    vitruvius.rewire(model, "softmax", input_size=(3, 56, 56))
    torch.testing.assert_close(model(x), expected)
    vitruvius.restore(model)
    vitruvius.rewire(model, "rpc:iterations=2", input_size=(3, 56, 56))
    assert not torch.allclose(model(x), expected)
    assert "davit" in listing("sockets")


def test_an_attention_is_one_file(plugin: Plugin) -> None:
    plugin("my_attention", ATTENTION)
    x = torch.rand(2, 3, 8, 8)
    plain, one, two = (
        vitruvius.create_model("vitruvius/vit_digits", depth=1, attention=attention)(x)
        for attention in ("softmax", "louder:factor=1", {"use": "louder", "factor": 3})
    )
    torch.testing.assert_close(one, plain)
    assert not torch.allclose(two, plain)
    assert "factor=2.0" in listing("attentions")


def test_an_attack_is_one_file(plugin: Plugin) -> None:
    plugin("my_attack", ATTACK)
    model = vitruvius.create_model("vitruvius/vit_digits", depth=1)
    batches = [(torch.rand(8, 3, 8, 8), torch.arange(8))]
    report = vitruvius.evaluate(model, batches, [attacks.make("brighten:eps=8/255")])
    assert "brighten" in str(report).lower()
    assert "brighten" in listing("attacks")


def test_a_corruption_is_one_file(plugin: Plugin, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin("my_corruption", CORRUPTION)
    run = str(tmp_path / "run")
    assert main(["train", str(RECIPE), *SMALL, "train.epochs=1", f"out={run}", "--quiet"]) == 0
    assert main(["evaluate", run, "--threat", "dusk:severity=5"]) == 0
    assert "\ndusk " in capsys.readouterr().out
    assert "dusk" in listing("corruptions")
