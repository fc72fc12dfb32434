"""How corruptions are asked for in words: `fog:severity=3`, `corrupt:name=fog,severity=3`, `corruptions:group=all`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vitruvius._config import bind
from vitruvius._errors import ConfigError, UnknownName, suggest
from vitruvius.corruptions._base import SEVERITIES, Corruption, Scale, corruptions

BENCHMARK = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)  # in ImageNet-C's order
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
ALL = (*BENCHMARK, *EXTRA)
GROUPS = {"benchmark": BENCHMARK, "extra": EXTRA, "all": ALL}


def corruption_grid(
    *,
    group: Literal["benchmark", "extra", "all"] = "benchmark",
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    scale: Scale = "auto",
    round8: bool = True,
) -> list[Corruption]:
    """Every corruption of a group at every severity, corruption by corruption; 15 × 5 by default."""
    if group not in GROUPS:
        raise ConfigError(
            f"no group of corruptions named {group!r}{suggest(group, GROUPS)} Groups: {', '.join(GROUPS)}."
        )
    shared: dict[str, Any] = {"seed": seed, "scale": scale, "round8": round8}
    return [corruptions[name](severity=severity, **shared) for name in GROUPS[group] for severity in severities]


def is_corruption(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a threat's name and settings mean corruptions; `gaussian_noise` with an eps is an attack."""
    return (
        name in ("corrupt", "corruptions") or "severity" in settings or (name in corruptions and "eps" not in settings)
    )


def parse_corruptions(name: str, settings: Mapping[str, Any], *, where: str = "") -> list[Corruption]:
    """One corruption by its name or as `corrupt:name=…`, a grid of them as `corruptions`."""
    if name == "corruptions":
        return corruption_grid(**bind(name, corruption_grid, settings, where=where))
    settings = dict(settings)
    if name == "corrupt":
        if "name" not in settings:
            raise ConfigError(
                f"{where}: corrupt needs a name, e.g. corrupt:name=fog,severity=3. Known: {', '.join(ALL)}."
            )
        name = str(settings.pop("name"))
    if name not in corruptions:
        raise UnknownName(f"{where}: no corruption named {name!r}{suggest(name, ALL)} Known: {', '.join(ALL)}.")
    maker = corruptions[name]
    return [maker(**bind(name, maker, settings, where=where))]
