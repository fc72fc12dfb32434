"""Stages, kernels and the core they make: some stages `Heads → Heads`, then one kernel `Heads → Tensor`."""

from __future__ import annotations

import functools
import inspect
import itertools
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius._errors import SurgeryError, UnsuitableSite
from vitruvius._registry import Registry
from vitruvius.heads import Context, Heads, Site

HIDDEN = -99.0  # a bias below this hides a pair: masks write -inf, Swin's shifted windows -100


class PartMaker(Protocol):
    """Something that makes a stage or a kernel for a site: a class with its settings bound."""

    def __call__(self, site: Site, /) -> nn.Module: ...


PartSpec = str | Mapping[str, Any] | PartMaker  # "rpc:iterations=2", {"use": "rpc", "iterations": 2}, part("rpc")
States = Mapping[str, Tensor]  # what a layer passes to the next, by the name of the part

attentions: Registry[Callable[..., nn.Module]] = Registry("attention", homes=["vitruvius.attention"])


class TakesHeads(nn.Module):
    """A module that Heads enter. captum's layer methods, which attribute to one tensor, are refused there."""

    def register_forward_pre_hook(self, hook: Callable[..., Any], **settings: Any) -> Any:
        _refuse_captum(hook, f"what enters {type(self).__name__}")
        return super().register_forward_pre_hook(hook, **settings)


def _refuse_captum(hook: Callable[..., Any], what: str) -> None:
    if str(hook.__module__).startswith("captum."):
        raise SurgeryError(
            f"captum cannot attribute to {what}: Heads are several tensors. Attribute to the output of a core or to "
            "the attention module around it, e.g. LayerGradCam(model, model.blocks[0].attn)."
        )


class Part(TakesHeads):
    """What stages and kernels say of themselves; all of it may be left out, and an instance may set its own.

    map_text: what the map of a core with this part is, in words for pages that show one.
    writes: the tensors that its parameters change ("q", "k", "v"), or what else it decides ("choice of keys").
    discards: those it throws away; behind a part that writes one of them it is refused.
    needs_tokens: whether it is refused where the tokens that ask are not known.
    surrogate: parts that stand in for it when a model is attacked through something whose gradient hides nothing: a
        smooth or exact form; () leaves it out, None (the default) keeps it.

    Every part is made for a `site`, its first argument, whose sizes it may read and which it may refuse. One whose
    `forward` has an argument `context` is given one.
    """

    map_text: str = ""
    writes: frozenset[str] = frozenset()
    discards: frozenset[str] = frozenset()
    needs_tokens: bool = False
    surrogate: Sequence[str | PartMaker] | None = None
    takes_context: ClassVar[bool]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.takes_context = "context" in inspect.signature(cls.forward).parameters

    def extra_repr(self) -> str:
        kept = [name for name in inspect.signature(type(self)).parameters if name in vars(self)]
        return ", ".join(f"{name}={vars(self)[name]!r}" for name in kept)


class Stage(Part):
    """A module `Heads → Heads`.

    A stage that changes v says by `value_mixing` what it does to it; without that, its core has no map. One that adds
    values from elsewhere sets `adds_values`: the map is then over the values it makes.
    A stage may define `penalty(before, after) -> Tensor`, added to the training loss by the task; `next_state`, to tell
    the same stage of the next layer something; and `reduce`, to change the number of tokens between attention and MLP.
    """

    adds_values: bool = False

    def forward(self, heads: Heads) -> Heads:
        raise NotImplementedError

    def register_forward_hook(self, hook: Callable[..., Any], **settings: Any) -> Any:
        _refuse_captum(hook, f"what leaves {type(self).__name__}")
        return super().register_forward_hook(hook, **settings)

    def value_mixing(self, heads: Heads) -> Tensor | None:
        """The matrix (…, M', M) by which this stage makes its values of those in `heads`; None where it keeps v."""
        return None

    def next_state(self, heads: Heads, context: Context) -> Tensor:
        """What the same stage of the next layer gets as `context.prev_state`; `heads` are those that enter the core."""
        raise NotImplementedError

    def reduce(self, tokens: Tensor, heads: Heads, context: Context) -> tuple[Tensor, Tensor]:
        """Fewer tokens (B, N', C) than the (B, N, C) that attention and its residual left, and the next state."""
        raise NotImplementedError

    @property
    def reduces(self) -> bool:
        return type(self).reduce is not Stage.reduce

    @property
    def passes_state(self) -> bool:
        return self.reduces or type(self).next_state is not Stage.next_state


