"""CUDA graphs in attacks: recorded passes say what the model says, and AutoAttack breaks the same images.

Run by hand:  python scripts/gpu_tests.py tests/gpu/test_replay_gpu.py
"""

import pytest
import timm
import torch

import vitruvius
from vitruvius.attacks import autoattack as module
from vitruvius.attacks._cuda_graphs import PAYS, GraphedModel
from vitruvius.attacks._models import loss_and_grad
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.attacks.base import CE
from vitruvius.attacks.square import Square

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

EPS = 1 / 255


def make_model(name="test_vit", *parts):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).cuda().eval().requires_grad_(False)
    return vitruvius.rewire(model, *parts) if parts else model


@pytest.mark.parametrize(
    ("name", "parts", "half"),
    [
        ("test_vit", (), False),
        ("test_resnet", (), False),
        ("deit_tiny_patch16_224", ("rpc",), True),
        ("xcit_nano_12_p16_224", (), False),
    ],
)
def test_recorded_passes_say_what_the_model_says(name, parts, half):
    model = make_model(name, *parts)
    size = 224 if "224" in name else 160
    view = GraphedModel(model, max_images=16)
    for turn in range(2 * PAYS):
        x, y = torch.rand(11, 3, size, size, device="cuda"), torch.arange(11, device="cuda") % 10
        with torch.autocast("cuda", torch.bfloat16, enabled=half, cache_enabled=False):
            expected, found = (loss_and_grad(m, x, lambda logits, y=y: CE(logits, y)) for m in (model, view))
            with torch.no_grad():
                torch.testing.assert_close(view(x), model(x), rtol=1e-2, atol=1e-2)
        for mine, theirs in zip(found, expected, strict=True):
            assert (mine - theirs).norm() <= 2e-2 * theirs.norm(), turn
    assert len(view.recordings) == 2


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_autoattack_breaks_the_same_images(precision, monkeypatch):
    model = make_model()
    x = torch.rand(64, 3, 160, 160, device="cuda")
    y = model(x).argmax(1)
    stages = (APGD(eps=EPS, steps=40), Square(eps=EPS, queries=100))
    attack = AutoAttack(eps=EPS, version="custom", attacks=stages, precision=precision, batch_size=32)
    found = attack.run(model, x, y)
    monkeypatch.setattr(module, "with_cuda_graphs", lambda model, *_: model)
    expected = attack.run(model, x, y)
    assert abs(int(found.robust.sum()) - int(expected.robust.sum())) <= 1


def test_a_model_that_waits_for_the_device_is_asked_as_before():
    class Waits(torch.nn.Module):
        def forward(self, x):
            return x.flatten(1)[:, :10] * float(x.mean())

    model = Waits().cuda().eval()
    view = GraphedModel(model, max_images=8)
    for _ in range(2 * PAYS):
        x = torch.rand(8, 3, 8, 8, device="cuda")
        torch.testing.assert_close(view(x), model(x))
    assert not view.recordings
