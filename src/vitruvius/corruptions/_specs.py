"""How corruptions are asked for in words: `fog:severity=3`, `corrupt:name=fog,severity=3`, `corruptions:group=all`.

The published set is a constant: what ImageNet-C consists of never changes. What there is to ask for is the registry:
a new corruption, also a plugin's, is in the group `all`, after the published ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from vitruvius._config import bind
from vitruvius._errors import ConfigError, suggest
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
)  # those that mCE is the mean of, in ImageNet-C's order
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")  # published beside them, for validation
IMAGENET_C = (*BENCHMARK, *EXTRA)

Group = Literal["benchmark", "extra", "all"]
GROUPS = ("benchmark", "extra", "all")


def corruption_names(group: str) -> tuple[str, ...]:
    """The corruptions of a group: the published 15, the 4 extra ones, or all that are registered.

    group: `benchmark`, `extra` or `all`. Published corruptions come first, in ImageNet-C's order, others by name.
    """
    if group == "benchmark":
        return BENCHMARK
    if group == "extra":
        return EXTRA
    if group == "all":
        return (*IMAGENET_C, *(name for name in corruptions if name not in IMAGENET_C))
    raise ConfigError(f"no group of corruptions named {group!r}{suggest(group, GROUPS)} Groups: {', '.join(GROUPS)}.")


def corruption_grid(
    *,
    group: Group = "benchmark",
    severities: Sequence[int] = SEVERITIES,
    seed: int = 0,
    scale: Scale = "auto",
    round8: bool = True,
) -> list[Corruption]:
    """Every corruption of a group at every severity, corruption by corruption.

    group: `benchmark` (default, ImageNet-C's 15), `extra` (4) or `all` that are registered.
    severities: from 1 to 5; default all five.
    seed: of the dice; default 0.
    scale: whose constants, `imagenet` or `cifar`; `auto` (default) goes by the size of the images.
    round8: whether results are cut to 256 levels as stored images are; default yes.
    """
    shared: dict[str, Any] = {"seed": seed, "scale": scale, "round8": round8}
    made = []
    for name in corruption_names(group):
        made += [corruptions[name](severity=severity, **shared) for severity in severities]
    return made


def is_corruption(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a threat's `name` and `settings` mean corruptions; `gaussian_noise` with an eps is an attack."""
    if name in ("corrupt", "corruptions") or "severity" in settings:
        return True
    return name in corruptions and "eps" not in settings


def parse_corruptions(name: str, settings: Mapping[str, Any], *, where: str = "") -> list[Corruption]:
    """One corruption by its name or as `corrupt:name=…`, a grid of them as `corruptions`.

    name: of the corruption, or `corrupt`, or `corruptions`.
    settings: those of the corruption, or of `corruption_grid`.
    where: begins the sentence of an error, e.g. `--threat`.
    """
    if name == "corruptions":
        return corruption_grid(**bind(name, corruption_grid, settings, where=where))
    settings = dict(settings)
    if name == "corrupt":
        if "name" not in settings:
            known = ", ".join(corruption_names("all"))
            raise ConfigError(f"{where}: corrupt needs a name, e.g. corrupt:name=fog,severity=3. Known: {known}.")
        name = str(settings.pop("name"))
    return [corruptions.make({"use": name, **settings}, where=where)]
