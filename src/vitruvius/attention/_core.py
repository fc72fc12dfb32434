"""Stages, kernels and the core they make: some stages `Heads → Heads`, then one kernel `Heads → Tensor`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor, nn

from vitruvius._errors import SurgeryError, UnsuitableSite
from vitruvius._registry import Registry
from vitruvius.heads import Context, Heads, Site


class Part(Protocol):
    """Something that makes a stage or a kernel for a site: a class with its settings bound."""

    def __call__(self, site: Site, /) -> nn.Module: ...


PartSpec = str | Mapping[str, Any] | Part  # "rpc:iterations=2", {"use": "rpc", "iterations": 2}, part("rpc")
Handed = Mapping[str, Tensor]  # what a layer hands on to the next, by the name of the part

attentions: Registry[Callable[..., nn.Module]] = Registry("attention", homes=["vitruvius.attention"])


Twins = Mapping[str, Sequence[str | Part]]  # by name, what can stand in for a part
PLAIN: Twins = MappingProxyType({"plain": ("softmax",)})
LEFT_OUT: Twins = MappingProxyType({"plain": ()})


class Stage(nn.Module):
    """A module `Heads → Heads`.

    `writes` names the tensors its own parameters change; `discards` those it throws away, so
    that a part whose parameters would never see a gradient is refused when it is wired. Both may
    depend on the settings: an instance may set its own.
    A stage may define `penalty(before, after) -> Tensor`, added to the training loss by the task.
    A stage that changes v says by `value_mixing` what it does to it; without that, its core has no map. One that adds
    values from elsewhere sets `brings_values`: the map is then over the values it makes.
    A stage that `chooses` keeps a few keys of each query, by their scores: whatever `hides` keys comes before it.
    A stage whose `needs` names "x" or "before" is called with (heads, context). With "before" it also hands something
    on to the next layer (`hand_on`); a stage that `reduces` changes the number of tokens between attention and MLP.
    `twins` names chains that can stand in for this part when a model is attacked through something whose gradient hides
    nothing (`vitruvius.evaluation.examination`): neutral settings, a smooth or exact form; () leaves the part out.
    `shows` says in words what the map of a core with this part is, for pages that show one.

    Every stage is made for a `site`, its first argument, whose sizes it may read and which it may refuse.
    """

    writes: frozenset[str] = frozenset()
    discards: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    twins: Twins = MappingProxyType({})
    shows: str = ""
    brings_values: bool = False
    reduces: bool = False
    chooses: bool = False
    hides: bool = False

    def forward(self, heads: Heads) -> Heads:
        """What becomes of `heads`; a stage that `needs` more also takes `context`.

        `context` holds the tokens that ask and what the same stage of the layer before handed on.
        """
        raise NotImplementedError

    def value_mixing(self, heads: Heads) -> Tensor | None:
        """The matrix (…, M', M) by which this stage makes its values of those in `heads`; None where it keeps v."""
        return None

    def hand_on(self, heads: Heads, context: Context) -> Tensor:
        """What the same stage of the next layer gets as `context.before`.

        `heads` are those that enter the core, `context` what this stage was told itself.
        """
        raise NotImplementedError

    def reduce(self, tokens: Tensor, heads: Heads, context: Context) -> tuple[Tensor, Tensor]:
        """Fewer tokens (B, N', C) than the (B, N, C) that attention left, and what is handed on with them.

        `tokens` come out of attention and its residual path; `heads` entered the core; `context` is what this stage was
        told.
        """
        raise NotImplementedError


class Kernel(nn.Module):
    """A module `Heads → Tensor` of shape (B, H, N, E). `discards`, `needs` ("x" only), `twins`, `hides` as in `Stage`.

    A kernel that ends in one softmax says which by `last_softmax`; another one defines `map`. A kernel that does
    neither has no map, and whoever asks for one is told so; `shows` says in words what it is.

    Every kernel is made for a `site`, its first argument, whose sizes it may read and which it may refuse.
    """

    writes: frozenset[str] = frozenset()
    discards: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    twins: Twins = MappingProxyType({})
    shows: str = ""
    hides: bool = False

    def forward(self, heads: Heads) -> Tensor:
        """The output (B, H, N, E) for `heads`; a kernel that `needs` "x" also takes `context`."""
        raise NotImplementedError

    def finish(self, out: Tensor) -> Tensor:
        """What this kernel does to its weighted sum of values, (B, H, N, E): nothing, unless it has an output norm.

        `out` is that sum.
        """
        return out

    def last_softmax(self, heads: Heads) -> Heads | None:
        """The Heads whose plain softmax attention is this kernel's output; None where there is no such softmax.

        `heads` reach the kernel.
        """
        return None

    def map(self, heads: Heads) -> Tensor | None:
        """The weights really used, (B, H, N, M): without dropout, map @ v is the output. None where there are none.

        `heads` reach the kernel.
        """
        last = self.last_softmax(heads)
        return None if last is None else attention_map(last)


class Core(nn.Module):
    """Stages in reading order, then one kernel. Parts live under their names, so checkpoints survive insertions.

    `parts` are pairs of a name and a module, in reading order; `site` is the one they were made for.
    """

    def __init__(self, parts: Sequence[tuple[str, nn.Module]], site: Site) -> None:
        super().__init__()
        _check_order(parts, site)
        _check_context(parts, site)
        for name, module in parts:
            self.add_module(name, module)

    @property
    def parts(self) -> dict[str, nn.Module]:
        return cast("dict[str, nn.Module]", self._modules)

    def forward(self, heads: Heads, x: Tensor | None = None, handed: Handed | None = None) -> Tensor:
        """The output (B, H, N, E). `x` are the tokens that ask, `handed` what the layer before handed on, by part.

        `heads` are what the socket made of its input.
        """
        made: Any = heads  # Heads until the kernel, which comes last, makes a Tensor of them
        for name, module in self._modules.items():  # children() would look for modules that occur twice, at every call
            made = _call(name, module, made, x, handed)
        out: Tensor = made
        return out

    def after(self, tokens: Tensor, heads: Heads, x: Tensor, handed: Handed) -> tuple[Tensor, Handed]:
        """Between attention and MLP: the tokens, perhaps fewer of them, and what goes to the layer behind.

        tokens: (B, N, C), as attention and its residual path left them.
        heads: those that entered the core.
        x: (B, N, C), the tokens that asked.
        handed: what the layer before handed on, by part.
        """
        passed: dict[str, Tensor] = {}
        for name, stage in zip(self.parts, self.stages, strict=False):
            context = Context(x, handed.get(name))
            if stage.reduces:
                tokens, passed[name] = stage.reduce(tokens, heads, context)
            elif "before" in stage.needs:
                passed[name] = stage.hand_on(heads, context)
        return tokens, passed

    @property
    def talks(self) -> bool:
        """Whether its block must hand something on or reduce tokens."""
        return any(stage.reduces or "before" in stage.needs for stage in self.stages)

    @property
    def needs(self) -> frozenset[str]:
        """What its parts must know besides Heads."""
        return frozenset().union(*(cast(Stage, part).needs for part in self.parts.values()))

    @property
    def stages(self) -> list[Stage]:
        return cast("list[Stage]", list(self.parts.values())[:-1])

    @property
    def kernel(self) -> Kernel:
        return cast(Kernel, list(self.parts.values())[-1])

    def approach(self, heads: Heads) -> Approach:
        """What the stages make of `heads` before the kernel sees them."""
        x, handed = getattr(heads, "x", None), getattr(heads, "handed", None)  # of RecordedHeads
        mixing: Tensor | None = None
        unsaid = ""
        for name, stage in zip(self.parts, self.stages, strict=False):
            own, after = stage.value_mixing(heads), _call(name, stage, heads, x, handed)
            if own is not None:
                mixing = own if mixing is None else own @ mixing
            elif after.v is not heads.v and not stage.brings_values and not unsaid:
                unsaid = name
            heads = after
        return Approach(heads, mixing, unsaid)

    def map(self, heads: Heads) -> Tensor | None:
        """The weights this core really gives to the values in `heads`, (B, H, N, M): map @ heads.v is its output.

        None where a part cannot say what it does; `mapless` names it. Dropout is left out, and so is what a kernel
        does after its weighted sum (an output norm, a gate).
        """
        received, mixing, unsaid = self.approach(heads)
        found = self.kernel.map(received)
        if found is None or unsaid:
            return None
        return found if mixing is None else found @ mixing.to(found.dtype)

    def mapless(self, heads: Heads) -> str:
        """The name of the part that keeps this core from having a map; empty where it has one.

        `heads` enter the core.
        """
        received, _, unsaid = self.approach(heads)
        if unsaid:
            return unsaid
        return "" if self.kernel.map(received) is not None else list(self.parts)[-1]

    def describe(self) -> str:
        return " → ".join(self.parts)


def _call(name: str, module: Any, heads: Heads, x: Tensor | None, handed: Handed | None) -> Any:
    """A part, with its context if it needs one."""
    if not module.needs:
        return module(heads)
    return module(heads, Context(x, handed.get(name) if handed else None))


class Approach(NamedTuple):
    """The way of Heads through the stages of a core."""

    received: Heads  # by the kernel
    mixing: Tensor | None  # (…, M', M): the kernel's values are mixing @ v; None: they are v
    unsaid: str  # the first stage that changes v and does not say how; empty where none does


def attention_map(heads: Heads) -> Tensor:
    """softmax(q kᵀ · scale + bias), (B, H, N, M): for looking at, never on the way to an output.

    `heads` are those of one softmax; a pair that the bias hides by −∞ gets 0.
    """
    logits = (heads.q * heads.scale) @ heads.k.mT
    if heads.bias is not None:
        logits = logits + heads.bias
    return logits.softmax(-1)


def part(spec: PartSpec, *, where: str = "", **settings: Any) -> Part:
    """A registered attention with its settings bound and checked: `part("rpc", iterations=2)`.

    `spec` is a name, `"rpc:iterations=2"`, `{"use": "rpc", "iterations": 2}`, or a part itself; `settings` are those
    that `vitruvius list attentions` shows; `where` begins an error's sentence.
    """
    if isinstance(spec, nn.Module):  # made for a site already: it would be called with another one
        raise attentions.not_a_piece(spec, where)
    return cast(Part, attentions.bind(spec, where=where, settings=settings))


def build_core(parts: Sequence[PartSpec], site: Site) -> Core:
    """Make every part for this site; a chain without a kernel ends in softmax.

    `parts` are specs or parts, in reading order: stages, then at most one kernel. `site` is where they will be plugged
    in.
    """
    made: list[tuple[str, nn.Module]] = []
    for item in parts:
        maker = part(item)
        made.append((_name_of(maker), maker(site)))
    if not made or not isinstance(made[-1][1], Kernel):
        made.append(("softmax", part("softmax")(site)))
    return Core(made, site)


def build_twin(core: Core, twin: str, site: Site) -> Core | None:
    """A core in which every part that declares this twin is replaced by it; None where none does.

    Parts that stay are the same modules, with their parameters.

    `core` stays as it is; `twin` is the name of a twin, such as "plain"; `site` is where the core is plugged in.
    """
    chain: dict[str, nn.Module] = {}
    replaced = False
    for name, module in core.parts.items():
        twins = cast(Stage, module).twins
        if twin not in twins:
            chain[name] = module
            continue
        replaced = True
        for item in twins[twin]:
            maker = part(item) if isinstance(item, str) else item
            chain.setdefault(_name_of(maker), maker(site))
    if not replaced:
        return None
    if not chain or not isinstance(list(chain.values())[-1], Kernel):
        chain["softmax"] = part("softmax")(site)
    return Core(list(chain.items()), site)


def _name_of(maker: Part) -> str:
    """The registered name of a part; for unregistered classes, the class name in lower case."""
    piece = maker.func if isinstance(maker, functools.partial) else maker
    for name in attentions:
        if attentions[name] is piece:
            return name
    return getattr(piece, "__name__", type(piece).__name__).lower()


def _check_order(parts: Sequence[tuple[str, nn.Module]], site: Site) -> None:
    names = [name for name, _ in parts]
    chain = f"{' → '.join(names)} at {site.name!r}"
    for name, module in parts:
        if not isinstance(module, Stage | Kernel):
            raise SurgeryError(f"{name!r} at {site.name!r} is a {type(module).__name__}, neither a Stage nor a Kernel.")
    doubled = sorted(name for name in names if names.count(name) > 1)
    if doubled:
        raise SurgeryError(f"{chain} names {doubled[0]!r} twice; each part once.")
    for name, module in parts[:-1]:
        if isinstance(module, Kernel):
            raise SurgeryError(f"{chain}: the kernel {name!r} ends a chain; put it last, one kernel only.")
    for writer, reader in itertools.combinations(parts, 2):
        _check_nothing_is_lost(writer, reader, chain)
        _check_a_key_is_left(writer, reader, chain)


def _check_nothing_is_lost(writer: tuple[str, nn.Module], reader: tuple[str, nn.Module], chain: str) -> None:
    """Refuse a part that throws away what the parameters of an earlier one have written."""
    lost = writer[1].writes & reader[1].discards  # type: ignore[operator]
    if lost and any(parameter.requires_grad for parameter in writer[1].parameters()):
        raise SurgeryError(
            f"{chain}: {reader[0]!r} throws away {', '.join(sorted(lost))}, which {writer[0]!r} writes, so parameters "
            f"of {writer[0]!r} would get no gradient. Change the order or its tensors."
        )


def _check_a_key_is_left(chooser: tuple[str, nn.Module], hider: tuple[str, nn.Module], chain: str) -> None:
    """Refuse a part that may hide just the keys which an earlier one has chosen for a query."""
    if cast(Stage, chooser[1]).chooses and cast(Stage, hider[1]).hides:
        raise SurgeryError(
            f"{chain}: {hider[0]!r} may hide every key that {chooser[0]!r} has chosen for a query, which would then "
            f"see nothing. Put {chooser[0]!r} behind 'mask', so that it chooses among the keys that are left."
        )


def _check_context(parts: Sequence[tuple[str, nn.Module]], site: Site) -> None:
    for name, module in parts:
        _check_neighbours(name, module, site)
    talking = [name for name, module in parts if _talks(module)]
    if len(talking) > 1 and any(_reduces(module) for _, module in parts):
        raise SurgeryError(
            f"{' and '.join(map(repr, talking))} at {site.name!r}: one of them merges tokens, so what the other hands "
            "on would not fit the next layer. Use one of them."
        )


def _check_neighbours(name: str, module: nn.Module, site: Site) -> None:
    """Refuse a part at a site that cannot tell it what it needs to know."""
    needs: frozenset[str] = module.needs  # type: ignore[assignment]
    if "x" in needs and not site.knows_input:
        raise UnsuitableSite(
            f"{name!r} needs the tokens that ask, which the socket of {site.name!r} ({site.family}, attends over "
            f"{site.attends}) does not tell its core. Choose other sites with where=…"
        )
    if _talks(module) and not site.chained:
        raise UnsuitableSite(
            f"{name!r} needs what the block before hands on, and the block of {site.name!r} ({site.family}) does "
            "not; plain ViT blocks do (timm.models.vision_transformer.Block). Choose other sites with where=…"
        )


def _talks(module: nn.Module) -> bool:
    """Whether a part hands something on to the next layer."""
    needs: frozenset[str] = module.needs  # type: ignore[assignment]
    return "before" in needs or _reduces(module)


def _reduces(module: nn.Module) -> bool:
    return bool(getattr(module, "reduces", False))
