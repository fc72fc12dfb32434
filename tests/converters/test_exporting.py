import copy

import pytest
import torch

from families import FAMILIES
from vitruvius._errors import SurgeryError
from vitruvius.attention import part
from vitruvius.converters import to_timm
from vitruvius.surgery import rewire

BY_NAME = {family.name: family for family in FAMILIES}


def randomise_parts(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".core." in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return model


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("vit", []),
        ("vit", ["softmax"]),
        ("vit", ["symmetric"]),
        ("vit", [part("low_rank"), part("mask", keep="all")]),
        ("vit", [part("low_rank", tensors="k"), "symmetric"]),
        ("beit", ["symmetric"]),
        ("swin", ["symmetric"]),
    ],
)
def test_plain_timm_computes_the_same_and_the_model_stays_as_it_is(name, parts):
    model, x = BY_NAME[name].randomised()
    for key, buffer in model.named_buffers():
        if key.endswith("k_bias"):
            buffer.zero_()  # a constant of BEiT
    plain = copy.deepcopy(model)
    if parts:
        randomise_parts(rewire(model, *parts))
    expected, keys = model(x), model.state_dict().keys()
    state = to_timm(model)
    assert model.state_dict().keys() == keys
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    plain.load_state_dict(state)
    torch.testing.assert_close(plain(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        *(("vit", kind, f"timm's attention cannot do {kind}") for kind in ("rpc", "scaled", "standardised")),
        ("vit", part("mask", keep=torch.ones(2, 17, 17).tril() > 0), "cannot do mask"),
        ("vit_qk_norm", "symmetric", "weights of their own"),
    ],
)
def test_what_timm_cannot_do_is_named(name, kind, said):
    model, _ = BY_NAME[name].randomised()
    with pytest.raises(SurgeryError, match=said):
        to_timm(rewire(model, kind))
