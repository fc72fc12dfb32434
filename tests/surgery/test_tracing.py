"""What timm does with its models works on rewired ones: FX tracing, and feature extractors made by `features_only`."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from operating import ONE_EACH, rewired
from timm.layers import create_feature_extractor, get_graph_node_names

from families import LEVIT, Family
from vitruvius._errors import SurgeryError
from vitruvius.surgery import rewire, survey
from vitruvius.surgery.base import Socket

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning", "ignore:.*:DeprecationWarning")  # torchvision's own
FEATURES = {k: v for k, v in LEVIT.items() if k != "num_classes"} | {"out_indices": (0, 1), "features_only": True}


@pytest.mark.parametrize("family", ONE_EACH, ids=str)
@torch.no_grad()
def test_a_rewired_model_can_be_traced_by_fx_with_its_cores_as_nodes(family: Family) -> None:
    model, x = family.randomised()
    expected = rewired(model, family)(x)
    nodes, _ = get_graph_node_names(model)
    traced = create_feature_extractor(model, [nodes[-1]])
    assert any(name.endswith(".core") for name in nodes)
    torch.testing.assert_close(traced(x)[nodes[-1]], expected, atol=1e-5, rtol=0)


def test_a_traced_model_gives_gradients_to_its_cores() -> None:
    model, x = next(family for family in ONE_EACH if family.name == "vit").randomised()
    rewire(model, "low_rank")
    nodes, _ = get_graph_node_names(model)
    create_feature_extractor(model, [nodes[-1]])(x)[nodes[-1]].square().sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if ".core." in name)


@pytest.mark.parametrize("name", ["levit_128s", "levit_conv_128s"])
@torch.no_grad()
def test_feature_extractors_of_levit_are_rewired(name: str) -> None:
    torch.manual_seed(0)
    model: Any = timm.create_model(name, img_size=32, **FEATURES).eval()
    x = torch.rand(2, 3, 32, 32)
    expected = model(x)
    if name == "levit_conv_128s":  # taken apart by timm: nothing says any more for which images it was built
        with pytest.raises(SurgeryError, match="Say for which images the model was built: input_size="):
            rewire(model, "softmax")
    rewire(model, "softmax", input_size=(3, 32, 32))
    assert any(isinstance(module, Socket) for module in model.modules())
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)


def test_a_feature_extractor_knows_its_image_size_where_its_model_does() -> None:
    small = {"depth": 2, "embed_dim": 32, "num_heads": 2, "out_indices": (0, 1)}
    for name, sizes in (("levit_128s", FEATURES), ("vit_tiny_patch16_224", {**small, "features_only": True})):
        model = timm.create_model(name, img_size=64, **sizes)
        grids = {site.grid for site in survey(model).values()}
        assert (4, 4) in grids or (8, 8) in grids
