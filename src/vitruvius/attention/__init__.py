"""Variants of attention: one file each, pure tensor algebra."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.attention.base import Kernel as Kernel
    from vitruvius.attention.base import Stage as Stage
    from vitruvius.attention.base import attentions as attentions
    from vitruvius.attention.base import part as part
    from vitruvius.attention.differential import Differential as Differential
    from vitruvius.attention.elliptical import Elliptical as Elliptical
    from vitruvius.attention.entmax import Entmax as Entmax
    from vitruvius.attention.gated import Gated as Gated
    from vitruvius.attention.interpolation import interpolate as interpolate
    from vitruvius.attention.l2 import L2 as L2
    from vitruvius.attention.linear import Linear as Linear
    from vitruvius.attention.low_rank import LowRank as LowRank
    from vitruvius.attention.low_rank import fit_low_rank as fit_low_rank
    from vitruvius.attention.mask import Mask as Mask
    from vitruvius.attention.pro import Pro as Pro
    from vitruvius.attention.rpc import RPC as RPC
    from vitruvius.attention.scaled import Scaled as Scaled
    from vitruvius.attention.sigmoid import Sigmoid as Sigmoid
    from vitruvius.attention.sink import Sink as Sink
    from vitruvius.attention.softmax import Softmax as Softmax
    from vitruvius.attention.softpick import Softpick as Softpick
    from vitruvius.attention.sparse_softmax import SparseSoftmax as SparseSoftmax
    from vitruvius.attention.standardised import Standardised as Standardised
    from vitruvius.attention.symmetric import Symmetric as Symmetric
    from vitruvius.attention.tome import ToMe as ToMe
    from vitruvius.attention.top_k import TopK as TopK
    from vitruvius.attention.truncated import Truncated as Truncated
    from vitruvius.attention.twicing import Twicing as Twicing
    from vitruvius.attention.value_residual import ValueResidual as ValueResidual
else:
    __getattr__, __dir__, __all__ = exports(
        __name__,
        {
            "Differential": "differential",
            "Elliptical": "elliptical",
            "Entmax": "entmax",
            "Gated": "gated",
            "Kernel": "base",
            "L2": "l2",
            "Linear": "linear",
            "LowRank": "low_rank",
            "Mask": "mask",
            "Pro": "pro",
            "RPC": "rpc",
            "Scaled": "scaled",
            "Sigmoid": "sigmoid",
            "Sink": "sink",
            "Softmax": "softmax",
            "Softpick": "softpick",
            "SparseSoftmax": "sparse_softmax",
            "Stage": "base",
            "Standardised": "standardised",
            "Symmetric": "symmetric",
            "ToMe": "tome",
            "TopK": "top_k",
            "Truncated": "truncated",
            "Twicing": "twicing",
            "ValueResidual": "value_residual",
            "attentions": "base",
            "fit_low_rank": "low_rank",
            "interpolate": "interpolation",
            "part": "base",
        },
    )
