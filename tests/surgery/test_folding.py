import copy

import pytest
import timm
import torch

from families import FAMILIES
from vitruvius._errors import SurgeryError
from vitruvius.attention import part
from vitruvius.attention.low_rank import fit_low_rank
from vitruvius.surgery import restore, rewire
from vitruvius.surgery.folding import fold, start_low_rank

BY_NAME = {family.name: family for family in FAMILIES}


def trained(name, tensors="qk", where="*", **settings):
    """A family's model with auto-encoders whose every number counts."""
    model, x = BY_NAME[name].randomised()
    rewire(model, part("low_rank", tensors=tensors, **settings), where=where)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".core." in key:
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    return model, x


@pytest.mark.parametrize(
    ("name", "tensors", "where"),
    [
        ("vit", "qk", "*"),
        ("vit", "k", "blocks.1.*"),
        ("vit_registers", "qk", "*"),
        ("deit_distilled", "q", "*"),
        ("swin", "qk", "*"),
        ("beit", "q", "*"),  # beit's keys have no bias
        ("crossvit", "qk", "*"),
    ],
)
def test_folding_changes_no_output_and_the_weights_then_load_in_plain_timm(name, tensors, where):
    model, x = trained(name, tensors, where)
    plain = restore(copy.deepcopy(model))
    expected = model(x)
    fold(model.train())
    assert all(module.training for module in model.modules())
    torch.testing.assert_close(model.eval()(x), expected, rtol=1e-4, atol=1e-4)
    assert not any("low_rank" in key for key in model.state_dict())
    plain.load_state_dict(restore(model).state_dict())
    torch.testing.assert_close(plain(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["vit_qk_norm", "rope", "swin_v2", "xcit", "levit"])
def test_folding_is_refused_untouched_where_the_stage_does_not_meet_the_plain_projection(name):
    model, _ = trained(name)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(SurgeryError, match=r"cannot be folded"):
        fold(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_projection_without_bias_is_given_one_only_if_asked():
    model = timm.create_model("test_vit", img_size=32, qkv_bias=False, num_classes=3).eval()
    x = torch.randn(2, 3, 32, 32)
    rewire(model, part("low_rank", start="released"))
    fold(copy.deepcopy(model))  # its biases are zero, so none is needed
    with torch.no_grad():
        model.get_parameter("blocks.0.attn.core.low_rank.q.1.bias").fill_(1.0)
    expected, before = model(x), model.state_dict().keys()
    with pytest.raises(SurgeryError, match=r"needs a bias for q.*add_bias=True"):
        fold(model)
    assert model.state_dict().keys() == before
    torch.testing.assert_close(fold(model, add_bias=True)(x), expected)
    plain = timm.create_model("test_vit", img_size=32, qkv_bias=True, num_classes=3).eval()
    plain.load_state_dict(restore(model).state_dict())
    torch.testing.assert_close(plain(x), expected)


def test_only_a_first_stage_can_be_folded_and_there_must_be_one():
    model, _ = BY_NAME["vit"].randomised()
    with pytest.raises(SurgeryError, match="no 'low_rank' part"):
        fold(model)
    rewire(model, "standardised", part("low_rank"))
    with pytest.raises(SurgeryError, match=r"standardised → low_rank → softmax: 'low_rank' comes after another stage"):
        fold(model)


def test_parts_after_the_folded_stage_stay():
    model, x = BY_NAME["vit"].randomised()
    rewire(model, part("low_rank", tensors="k", start="released"), "symmetric", part("rpc", iterations=2))
    expected = model(x)
    fold(model)
    assert model.blocks[0].attn.core.describe() == "symmetric → rpc"
    torch.testing.assert_close(model(x), expected)


def test_starts_that_keep_the_function_lose_less_than_the_published_one():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", img_size=32, num_heads=4, num_classes=5).eval()
    x = torch.randn(8, 3, 32, 32)
    plain = model(x)
    losses = {}
    for start in ("released", "weights", "activations"):
        rewire(model, part("low_rank", rank=3, start="released" if start == "released" else "svd"))
        if start == "weights":
            start_low_rank(model)
        if start == "activations":
            fit_low_rank(model, [x])
        losses[start] = float((model(x) - plain).detach().norm() / plain.detach().norm())
        restore(model)
    assert losses["activations"] < losses["released"]
    assert losses["weights"] < losses["released"]
