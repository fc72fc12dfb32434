"""Variants of attention: pure tensor algebra, by their names in `attentions`; what is typed most is exported."""

from typing import TYPE_CHECKING

from vitruvius._lazy import exports

if TYPE_CHECKING:
    from vitruvius.attention.base import Kernel as Kernel
    from vitruvius.attention.base import Stage as Stage
    from vitruvius.attention.base import attentions as attentions
    from vitruvius.attention.base import part as part
    from vitruvius.attention.chosen_keys import TopK as TopK
    from vitruvius.attention.interpolation import interpolate as interpolate
    from vitruvius.attention.low_rank import LowRank as LowRank
    from vitruvius.attention.low_rank import fit_low_rank as fit_low_rank
    from vitruvius.attention.mask import Mask as Mask
    from vitruvius.attention.rpc import RPC as RPC
    from vitruvius.attention.scaled import Scaled as Scaled
    from vitruvius.attention.softmax import Softmax as Softmax
    from vitruvius.attention.sparse_softmax import SparseSoftmax as SparseSoftmax
    from vitruvius.attention.symmetric import Standardised as Standardised
    from vitruvius.attention.symmetric import Symmetric as Symmetric
    from vitruvius.attention.truncated import Truncated as Truncated
    from vitruvius.attention.twicing import Twicing as Twicing
    from vitruvius.attention.unnormalised import Sigmoid as Sigmoid
else:
    __getattr__, __dir__, __all__ = exports(__name__)
