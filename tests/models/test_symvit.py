"""DeiTs without queries of their own: the sizes that KPCA_code releases, and symmetric attention by itself."""

from __future__ import annotations

import pytest
import torch

from vitruvius import create_model, initialise
from vitruvius._errors import UnsuitableSite
from vitruvius.surgery.base import inner

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3, "img_size": 32}


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
