"""What a recipe says about the model: its `model:` section, and the rules of its `attention:` section."""

from __future__ import annotations

from typing import Any, Literal

from vitruvius._config import Spec, key, required, section
from vitruvius._registry import read_spec


@section("model")
class ModelConfig:
    """The `model:` section of a recipe."""

    name: str = required("a timm name, or one of ours: vitruvius/…")
    pretrained: bool = key(False, "start from timm's weights for that name")
    weights: str | None = key(None, "a run folder, .safetensors or .pth file to start from; null: none")
    mean: tuple[float, ...] | None = key(
        None, "mean of each channel that the model subtracts; null: what timm resolves for it"
    )
    std: tuple[float, ...] | None = key(
        None, "standard deviation of each channel that it divides by; null: what timm resolves for it"
    )
    positions: Literal["upstream", "sincos"] = key(
        "upstream", "position embeddings: the model's own, or a fixed sine-cosine table"
    )
    reset_head: bool = key(False, "take no head from the weights: for other classes than theirs")
    restride: int | None = key(
        None, "XCiT: patches of this many pixels, made from the weights for 16; null: as they are", ge=1
    )
    freeze: tuple[str, ...] = key(
        (), "globs over parameters and modules, e.g. [patch_embed, 'blocks.[0-5]']; a glob that begins with ! thaws"
    )
    kwargs: dict[str, Any] = key({}, "passed to the constructor in timm: num_classes, img_size, drop_path_rate, …")


@section("attention")
class AttentionRule:
    """One item of the `attention:` section: which sites, which parts, in reading order."""

    where: str = key("*", "a glob over site names")
    parts: list[Spec] = required("parts in reading order: rpc, rpc:iterations=2 or {use: rpc, iterations: 2}")

    def __post_init__(self) -> None:
        """Text with settings becomes a mapping: run folders and exports hold one form."""
        object.__setattr__(self, "parts", [_as_mapping(item) for item in self.parts])


def _as_mapping(item: Any) -> Any:
    if isinstance(item, str) and ":" in item:
        name, settings = read_spec(item, where="attention")
        return {"use": name, **settings}
    return item