class Kernel(Part):
    """A module `Heads → Tensor` of shape (B, H, N, E).

    A kernel that ends in one softmax says which by `last_softmax`; another one defines `map`. A kernel that does
    neither has no map, and whoever asks for one is told so.
    """

    def forward(self, heads: Heads) -> Tensor:
        raise NotImplementedError

    def finish(self, out: Tensor) -> Tensor:
        """What this kernel does to its weighted sum of values `out`, (B, H, N, E), such as an output norm."""
        return out

    def last_softmax(self, heads: Heads) -> Heads | None:
        """The Heads whose plain softmax attention is the output for `heads`; None where there is no such softmax."""
        return None

    def map(self, heads: Heads) -> Tensor | None:
        """The weights really used for `heads`, (B, H, N, M): without dropout, map @ v is the output. None: no map."""
        last = self.last_softmax(heads)
        return None if last is None else attention_map(last)


class DenseKernel(Kernel):
    """A kernel given by its weights: a subclass defines `map`, the output is their product with the values."""

    def map(self, heads: Heads) -> Tensor:
        raise NotImplementedError

    def forward(self, heads: Heads) -> Tensor:
        return F.dropout(self.map(heads), heads.dropout) @ heads.v


class Received(NamedTuple):
    """What the stages of a core make of Heads."""

    heads: Heads  # that the kernel receives
    mixing: Tensor | None  # (…, M', M): the kernel's values are mixing @ v; None: they are v
    unmapped: str  # the first stage that changes v and does not say how; empty where none does


