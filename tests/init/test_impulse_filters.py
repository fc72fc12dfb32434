import pytest
import timm
import torch
from beginnings import seeded, small_vit
from torch import nn

from vitruvius._errors import UnsuitableSite
from vitruvius.init.filters import mixes_space
from vitruvius.models import create_model
from vitruvius.surgery.initialising import initialise


def test_every_depth_wise_convolution_of_an_xcit_has_one_tap_and_nothing_else_changes():
    model = timm.create_model("xcit_nano_12_p16_224", depth=1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    initialise(model, "impulse_filters", generator=seeded())
    after = model.state_dict()
    changed = {key for key in before if not torch.equal(after[key], before[key])}
    names = {name for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and mixes_space(m)}
    assert names == {"blocks.0.local_mp.conv1", "blocks.0.local_mp.conv2"}
    assert {key.rsplit(".", 1)[0] for key in changed} == names
    for name in names:
        taps = after[f"{name}.weight"].flatten(1)
        assert ((taps != 0).sum(1) == 1).all()
        torch.testing.assert_close(taps.square().sum(1), torch.full((128,), 1 / 3))
        assert len(taps.argmax(1).unique()) == 9  # every tap is somebody's
        assert not after[f"{name}.bias"].any()


def test_the_same_seed_gives_the_same_taps_and_models_can_be_created_with_them():
    a, b, c = (create_model("xcit_nano_12_p16_224", depth=1, init="impulse_filters", seed=s) for s in (3, 3, 4))
    key = "model.blocks.0.local_mp.conv1.weight"
    assert torch.equal(a.get_parameter(key), b.get_parameter(key))
    assert not torch.equal(a.get_parameter(key), c.get_parameter(key))


def test_models_without_such_convolutions_are_referred_to_attention_and_channels_to_filters():
    with pytest.raises(
        UnsuitableSite, match=r"VisionTransformer has none. For attention over tokens use init: impulse"
    ):
        initialise(small_vit(), "impulse_filters", generator=seeded())
    with pytest.raises(UnsuitableSite, match=r"attends over channels .* init: impulse_filters starts those"):
        initialise(timm.create_model("xcit_nano_12_p16_224", depth=1), "impulse", generator=seeded())
