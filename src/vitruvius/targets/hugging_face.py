"""An image classifier of Hugging Face's transformers, by id or folder: hf:google/vit-base-patch16-224, hf:mine."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from vitruvius._config import build, override
from vitruvius._errors import CheckpointError
from vitruvius._files import load_tensors
from vitruvius._registry import require
from vitruvius.targets.base import OUTSIDE, Target, TargetConfig, check_settings, folder_for, target_kinds

if TYPE_CHECKING:
    from vitruvius.models import PixelModel

PREFIX = "hf:"
CORE = ".core."
SAID = (*OUTSIDE, "attention=", "model.mean=", "model.std=", "seed=")
INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}  # Pillow's numbers


@target_kinds.register("hugging_face")
class HuggingFaceModel:
    """An image classifier of transformers: hf:FOLDER or hf:ID (extra `hf`); the code of a repository is never run."""

    order = 5.0
    has_data = False

    def accepts(self, text: str) -> bool:
        return text.startswith(PREFIX)

    def open(self, text: str, overrides: Sequence[str], *, trust_plugins: bool) -> Target:
        """The classifier as pixels see it; data, device, attention, mean and std can be said."""
        check_settings(overrides, SAID, f"{text} is a model of transformers.")
        config = build(TargetConfig, override({"model": {"name": text}}, overrides), source=text)

        def make() -> PixelModel:
            from vitruvius.models.wiring import wire

            model = load_classifier(text, mean=config.model.mean, std=config.model.std)
            wire(model, config.attention)
            return model

        return Target(text=text, config=config, folder=folder_for(text.replace(":", "-")), make=make)


class Classifier(nn.Module):
    """A classifier of transformers as a timm model looks: images in, logits out, and its preprocessing beside it."""

    def __init__(self, network: Any, preprocessing: Mapping[str, Any]) -> None:
        from vitruvius.surgery.sites import prefix_tokens

        super().__init__()
        self.network = network
        self.num_classes = int(network.config.num_labels)
        self.num_prefix_tokens = prefix_tokens(network)
        self.pretrained_cfg = {**preprocessing, "num_classes": self.num_classes}
        self.default_cfg = self.pretrained_cfg

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, K) of normalised images `x` (B, C, H, W)."""
        return self.network(pixel_values=x).logits


def load_classifier(
    text: str, *, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
) -> PixelModel:
    """The classifier that `hf:FOLDER` or `hf:ID` names, in float32 and eval mode, on pixels in [0, 1].

    text: with its prefix; an id is fetched by transformers, once.
    mean, std: of the channels; default: what the image processor beside the weights says.
    """
    from vitruvius.models import PixelModel
    from vitruvius.models.wiring import wire

    transformers: Any = require("transformers", "hf")
    name = text.removeprefix(PREFIX)
    if name and Path(name).is_dir():  # what can only be a folder must hold a model; everything else may be an id
        if not (Path(name) / "config.json").is_file():
            raise CheckpointError(f"{text}: the folder has no config.json. `model.save_pretrained(folder)` writes one.")
    elif not name or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise CheckpointError(f"{text}: there is no such folder, and an id has the form owner/name.")
    network, rules = _load_network(transformers, text, name)
    preprocessing = _preprocessing(transformers, text, name, network.config, given=mean is not None and std is not None)
    model = PixelModel(Classifier(network.float(), preprocessing), mean=mean, std=std)
    if rules:
        wire(model, [{**rule, "where": f"*{rule['where']}"} for rule in rules])  # the classifier lies one level deeper
        _load_cores(model, name, text)
    return model.eval()


def _load_network(transformers: Any, text: str, name: str) -> tuple[Any, list[dict[str, Any]]]:
    """The model with upstream's weights, and the rules of its attention; a head that would be made up is refused."""
    from vitruvius.surgery.rewiring import KEY

    talks = transformers.utils.logging.get_verbosity()
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        rules = list((getattr(config, KEY, None) or {}).get("attention", ()))
        if rules:
            transformers.utils.logging.set_verbosity_error()  # what it would report as unexpected is loaded next
        network, found = transformers.AutoModelForImageClassification.from_pretrained(
            name, output_loading_info=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{text} cannot be opened as an image classifier: {_first_line(error)}") from error
    finally:
        transformers.utils.logging.set_verbosity(talks)
    missing = sorted(found["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{text} lacks weights of {type(network).__name__}: {', '.join(missing[:4])}"
            f"{', …' * (len(missing) > 4)}. It was saved without a head, or as another kind of model."
        )
    return network, rules


def _load_cores(model: PixelModel, name: str, text: str) -> None:
    """The weights of the cores, which transformers does not load; it may have written layers under older names."""
    hub: Any = require("huggingface_hub", "hf")
    folder = name if Path(name).is_dir() else hub.snapshot_download(name)
    files: dict[Any, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        files |= {_place(key): value for key, value in load_tensors(file)[0].items() if CORE in key}
    wanted = {key: _place(key) for key in model.state_dict() if CORE in key}
    if set(wanted.values()) != set(files):
        raise CheckpointError(
            f"{text}: config.json names an attention whose weights are not those of the files: {len(wanted)} expected, "
            f"{len(files)} there. Save the rewired model again with save_pretrained (safetensors)."
        )
    model.load_state_dict({key: files[place] for key, place in wanted.items()}, strict=False)


def _place(key: str) -> tuple[Any, ...]:
    """Where in the network a key of a core belongs, whatever the modules above it are called: numbers, and its name."""
    above, _, own = key.partition(CORE)
    return *re.findall(r"\d+", above), own


def _preprocessing(transformers: Any, text: str, name: str, config: Any, *, given: bool) -> dict[str, Any]:
    """timm's words for what the image processor says: input_size, mean, std, interpolation, crop_pct, crop_mode."""
    side = getattr(config, "image_size", None) or 224
    size = (side, side) if isinstance(side, int) else (int(side[0]), int(side[1]))
    channels = int(getattr(config, "num_channels", 3))
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if given:
            return {"input_size": (channels, *size), "mean": (0.5,) * channels, "std": (0.5,) * channels}
        raise CheckpointError(
            f"{text} does not say how its images are normalised: {_first_line(error)} Save its image processor into "
            "the same folder (preprocessor_config.json), or give model.mean=[…] and model.std=[…]."
        ) from error
    mean, std = (0.0,) * channels, (1.0,) * channels
    if getattr(processor, "do_normalize", True):
        mean, std = tuple(processor.image_mean), tuple(processor.image_std)
    return {"mean": mean, "std": std, **_sizes(processor, size, channels)}


def _sizes(processor: Any, built: tuple[int, int], channels: int) -> dict[str, Any]:
    """How images come to the size of the model."""
    said = dict(getattr(processor, "size", None) or {})
    resized = _edges(said, built)
    final = resized
    if getattr(processor, "do_center_crop", False) and getattr(processor, "crop_size", None):
        final = _edges(dict(processor.crop_size), built)
    squashed = final == resized and "shortest_edge" not in said  # both edges, whatever the shape of the image
    code = getattr(processor, "resample", None)
    return {
        "input_size": (channels, *final),
        "interpolation": INTERPOLATIONS[2 if code is None else int(code)],
        "crop_pct": final[0] / resized[0],
        "crop_mode": "squash" if squashed else "center",
    }


def _edges(said: Mapping[str, Any], built: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of `{height, width}` or `{shortest_edge}`; without either, what the model was built for."""
    edge = said.get("shortest_edge")
    return int(said.get("height") or edge or built[0]), int(said.get("width") or edge or built[1])


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
