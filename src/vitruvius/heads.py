"""The shared nouns of attention: what one softmax sees, the weights that make it, and where it sits.

Letters: B batch, H heads, N queries, M keys, D key width, E value width, C model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from vitruvius._errors import UnsuitableSite
from vitruvius._notebook import Records, as_html, draw_tiles, plot, to_csv, to_frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vitruvius._files import StrPath

Attends = Literal["tokens", "windows", "channels", "class", "downsampled"]


class Heads(NamedTuple):
    """Everything one softmax sees: the argument list of `F.scaled_dot_product_attention`."""

    q: Tensor  # (B, H, N, D)
    k: Tensor  # (B, H, M, D)
    v: Tensor  # (B, H, M, E)
    bias: Tensor | None = None  # additive, broadcasts to (B, H, N, M)
    scale: float = 1.0
    dropout: float = 0.0

    def weights(self) -> Tensor:
        """softmax(q kᵀ · scale + bias), (B, H, N, M); a pair that the bias hides by −∞ gets 0."""
        logits = (self.q * self.scale) @ self.k.mT
        return (logits if self.bias is None else logits + self.bias).softmax(-1)

    def add_bias(self, bias: Tensor) -> Self:
        """The same with `bias` added to the scores; it broadcasts to (B, H, N, M)."""
        return self._replace(bias=bias if self.bias is None else self.bias + bias)

    @property
    def device(self) -> torch.device:
        """Where they lie; captum asks for it at the layers it looks at."""
        return self.q.device

    def __repr__(self) -> str:
        return f"<Heads: {self._title()}>"

    def _repr_html_(self) -> str:
        return as_html(self._title(), {"": self._records()})

    def plot(self, axes: Axes | None = None, *, image: int = 0) -> Axes:
        """Draw the weights of every head of one `image` (default: the first) on `axes`, and return those."""
        return plot(self._draw, axes, image=image)

    def to_frame(self) -> Any:
        """A line per head, as a pandas DataFrame."""
        return to_frame(self._records())

    def to_csv(self, path: StrPath | None = None) -> str:
        """A line per head as CSV text, written to the file `path` if there is one."""
        return to_csv(self._records(), path)

    def _title(self) -> str:
        batch, heads, queries, width = self.q.shape
        bias = "" if self.bias is None else ", with a bias"
        return f"{batch} × {heads} heads, {queries} queries × {self.k.shape[-2]} keys, width {width}{bias}"

    def _records(self) -> Records:
        """Lengths of the vectors of every head, and how many keys its softmax looks at."""
        weights = self.weights().detach().double()  # (B, H, N, M)
        numbers = {f"length of {n}": getattr(self, n).detach().norm(dim=-1).mean((0, 2)) for n in ("q", "k", "v")}
        numbers["keys looked at"] = torch.special.entr(weights).sum(-1).exp().mean((0, 2))
        numbers["largest weight"] = weights.amax(-1).mean((0, 2))
        return [{"head": h, **{n: float(x[h]) for n, x in numbers.items()}} for h in range(self.q.shape[1])]

    def _draw(self, axes: Axes, *, image: int) -> None:
        maps = self.weights()[image].detach().float().cpu().numpy()
        draw_tiles(axes, list(maps), [f"head {head}" for head in range(len(maps))])
        axes.set_title("softmax(q kᵀ), queries down, keys across")


class Context(NamedTuple):
    """What a part knows besides Heads, if its `forward` takes a `context`."""

    x: Tensor | None = None  # (B, N, C): the tokens that ask, as they enter the attention module
    prev_state: Tensor | None = None  # what the same part of the layer before passed on; None in the first layer


class RecordedHeads(Heads):
    """Heads as `record` saw them, with what came beside them for parts that need it."""

    x: Tensor | None = None
    states: Mapping[str, Tensor] | None = None  # by the name of the part


class HeadWeights(NamedTuple):
    """Views into a family's projections, head by head. Writing into them writes into the model."""

    q: Tensor  # (H, D, C)
    k: Tensor  # (H, D, C)
    v: Tensor  # (H, E, C)
    out: Tensor  # (C, H, E)
    q_bias: Tensor | None = None  # (H, D)
    k_bias: Tensor | None = None  # (H, D)
    v_bias: Tensor | None = None  # (H, E)


@dataclass(frozen=True, kw_only=True)
class Site:
    """One place in one model where attention happens: its name, its kind and its sizes."""

    name: str  # as in `model.get_submodule`, e.g. blocks.0.attn
    family: str  # the socket's name, e.g. vit
    attends: Attends
    num_heads: int  # H
    num_queries: int  # N
    num_keys: int  # M
    key_dim: int  # D
    value_dim: int  # E
    dim: int  # C
    num_prefix_tokens: int = 0  # class, distillation and register tokens come first
    num_answering: int = 1  # of the prefix tokens, those that the head sees; 0: it sees the patches
    grid: tuple[int, int] | None = None  # rows and columns of patches behind the prefix tokens
    biased: bool = False  # whether a bias is added to the scores: relative positions, masks of windows
    knows_input: bool = False  # whether the core is told the tokens that ask (`Context.x`)
    chained: bool = False  # whether its block passes states on (`Context.prev_state`) and may reduce tokens

    def is_over_patches(self) -> bool:
        """Whether the same tokens ask and answer, and their patches lie on a grid."""
        return self.attends == "tokens" and self.num_queries == self.num_keys and self.grid is not None

    def is_self_attention(self) -> bool:
        """Whether the same items ask and answer."""
        return self.attends not in ("class", "downsampled") and self.num_queries == self.num_keys

    def answering(self) -> slice:
        """The tokens that the head sees: class and distillation token, or the patches where it averages them."""
        if self.num_prefix_tokens and self.num_answering:
            return slice(self.num_answering)
        return slice(self.num_prefix_tokens, None)

    def require(self, part: str, *kinds: Attends, remedy: str = "") -> None:
        """Refuse this site to `part` unless it attends over one of the `kinds`; `remedy` goes into the error."""
        if self.attends not in kinds:
            raise self.unsuitable(part, f"needs attention over {' or '.join(kinds)}", remedy)

    def require_self_attention(self, part: str) -> None:
        """Refuse this site unless queries and keys are the same items; `part` is the name of what refuses."""
        if not self.is_self_attention():
            raise self.unsuitable(part, "needs self-attention")

    def unsuitable(self, part: str, why: str, remedy: str = "") -> UnsuitableSite:
        """The error of a `part` that this site does not suit; `remedy` is a sentence that says what else to do."""
        return UnsuitableSite(
            f"{part!r} {why}; {self.name!r} ({self.family}) attends over {self.attends} from {self.num_queries} to "
            f"{self.num_keys}, with keys {self.key_dim} and values {self.value_dim} wide. {remedy}"
            "Choose other sites with where=…"
        )