class Core(TakesHeads):
    """Stages in reading order, then one kernel. Parts live under their names, so checkpoints survive insertions.

    `parts` are pairs of a name and a module, in reading order; `site` is the one they were made for. `specs` say how a
    recipe writes them, where `build_core` made it.
    """

    def __init__(self, parts: Sequence[tuple[str, nn.Module]], site: Site) -> None:
        super().__init__()
        _check_chain(parts, site)
        for name, module in parts:
            self.add_module(name, module)
        self.specs: list[str | dict[str, Any]] = [name for name, _ in parts]
        self.ignores_queries = any("q" in module.discards for module in self.parts.values())

    @property
    def parts(self) -> dict[str, Part]:
        return cast("dict[str, Part]", self._modules)

    @property
    def stages(self) -> dict[str, Stage]:
        return cast("dict[str, Stage]", dict(list(self._modules.items())[:-1]))

    @property
    def kernel(self) -> Kernel:
        return cast(Kernel, list(self.parts.values())[-1])

    def forward(self, heads: Heads, x: Tensor | None = None, states: States | None = None) -> Tensor:
        """The output (B, H, N, E) for the `heads` that the socket made of its input.

        `x` are the tokens that ask, (B, N, C); `states` what the layer before passed on, by the name of the part.
        """
        made: Any = heads  # Heads until the kernel, which comes last, makes a Tensor of them
        for name, module in self._modules.items():  # children() would look for modules that occur twice, at every call
            made = _call(name, module, made, x, states)
        return made

    def after(self, tokens: Tensor, heads: Heads, x: Tensor, states: States) -> tuple[Tensor, States]:
        """Between attention and MLP: the tokens, perhaps fewer of them, and the states for the next layer.

        `tokens` (B, N, C) are as attention and its residual path left them; the rest is what `forward` was given.
        """
        new: dict[str, Tensor] = {}
        for name, stage in self.stages.items():
            context = Context(x, states.get(name))
            if stage.reduces:
                tokens, new[name] = stage.reduce(tokens, heads, context)
            elif stage.passes_state:
                new[name] = stage.next_state(heads, context)
        return tokens, new

    @property
    def passes_state(self) -> bool:
        """Whether its block must pass something to the next one, or reduce tokens."""
        return any(stage.passes_state for stage in self.stages.values())

    @property
    def takes_context(self) -> bool:
        """Whether a part must know more than Heads."""
        return any(part.takes_context for part in self.parts.values())

    def run_stages(self, heads: Heads) -> Received:
        """What the stages make of `heads` before the kernel sees them."""
        x, states = getattr(heads, "x", None), getattr(heads, "states", None)  # of RecordedHeads
        mixing: Tensor | None = None
        unmapped = ""
        for name, stage in self.stages.items():
            by_stage, after = stage.value_mixing(heads), _call(name, stage, heads, x, states)
            if by_stage is not None:
                mixing = by_stage if mixing is None else by_stage @ mixing
            elif after.v is not heads.v and not stage.adds_values:
                unmapped = unmapped or name
            heads = after
        return Received(heads, mixing, unmapped)

    def map(self, heads: Heads) -> Tensor | None:
        """The weights this core really gives to the values in `heads`, (B, H, N, M): map @ heads.v is its output.

        None where a part cannot say what it does. Dropout is left out, and so is what a kernel does after its weighted
        sum (an output norm, a gate).
        """
        received, mixing, unmapped = self.run_stages(heads)
        weights = self.kernel.map(received)
        if weights is None or unmapped:
            return None
        return weights if mixing is None else weights @ mixing.to(weights.dtype)

    def map_of(self, heads: Heads, place: str) -> Tensor:
        """The same, or an error that names `place` and the part that cannot say what it does."""
        weights = self.map(heads)
        if weights is None:
            unclear = self.run_stages(heads).unmapped or list(self.parts)[-1]
            raise UnsuitableSite(
                f"the core {self.describe()} at {place!r} has no attention map: {unclear!r} does not say which weights "
                "it gives to the values. Choose other sites with where=…"
            )
        return weights

    def describe(self) -> str:
        return " → ".join(self.parts)


def _call(name: str, module: Any, heads: Heads, x: Tensor | None, states: States | None) -> Any:
    if not module.takes_context:
        return module(heads)
    return module(heads, Context(x, states.get(name) if states else None))


attention_map = Heads.weights  # for looking at, never on the way to an output


def scores(heads: Heads) -> Tensor:
    """q kᵀ · scale + bias, (B, H, N, M), in float32 at least."""
    logits = at_least_float32((heads.q * heads.scale) @ heads.k.mT)
    return logits if heads.bias is None else logits + heads.bias


