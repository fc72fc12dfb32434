"""The models that are ours: names that begin with `vitruvius/`, so that none hides one of timm's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from vitruvius._errors import ConfigError
from vitruvius._registry import Registry

PREFIX = "vitruvius/"


class Models(Registry[Callable[..., nn.Module]]):
    """A registry whose pieces are functions of timm-style keyword arguments."""

    def add(self, name: str, make: Callable[..., nn.Module], doc: str) -> None:
        if not name.startswith(PREFIX):
            raise ConfigError(f"{name!r}: models of this package are named {PREFIX}…")

        def build(**timm_kwargs: Any) -> nn.Module:
            return make(**timm_kwargs)

        build.__qualname__, build.__doc__ = name, doc
        self.register(name)(build)


models = Models("model", homes=["vitruvius.models"])
