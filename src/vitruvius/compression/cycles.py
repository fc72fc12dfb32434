"""A table of the accelerator's cycles against sparsity, the dense baseline first.    H heads, N tokens; True = kept"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from vitruvius._errors import ConfigError
from vitruvius.compression.accelerator import Accelerator, Cycles, HeadChoice, attention_cycles, dense_layers
from vitruvius.compression.polarisation import polarise_all
from vitruvius.compression.sparsity import count


@dataclass(frozen=True)
class CycleTable:
    """Cycles of the attention of a model by the share of pairs removed; 0 is dense."""

    rows: dict[float, Cycles]

    def speed_up(self, sparsity: float) -> float:
        """Dense cycles over those at this `sparsity`, the share of pairs removed."""
        return self.rows[0.0].total / max(self.rows[sparsity].total, 1)

    def curves(self) -> dict[str, dict[float, float]]:
        """What a figure draws: the whole, and what it is made of."""
        kinds = {"total": "total", "moving data": "load", "computing": "compute", "auto-encoder": "decode"}
        return {name: {s: getattr(c, key) for s, c in self.rows.items()} for name, key in kinds.items()}

    def __str__(self) -> str:
        lines = [f"{'removed':>9}  {'load':>9}  {'decode':>9}  {'compute':>9}  {'total':>9}  faster", "-" * 60]
        for sparsity, c in self.rows.items():
            numbers = "  ".join(f"{number:>9,}" for number in (c.load, c.decode, c.compute, c.total))
            lines.append(f"{100 * sparsity:>7.2f} %  {numbers}  {self.speed_up(sparsity):5.2f}×")
        return "\n".join(lines)


def cycle_table(
    patterns: list[Mapping[str, Tensor]],
    *,
    head_dim: int,
    ratio: float = 1.0,
    threshold: int | None = None,
    heads: HeadChoice = "all",
    chip: Accelerator | None = None,
) -> CycleTable:
    """Cycles of several masks of one model, each {site: (H, N, N)}, and of no mask.

    patterns: the masks, True = kept.
    head_dim: width of a head.
    ratio: rank of the auto-encoder over the number of heads; 1 is none.
    threshold: queries that must look at a token to make it global; None: a quarter of the tokens.
    heads: all, or the first one for all as in the released simulator.
    chip: by default the published one.
    """
    if not patterns:
        raise ConfigError("cycle_table got no masks.")
    measured: dict[float, Cycles] = {}
    for keep in patterns:
        layers = list(polarise_all(keep, threshold=threshold).values())
        settings = {"head_dim": head_dim, "ratio": ratio, "heads": heads, "chip": chip}
        if not measured:
            measured[0.0] = attention_cycles(dense_layers(layers), **settings)  # type: ignore[arg-type]
        measured[count(keep).total.sparsity] = attention_cycles(layers, **settings)  # type: ignore[arg-type]
    return CycleTable(dict(sorted(measured.items())))
