import copy

import pytest
import torch

from families import FAMILIES
from vitruvius._errors import ConfigError, DataError, SurgeryError
from vitruvius.attention import part
from vitruvius.attention.low_rank import fit_low_rank
from vitruvius.surgery import record, rewire
from vitruvius.surgery.calibrating import calibrate_low_rank
from vitruvius.surgery.folding import fold

BY_NAME = {family.name: family for family in FAMILIES}


def squeezed(name, **settings):
    model, x = BY_NAME[name].randomised()
    dense = copy.deepcopy(model)
    return dense, rewire(model, part("low_rank", **settings)), x


@torch.no_grad()
def maps(model, x):
    with record(model) as seen:
        model(x)
    found = {}
    for name, heads in seen.items():
        core = getattr(model.get_submodule(name), "core", None)
        for stage in list(core.children())[:-1] if core is not None else ():
            heads = stage(heads)
        scores = heads.q @ heads.k.mT * heads.scale
        found[name] = torch.softmax(scores if heads.bias is None else scores + heads.bias, -1)
    return found


@pytest.mark.parametrize("name", ["vit", "swin", "xcit", "levit", "rope", "vit_qk_norm"])
def test_maps_come_closer_to_the_dense_ones_in_every_family(name):
    dense, model, x = squeezed(name)
    losses = calibrate_low_rank(model, [x], steps=10)
    assert len(losses) > 0
    assert sum(after < before for before, after in losses.values()) > len(losses) / 2
    assert all(after <= before for before, after in losses.values())
    first = next(iter(losses))  # the first site has the dense model's input, so its maps can be compared from outside
    wanted, found = maps(dense, x)[first], maps(model, x)[first]
    loss = (torch.xlogy(wanted, wanted) - wanted * found.log()).sum(-1).mean()
    assert loss.item() == pytest.approx(losses[first][1], rel=1e-3)


def test_the_images_pass_through_the_model_twice_however_many_sites_there_are():
    _, model, x = squeezed("vit")
    passes, counts = [], []
    model.patch_embed.register_forward_hook(lambda *_: passes.append(1))  # copies of the model have it too
    losses = calibrate_low_rank(model, [x], steps=1, progress=lambda *count: counts.append(count))
    assert len(losses) > 1
    assert len(passes) == 2
    assert counts == [(number, len(losses), name) for number, name in enumerate(losses, 1)]


def test_only_queries_keys_and_the_auto_encoder_move_and_folding_stays_exact():
    _, model, x = squeezed("vit")
    before = copy.deepcopy(model.state_dict())
    model.train().requires_grad_(False)
    calibrate_low_rank(model, [x], steps=3)
    after = model.state_dict()
    moved = {key for key in before if not torch.equal(after[key], before[key])}
    assert moved
    assert all(".attn.qkv." in key or ".core.low_rank." in key for key in moved)
    for key in moved:
        if ".qkv." in key:  # the values' third
            third = len(after[key]) // 3
            assert torch.equal(after[key][2 * third :], before[key][2 * third :])
    assert all(module.training for module in model.modules())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    expected = model.eval()(x)
    torch.testing.assert_close(fold(model)(x), expected, rtol=1e-4, atol=1e-4)


def test_a_rate_that_is_too_high_is_named_and_undone(caplog):
    _, model, x = squeezed("vit")
    before = copy.deepcopy(fit_low_rank(model, [x]).state_dict())
    losses = calibrate_low_rank(model, [x], steps=2, rate=1e4)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(first == last for first, last in losses.values())
    assert "left as it was; lower rate" in caplog.text


def test_what_cannot_be_calibrated_is_refused():
    dense, model, x = squeezed("vit")
    with pytest.raises(SurgeryError, match=r"no 'low_rank' part"):
        calibrate_low_rank(dense, [x])
    with pytest.raises(DataError, match=r"no images"):
        calibrate_low_rank(model, [])
    with pytest.raises(ConfigError, match=r"steps=0"):
        calibrate_low_rank(model, [x], steps=0)
