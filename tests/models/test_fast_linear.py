"""Linear layers in float32 by oneDNN: PyTorch's numbers and gradients; PyTorch's own operation for whoever looks."""

from contextlib import contextmanager, nullcontext

import pytest
import timm
import torch
from torch import nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import vitruvius._linear as module
from vitruvius._linear import fast_linear
from vitruvius.attacks import PGD
from vitruvius.models.base import PixelModel

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
MODEL, IMAGES = nn.Linear(1, 1), torch.zeros(1)


@pytest.fixture
def products(monkeypatch):
    """The shapes that oneDNN has multiplied, as on an AMD processor, however small."""
    seen = []
    product = module.product
    monkeypatch.setattr(module, "product", lambda x, w, b=None: seen.append((*x.shape, *w.shape)) or product(x, w, b))
    monkeypatch.setattr(module, "_amd_with_avx512", lambda: True)
    monkeypatch.setattr(module, "LEAST_PRODUCT", 0)
    monkeypatch.setattr(module, "LEAST_WORK", 0)
    return seen


@contextmanager
def without_onednn():
    """torch.backends.mkldnn.flags(enabled=False), which warns of Intel GPUs in torch 2.15."""
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(True)


def vit():
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5}
    return PixelModel(timm.models.VisionTransformer(**sizes)).eval()


@pytest.mark.parametrize("outputs", [3, 11])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_has_the_gradients_of_float64_twice(products, outputs, bias):
    make = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(*shape, generator=make) for shape in ((2, 4, 7), (outputs, 7), (outputs,)))
    x = x.transpose(0, 1)  # rows that do not follow each other in memory
    given = [t.requires_grad_() for t in (x, w, b)[: 2 + bias]]
    wide = [t.detach().double().requires_grad_() for t in given]

    def all_of(tensors):
        out = linear(*tensors).sin()
        first = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        return out, *first, *torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    with fast_linear(MODEL, IMAGES):
        found = all_of(given)
    assert products
    for ours, theirs in zip(found, all_of(wide), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-4)


def test_a_model_answers_and_learns_as_with_plain_layers(products):
    model, x = vit(), torch.rand(3, 3, 16, 16)
    answers = {}
    for way in ("ours", "plain"):
        with nullcontext() if way == "ours" else without_onednn():
            pixels = x.clone().requires_grad_()
            logits = model(pixels)
            answers[way] = logits, *torch.autograd.grad(logits.square().sum(), (pixels, *model.parameters()))
        assert len(products) == 4 * 2 + 1 + 2 * (4 * 2 + 1)  # forward; to images or tokens and to weights; none again
    for ours, plain in zip(answers["ours"], answers["plain"], strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_frozen_weights_keep_no_activations_for_a_gradient_of_the_images(products):
    layer, x = nn.Linear(48, 3).requires_grad_(False), torch.rand(2, 48, requires_grad=True)
    kept = []
    with (
        fast_linear(MODEL, IMAGES),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t),
    ):
        layer(x).sum().backward()
    assert products
    assert kept == [layer.weight.shape]


def test_an_attack_searches_a_foreign_model_with_fast_layers(products):
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    x, y = torch.rand(2, 3, 4, 4), torch.tensor([0, 1])
    moved = PGD(eps=8 / 255, steps=2)(model, x, y)
    assert products
    with without_onednn():
        torch.testing.assert_close(moved, PGD(eps=8 / 255, steps=2)(model, x, y))


def test_small_batches_and_models_of_convolutions_keep_pytorchs_own_layers(products, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(module, "_amd_with_avx512", lambda: True)
    vit = timm.models.VisionTransformer(img_size=32, patch_size=4, embed_dim=96, depth=4, num_heads=3, num_classes=10)
    cnn = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(14400, 10))
    for model, images, faster in ((vit, 1, False), (vit, 4, True), (cnn, 64, False)):
        with fast_linear(model, torch.zeros(images, 3, 32, 32)) as mode:
            assert (mode is not None) == faster


class Onlooker(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def within(context, model, x):
    with context:
        return model(x)


def tangent(model, x):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent.sum()


WATCHES = {
    "counted operations": lambda model, x: within(FlopCounterMode(display=False), model, x),
    "vmap": lambda model, x: torch.func.vmap(model)(x[:, None]),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
    "dual numbers": tangent,
    "trace": lambda model, x: torch.jit.trace(model, x, check_trace=False),
    "export": lambda model, x: torch.export.export(model, (x,)),
    "compile": lambda model, x: torch.compile(model, backend="eager")(x),
    "another mode": lambda model, x: within(Onlooker(), model, x),
    "autocast": lambda model, x: within(torch.autocast("cpu", torch.bfloat16), model, x),
    "float64": lambda model, x: model.double()(x.double()),
    "switched off": lambda model, x: within(without_onednn(), model, x),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:FutureWarning")
@pytest.mark.parametrize("watch", WATCHES.values(), ids=WATCHES)
def test_whoever_watches_or_transforms_sees_pytorchs_own_layer(products, watch):
    model = PixelModel(nn.Sequential(nn.Flatten(), nn.Linear(48, 3))).eval()
    watch(model, torch.rand(2, 3, 4, 4))
    assert not products
