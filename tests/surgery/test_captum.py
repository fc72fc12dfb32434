"""captum's layer methods on what surgery plugs in: they take sites and outputs of cores, and not Heads."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from vitruvius._errors import SurgeryError
from vitruvius.surgery import rewire

captum = pytest.importorskip("captum.attr", reason="needs captum (extra explain)")
METHODS: dict[str, dict[str, Any]] = {
    "LayerGradCam": {},
    "LayerGradientXActivation": {},
    "LayerIntegratedGradients": {"n_steps": 4},
    "LayerConductance": {"n_steps": 4},
    "InternalInfluence": {"n_steps": 4},
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layer_methods_take_sites_and_outputs_of_cores(name: str, tiny_vit: tuple[nn.Module, Tensor]) -> None:
    model, x = tiny_vit
    attention: Any = rewire(model, "rpc:iterations=2").get_submodule("blocks.1.attn")
    for layer in (attention, attention.core, attention.core.rpc):
        found = getattr(captum, name)(model, layer).attribute(x, target=1, **METHODS[name])
        assert len(found) == len(x)
        assert found.abs().sum() > 0


@pytest.mark.parametrize("name", [*METHODS, "LayerActivation", "LayerFeatureAblation", "LayerDeepLift"])
def test_layer_methods_on_heads_are_refused_in_a_sentence(name: str, tiny_vit: tuple[nn.Module, Tensor]) -> None:
    model, x = tiny_vit
    core: Any = rewire(model, "symmetric", "rpc").get_submodule("blocks.1.attn.core")
    settings = METHODS.get(name, {}) | ({} if name == "LayerActivation" else {"target": 1})
    for layer, at_input in ((core, True), (core.rpc, True), (core.symmetric, True), (core.symmetric, False)):
        with pytest.raises(SurgeryError, match=r"what (enters|leaves) .*: Heads are several tensors"):
            getattr(captum, name)(model, layer).attribute(x, attribute_to_layer_input=at_input, **settings)
        assert not layer._forward_hooks
        assert not layer._forward_pre_hooks
