"""DeiTs without queries of their own: the sizes that KPCA_code releases, and symmetric attention by itself."""

from __future__ import annotations

import pytest
import torch

from vitruvius import create_model, initialise
from vitruvius._errors import UnsuitableSite
from vitruvius.surgery.base import inner

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3, "img_size": 32}


@pytest.mark.parametrize(("size", "millions"), [("tiny", 5.27), ("small", 20.28), ("base", 79.48)])
def test_it_has_the_parameters_of_the_released_model(size: str, millions: float) -> None:
    with torch.device("meta"):
        model = create_model(f"vitruvius/symvit_{size}_patch16_224")
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions


def test_its_plain_attention_is_symmetric_attention() -> None:
    plain = create_model("vitruvius/symvit_tiny_patch16_224", **SMALL)
    symmetric = create_model("vitruvius/symvit_tiny_patch16_224", attention=["symmetric"], **SMALL)
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(plain(x), symmetric(x))


def test_it_computes_what_a_deit_with_the_same_keys_and_values_computes() -> None:
    model = create_model("vitruvius/symvit_tiny_patch16_224", attention=["rpc"], **SMALL)
    other = create_model("deit_tiny_patch16_224", attention=["rpc"], **SMALL)
    state = dict(inner(model).state_dict())
    for key in [key for key in state if ".qkv." in key]:
        keys, values = state[key].chunk(2)
        state[key] = torch.cat([keys, keys, values])
    inner(other).load_state_dict(state)
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(model(x), other(x))


def test_a_start_that_sets_queries_is_refused() -> None:
    model = create_model("vitruvius/symvit_tiny_patch16_224", **SMALL)
    with pytest.raises(UnsuitableSite, match="queries of its own"):
        initialise(model, "mimetic", generator=torch.Generator().manual_seed(0))
