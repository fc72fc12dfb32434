"""AutoAttack: a parameter-free ensemble of attacks, each on the images the others left standing.

Croce & Hein 2020, arXiv:2003.01690. Images drop out as soon as they fall and batches are refilled. With
precision="fast" all stages search in bfloat16 first; what falls is checked in float32, what stands is searched again.
On an NVIDIA GPU passes of the model are recorded and replayed (`_replay.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from vitruvius._checks import check_eval_mode
from vitruvius._dice import Dice, image_ids
from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius.attacks._base import Attack, Model, Threat, attacks, check_inputs
from vitruvius.attacks._ensemble.cascade import Cascade
from vitruvius.attacks._ensemble.result import Outcome
from vitruvius.attacks._ensemble.stages import STAGES, VERSIONS
from vitruvius.attacks._models import VerifiedView, check_logits, frozen
from vitruvius.attacks._views.compiled import compile_model
from vitruvius.attacks._views.cuda_graphs import with_cuda_graphs
from vitruvius.attacks._views.lower_precision import bfloat16_view

PRECISIONS = ("exact", "fast")
FEW_NUMBERS = 2**16  # a batch of so many pixels costs hardly more than one image: digits are searched by hundreds


@attacks.register("autoattack")
@dataclass(frozen=True, kw_only=True)
class AutoAttack(Attack):
    """The ensemble APGD-CE, APGD-T, FAB-T, Square (standard); plus, rand and custom lists too."""

    pool_batches: ClassVar[int] = 8  # an evaluation hands over so many batches at once, so that active sets stay full

    version: str = "standard"  # standard, plus, rand or custom
    attacks: tuple[str | Threat, ...] = ()  # of a custom version: names of stages, or any threats
    precision: str = "exact"  # fast: search in bfloat16 first, in float32 again what stands
    batch_size: int | None = None  # images searched at once; default all that are given
    compile: bool = False  # torch.compile what is searched (fast: the bfloat16 view) and the bookkeeping

    def __post_init__(self) -> None:
        super().__post_init__()
        for value, known, what in ((self.version, VERSIONS, "version"), (self.precision, PRECISIONS, "precision")):
            if value not in known:
                raise UnknownName(f"no {what} named {value!r}{suggest(value, known)} Known: {', '.join(known)}.")
        if bool(self.attacks) != (self.version == "custom"):
            raise ConfigError(
                f"AutoAttack with version={self.version!r} and {len(self.attacks)} attacks; "
                "a list of attacks belongs to version='custom', and only there."
            )
        self.stages()

    def stages(self) -> list[tuple[str, Threat]]:
        """The attacks by name, in order."""
        version = VERSIONS[self.version]
        effort = (version.l1_effort if self.norm.name == "l1" else version.effort)._replace(compile=self.compile)
        common: dict[str, Any] = {"eps": self.eps, "norm": self.norm, "seed": self.seed, "batch_size": self.batch_size}
        made: dict[str, Threat] = {}
        for item in version.stages or self.attacks:
            if isinstance(item, str) and item not in STAGES:
                raise UnknownName(f"no stage named {item!r}{suggest(item, STAGES)} Known: {', '.join(STAGES)}.")
            name = item if isinstance(item, str) else str(getattr(item, "__name__", type(item).__name__)).lower()
            again = sum(name == known.split(" ")[0] for known in made)
            threat = STAGES[item](effort, common) if isinstance(item, str) else item
            made[f"{name} {again + 1}" if again else name] = threat
        return list(made.items())

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, /, *, ids: Tensor | None = None) -> Tensor:
        return self.run(model, x, y, ids=ids).x

    def run(self, model: nn.Module, x: Tensor, y: Tensor, *, ids: Tensor | None = None) -> Outcome:
        """All stages, with a record of which one felled which image."""
        check_eval_mode(model)
        check_inputs(x, y)
        with torch.inference_mode(False), torch.no_grad(), frozen(model):
            x, y = (t.clone() if t.is_inference() else t for t in (x.detach(), y))
            check_logits(model(x[:1]), y, len(x[:1]))
            cascade = Cascade(model, x, y, image_ids(x) if ids is None else ids.to(x.device), self.batch_size)
            room = max(len(x), FEW_NUMBERS // max(x[:1].numel(), 1), 1)  # fewer images, more targets at once
            sized = self if self.batch_size else replace(self, batch_size=room)
            sized._run_exact(cascade, model, x) if self.precision == "exact" else sized._run_fast(cascade, model, x)
        return cascade.outcome()

    def _run_exact(self, cascade: Cascade, model: nn.Module, x: Tensor) -> None:
        view = with_cuda_graphs(compile_model(model, x) if self.compile else model, x, self.batch_size or len(x))
        for name, threat in self.stages():
            cascade.run(name, threat, view)

    def _run_fast(self, cascade: Cascade, model: nn.Module, x: Tensor) -> None:
        """All stages in bfloat16, then again in float32; what is left to do there does not pay for compiling it."""
        room = self.batch_size or len(x)
        view, exact = bfloat16_view(model, x), with_cuda_graphs(model, x, room)
        view = with_cuda_graphs(compile_model(view, x) if self.compile else view, x, room)
        cascade.measure_view(view)
        for name, threat in self.stages():
            cascade.run_fast(name, threat, VerifiedView(view, exact))
        for name, threat in replace(self, compile=False).stages():
            cascade.confirm(name, threat, exact)

    def search(self, model: Model, x: Tensor, y: Tensor, dice: Dice) -> Tensor:
        raise NotImplementedError("AutoAttack searches by its stages; call it, or its method run.")
