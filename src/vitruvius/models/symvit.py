"""DeiTs whose layers project to keys and values only, as rachtsy/KPCA_code releases its symmetric and RPC models.

Teo & Nguyen 2024, arXiv:2406.13762. C model width. A key asks in place of the query, so the C rows of the queries are
not there: 5.27 M parameters instead of 5.72 M for the tiny one. Plug in `symmetric` or `rpc` for what the paper trains.
"""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor, nn

from vitruvius.models.base import models


class KeysAndValues(nn.Linear):
    """(…, C) → (…, 3C): queries, keys and values, from a projection that makes 2C; the queries are the keys."""

    def forward(self, input: Tensor) -> Tensor:
        keys_and_values = super().forward(input)
        keys, _ = keys_and_values.chunk(2, dim=-1)
        return torch.cat([keys, keys_and_values], dim=-1)


def _symvit(name: str) -> Any:
    def make(**kwargs: Any) -> nn.Module:
        model: Any = timm.create_model(name, **kwargs)
        for block in model.blocks:
            old = block.attn.qkv
            block.attn.qkv = KeysAndValues(old.in_features, 2 * old.in_features, bias=old.bias is not None)
            with torch.no_grad():  # timm's own start, of keys and values
                block.attn.qkv.weight.copy_(old.weight[old.in_features :])
                if old.bias is not None:
                    block.attn.qkv.bias.copy_(old.bias[old.in_features :])
        return model

    return make


for _size, _parameters in (("tiny", "5.27"), ("small", "20.28"), ("base", "79.48")):
    models.add(
        f"vitruvius/symvit_{_size}_patch16_224",
        _symvit(f"deit_{_size}_patch16_224"),
        f"DeiT-{_size.capitalize()} that projects to keys and values only, {_parameters} M parameters: KPCA_code's",
    )
