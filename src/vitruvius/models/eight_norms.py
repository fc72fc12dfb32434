"""The former name of `vitruvius.models.resnet_gelu_adv`; it goes with the next release."""

from __future__ import annotations

import warnings
from typing import Any

from vitruvius.models import resnet_gelu_adv


def __getattr__(name: str) -> Any:
    found = getattr(resnet_gelu_adv, name)
    warnings.warn(
        "vitruvius.models.eight_norms is now vitruvius.models.resnet_gelu_adv; import it from there.",
        DeprecationWarning,
        stacklevel=2,
    )
    return found
