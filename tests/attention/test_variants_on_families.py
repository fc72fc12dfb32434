"""Every variant on every family of tiny timm models: it runs and trains, or refuses with the reason."""

import re

import pytest
import torch

from families import FAMILIES
from vitruvius._errors import UnsuitableSite
from vitruvius.attention import part
from vitruvius.surgery import restore, rewire, survey

CHOSEN = ("vit", "eva", "beit", "swin", "swin_v2", "xcit", "cait", "levit")
FEW = [family for family in FAMILIES if family.name in CHOSEN]
VARIANTS = {
    "softmax": part("softmax"),
    "symmetric": part("symmetric"),
    "rpc": part("rpc", iterations=2),
    "rpc_asymmetric": part("rpc", iterations=2, asymmetric=True),
    "scaled": part("scaled"),
    "scaled_alpha": part("scaled", form="alpha"),
    "standardised": part("standardised"),
    "low_rank": part("low_rank"),
    "low_rank_q": part("low_rank", tensors="q"),
    "truncated": part("truncated", mode="mix_head"),
    "mask": part("mask", keep="all"),
    "differential": part("differential"),
    "sigmoid": part("sigmoid"),
    "softpick": part("softpick"),
    "twicing": part("twicing"),
    "pro": part("pro"),
    "l2": part("l2"),
    "l2_free": part("l2", tied=False),
    "linear": part("linear"),
    "sink": part("sink"),
    "top_k": part("top_k"),
    "entmax": part("entmax"),
    "gated": part("gated"),
    "elliptical": part("elliptical"),
    "value_residual": part("value_residual"),
    "tome": part("tome", r=2),
}
CHAINED = {"eva", "beit", "swin", "swin_v2", "xcit", "cait", "cait_class", "levit", "levit_downsample", "class"}
REFUSED = {  # kinds of site, or families, where a variant makes no sense
    "symmetric": {"class", "downsampled", "xcit", "cait", "swin_v2"},
    "rpc": {"class", "downsampled", "xcit", "cait", "swin_v2", "levit"},
    "rpc_asymmetric": {"class", "downsampled", "levit"},
    "standardised": {"channels", "swin_v2"},
    "low_rank": {"cait"},
    "twicing": {"class", "downsampled"},
    "l2": {"class", "downsampled", "xcit", "cait", "swin_v2"},
    "l2_free": {"cait"},
    "gated": {"xcit", "cait", "levit", "levit_downsample"},
    "elliptical": CHAINED,
    "value_residual": CHAINED,
    "tome": CHAINED,
    "linear": {"beit", "swin", "swin_v2", "levit", "levit_downsample"},
}


@pytest.mark.parametrize("family", FEW, ids=str)
def test_each_variant_trains_where_it_makes_sense_and_is_refused_elsewhere(family):
    model, x = family.randomised()
    sites = survey(model)
    with torch.no_grad():
        plain = model(x)
    for variant, piece in VARIANTS.items():
        senseless = REFUSED.get(variant, set())
        refused = {(s.attends, s.family): n for n, s in sites.items() if {s.attends, s.family} & senseless}
        for name in refused.values():
            with pytest.raises(UnsuitableSite, match=re.escape(name)):
                rewire(model, piece, where=name)
        accepted = [n for n, s in sites.items() if not {s.attends, s.family} & senseless]
        if accepted:
            out = train_once(rewire(model, piece, where=accepted), x)
            if variant in ("softmax", "scaled", "scaled_alpha", "mask"):  # neutral until trained
                torch.testing.assert_close(out, plain, rtol=1e-4, atol=1e-4)
            restore(model)
    with torch.no_grad():
        assert torch.equal(model(x), plain)


def train_once(model, x):
    out = model(x)
    assert out.isfinite().all()
    model.zero_grad()
    out.square().sum().backward()
    for name, parameter in model.named_parameters():
        if ".core." in name:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    return out
