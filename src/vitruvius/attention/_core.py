"""Stages, kernels and the core they make: some stages `Heads → Heads`, then one kernel `Heads → Tensor`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor, nn

from vitruvius._config import bind
from vitruvius._errors import SurgeryError
from vitruvius._registry import Registry
from vitruvius.heads import Heads, Site


class Part(Protocol):
    """Something that makes a stage or a kernel for a site: a class with its settings bound."""

    def __call__(self, site: Site, /) -> nn.Module: ...


attentions: Registry[Callable[..., nn.Module]] = Registry("attention")


class Stage(nn.Module):
    """A module `Heads → Heads`.

    `writes` names the tensors its own parameters change; `discards` those it throws away, so
    that a part whose parameters would never see a gradient is refused when it is wired. Both may
    depend on the settings: an instance may set its own.
    A stage may define `penalty(before, after) -> Tensor`, added to the training loss by the task.
    """

    writes: frozenset[str] = frozenset()
    discards: frozenset[str] = frozenset()

    def forward(self, heads: Heads) -> Heads:
        raise NotImplementedError


class Kernel(nn.Module):
    """A module `Heads → Tensor` of shape (B, H, N, E). `discards` as in `Stage`."""

    writes: frozenset[str] = frozenset()
    discards: frozenset[str] = frozenset()

    def forward(self, heads: Heads) -> Tensor:
        raise NotImplementedError


class Core(nn.Module):
    """Stages in reading order, then one kernel. Parts live under their names, so checkpoints survive insertions."""

    def __init__(self, parts: Sequence[tuple[str, nn.Module]], site: Site) -> None:
        super().__init__()
        _check_order(parts, site)
        for name, module in parts:
            self.add_module(name, module)

    @property
    def parts(self) -> dict[str, nn.Module]:
        return cast("dict[str, nn.Module]", self._modules)

    def forward(self, heads: Heads) -> Tensor:
        made: Any = heads  # Heads until the kernel, which comes last, makes a Tensor of them
        for module in self._modules.values():  # children() would look for modules that occur twice, at every call
            made = module(made)  # type: ignore[misc]
        out: Tensor = made
        return out

    def describe(self) -> str:
        return " → ".join(self.parts)


def part(name: str, **settings: Any) -> Part:
    """A registered attention with its settings bound and checked: `part("rpc", iterations=2)`."""
    piece = attentions[name]
    return cast(Part, functools.partial(piece, **bind(name, piece, settings)))


def build_core(parts: Sequence[str | Part], site: Site) -> Core:
    """Make every part for this site; a chain without a kernel ends in softmax."""
    made: list[tuple[str, nn.Module]] = []
    for item in parts:
        maker = part(item) if isinstance(item, str) else item
        made.append((_name_of(maker), maker(site)))
    if not made or not isinstance(made[-1][1], Kernel):
        made.append(("softmax", part("softmax")(site)))
    return Core(made, site)


def _name_of(maker: Part) -> str:
    """The registered name of a part; for unregistered classes, the class name in lower case."""
    piece = maker.func if isinstance(maker, functools.partial) else maker
    for name in attentions:
        if attentions[name] is piece:
            return name
    return getattr(piece, "__name__", type(piece).__name__).lower()


def _check_order(parts: Sequence[tuple[str, nn.Module]], site: Site) -> None:
    names = [name for name, _ in parts]
    chain = " → ".join(names)
    for name, module in parts:
        if not isinstance(module, Stage | Kernel):
            raise SurgeryError(f"{name!r} at {site.name!r} is a {type(module).__name__}, neither a Stage nor a Kernel.")
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise SurgeryError(f"{chain} at {site.name!r} names {doubled[0]!r} twice; each part once.")
    for name, module in parts[:-1]:
        if isinstance(module, Kernel):
            raise SurgeryError(
                f"{chain} at {site.name!r}: the kernel {name!r} ends a chain; put it last, one kernel only."
            )
    for earlier, (writer, module) in enumerate(parts):
        for reader, later in parts[earlier + 1 :]:
            lost = module.writes & later.discards  # type: ignore[operator]
            if lost and any(p.requires_grad for p in module.parameters()):
                raise SurgeryError(
                    f"{chain} at {site.name!r}: {reader!r} throws away {', '.join(sorted(lost))}, which {writer!r} "
                    f"writes, so parameters of {writer!r} would get no gradient. Change the order or its tensors."
                )