def hidden(heads: Heads) -> Tensor | None:
    """True where the bias hides a pair; broadcasts to (B, H, N, M). None without a bias."""
    return None if heads.bias is None else heads.bias < HIDDEN


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision widened."""
    return x.float() if x.dtype.itemsize < torch.float32.itemsize else x


def generator_of(site: Site, seed: int) -> torch.Generator:
    """The random numbers of `seed` for one site: other sites get others."""
    return torch.Generator().manual_seed(seed + zlib.crc32(site.name.encode()))


def part(spec: PartSpec, *, where: str = "", **settings: Any) -> PartMaker:
    """A registered attention with its settings bound and checked: `part("rpc", iterations=2)`.

    `spec` is a name, `"rpc:iterations=2"`, `{"use": "rpc", "iterations": 2}`, or a part itself; `settings` are those
    that `vitruvius list attentions` shows; `where` begins an error's sentence.
    """
    if isinstance(spec, nn.Module):  # made for a site already: it would be called with another one
        raise attentions.not_a_piece(spec, where)
    return cast(PartMaker, attentions.bind(spec, where=where, settings=settings))


def build_core(parts: Sequence[PartSpec], site: Site) -> Core:
    """Make every one of `parts` for this site, in reading order; a chain without a kernel ends in softmax."""
    makers = [part(item) for item in parts]
    core = _end_in_a_kernel([(_name_of(maker), maker(site)) for maker in makers], site)
    core.specs = [_spec_of(maker) for maker in makers]
    return core


def build_surrogate(core: Core, site: Site) -> Core | None:
    """A core in which every part that has a `surrogate` is replaced by it; None where none has.

    Parts that stay are the same modules, with their parameters; `core` stays as it is.
    """
    if all(module.surrogate is None for module in core.parts.values()):
        return None
    chain: dict[str, nn.Module] = {}
    for name, module in core.parts.items():
        if module.surrogate is None:
            chain[name] = module
            continue
        for item in module.surrogate:
            maker = part(item)
            chain.setdefault(_name_of(maker), maker(site))
    return _end_in_a_kernel(list(chain.items()), site)


def _end_in_a_kernel(parts: list[tuple[str, nn.Module]], site: Site) -> Core:
    if not parts or not isinstance(parts[-1][1], Kernel):
        parts = [*parts, ("softmax", part("softmax")(site))]
    return Core(parts, site)


def _spec_of(maker: PartMaker) -> str | dict[str, Any]:
    """How a part is written in a recipe; a mask without its pattern, which lies among the weights."""
    name, settings = _name_of(maker), dict(maker.keywords) if isinstance(maker, functools.partial) else {}
    if "keep" in settings or "file" in settings:
        settings = {**settings, "keep": "all"}
        settings.pop("file", None)
    return {"use": name, **settings} if settings else name


def _name_of(maker: PartMaker) -> str:
    """The registered name of a part; for unregistered classes, the class name in lower case."""
    piece = maker.func if isinstance(maker, functools.partial) else maker
    for name in attentions:
        if attentions[name] is piece:
            return name
    return getattr(piece, "__name__", type(piece).__name__).lower()


def _check_chain(parts: Sequence[tuple[str, nn.Module]], site: Site) -> None:
    """Refuse parts that do not go together, in this order or at this site."""
    names = [name for name, _ in parts]
    chain = f"{' → '.join(names)} at {site.name!r}"
    for name, module in parts:
        if not isinstance(module, Stage | Kernel):
            raise SurgeryError(f"{name!r} at {site.name!r} is a {type(module).__name__}, neither a Stage nor a Kernel.")
        if names.count(name) > 1:
            raise SurgeryError(f"{chain} names {name!r} twice; each part once.")
        if isinstance(module, Kernel) and module is not parts[-1][1]:
            raise SurgeryError(f"{chain}: the kernel {name!r} ends a chain; put it last, one kernel only.")
        if module.needs_tokens and not site.knows_input:
            raise site.unsuitable(name, "needs the tokens that ask, which this socket does not tell its core")
        if isinstance(module, Stage) and module.passes_state and not site.chained:
            raise site.unsuitable(
                name,
                "needs a state from the block before, as plain ViT blocks pass on "
                "(timm.models.vision_transformer.Block)",
            )
    for (writer, writing), (reader, reading) in itertools.combinations(parts, 2):
        lost = cast(Part, writing).writes & cast(Part, reading).discards
        if lost:
            raise SurgeryError(
                f"{chain}: {reader!r} throws away the {', '.join(sorted(lost))} that {writer!r} writes, which would be "
                f"lost and untrained. Put {reader!r} before it, or change its tensors."
            )
    passing = {name: module for name, module in parts if isinstance(module, Stage) and module.passes_state}
    if len(passing) > 1 and any(stage.reduces for stage in passing.values()):
        raise SurgeryError(
            f"{' and '.join(map(repr, passing))} at {site.name!r}: one of them merges tokens, so the other's state "
            "would not fit the next layer. Use one of them."
        )
