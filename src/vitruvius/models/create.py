"""create_model and load_model: timm's factory, then initialisation, then surgery, then pixels."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from timm.layers import to_2tuple
from timm.models import is_model, list_models, parse_model_name, split_model_name_tag
from torch import nn

from vitruvius._checks import check_seed
from vitruvius._config import build
from vitruvius._errors import CheckpointError, ConfigError, RunError, SurgeryError, UnknownName, suggest
from vitruvius._files import exists, is_url, join, read_json, read_text
from vitruvius._registry import load_foreign_plugins
from vitruvius._yaml import parse_value, read_yaml
from vitruvius.attention.low_rank import LowRank
from vitruvius.init.base import InitSpec
from vitruvius.models.base import PREFIX, PixelModel, models
from vitruvius.models.base import restride as restride_xcit
from vitruvius.models.config import AttentionRule, ModelConfig
from vitruvius.models.freezing import freeze
from vitruvius.models.weights import head_keys, load_weights
from vitruvius.models.wiring import Parts, wire, without_files
from vitruvius.surgery.base import cores_of
from vitruvius.surgery.folding import start_low_rank
from vitruvius.surgery.initialising import initialise
from vitruvius.surgery.positions import use_sincos_positions
from vitruvius.surgery.rewiring import KEY

logger = logging.getLogger(__name__)

FOLDER = "local-dir:"  # how timm names a folder in the layout of the Hugging Face hub
SIZES = {
    "num_classes": 0,
    **dict.fromkeys(("depth", "num_heads", "embed_dim", "img_size", "patch_size", "in_chans"), 1),
}


def create_model(
    name: str,
    *,
    pretrained: bool = False,
    attention: Parts = (),
    init: InitSpec | None = None,
    positions: Literal["upstream", "sincos"] = "upstream",
    restride: int | None = None,
    seed: int = 0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **timm_kwargs: Any,
) -> PixelModel:
    """A timm model (or one of ours) that takes pixels in [0, 1], with the attention asked for.

    `name` is a timm name, or one of ours (`vitruvius/…`). `pretrained` loads timm's weights for it (default: random
    ones). `attention` is one part or a list of them, for every site, written `"rpc"`, `"rpc:iterations=2"`,
    `{"use": "rpc", "iterations": 2}` or as a part itself; or a list of `AttentionRule`s (default: upstream's).
    `init` is a start for the attention weights, written the same way: `"mimetic:alpha=0.6"` (default: timm's).
    `positions` "sincos" puts a fixed table in place of a learned one. `restride` is a smaller patch for XCiTs, in
    pixels, from the same weights. Random weights come from `seed` alone; the global random state is left as it was.
    `mean` and `std` normalise the channels (default: what timm resolves for the model). `timm_kwargs` go to the
    model's constructor: num_classes, img_size, drop_path_rate, …
    """
    if not isinstance(name, str):
        raise ConfigError(f"a model's name is text such as 'deit_tiny_patch16_224', not {name!r}.")
    check_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        noted = _noted_attention(name)
        made = _make(name, pretrained and not noted, timm_kwargs)
        if restride is not None:
            restride_xcit(made, restride)
        model = PixelModel(made, mean=mean, std=std)
        if positions == "sincos":
            use_sincos_positions(model)
        if init is not None:
            initialise(model, init, generator=torch.Generator().manual_seed(seed))
        size = model.data_config["input_size"] if "img_size" in timm_kwargs else None
        wire(model, noted, input_size=size)
        if noted and pretrained:
            load_weights(model, Path(name.removeprefix(FOLDER)) / "model.safetensors")
            return model.eval()
        wire(model, attention, input_size=size)
        start_auto_encoders(model)
    return model.eval()


def create_from_config(
    config: ModelConfig, rules: Sequence[AttentionRule] = (), *, init: InitSpec | None = None, seed: int = 0
) -> PixelModel:
    """The model that the sections `model:`, `attention:` and `init:` of a recipe describe, weights included."""
    settings: dict[str, Any] = {key: getattr(config, key) for key in ("positions", "restride", "mean", "std")}
    settings |= {"attention": rules, "init": init, "seed": seed, **config.kwargs}
    model = create_model(config.name, pretrained=config.pretrained, **settings)
    if config.weights is not None:
        missing = load_weights(model, config.weights, reset_head=config.reset_head, resample=True)
        new_parts = [key for key in missing if ".core.low_rank." in key]
        start_auto_encoders(model, only={key.partition(".core.low_rank.")[0] for key in new_parts})
    elif config.pretrained and config.reset_head:
        new = create_model(config.name, **settings).model.state_dict()
        model.model.load_state_dict({key: new[key] for key in head_keys(model.model)}, strict=False)
    return freeze(model, config.freeze) if config.freeze else model


def start_auto_encoders(model: nn.Module, only: set[str] | None = None) -> None:
    """Let `low_rank` (at the sites `only`) begin as the projection that keeps most of q and k; released starts stay."""
    parts = {site: core.parts.get("low_rank") for site, core in cores_of(model).items() if only is None or site in only}
    sites = [site for site, part in parts.items() if isinstance(part, LowRank) and part.start != "released"]
    if not sites or any(parameter.is_meta for parameter in model.parameters()):
        return
    try:
        start_low_rank(model, sites)
    except SurgeryError as error:  # a norm or another stage stands between the weights and the auto-encoder
        logger.warning(
            "low_rank begins as a plain projection: %s fit_low_rank(model, batches) finds a better one.", error
        )


def load_model(run: str | Path, *, best: bool = True, trust_plugins: bool = False) -> PixelModel:
    """The model of a run folder: what its config.yaml describes, with its weights.

    `run` is the folder, here or at a URL. `best` takes the best weights where there are any (the default), else the
    last ones. `trust_plugins` imports the modules that its `plugins:` names, which runs their code; by default only
    modules that are imported already or installed with an entry point are accepted.
    """
    source = str(join(run, "config.yaml"))
    if not exists(source):
        raise RunError(f"{run} is not a run folder: it has no config.yaml. `vitruvius train` makes one.")
    recipe = dict(parse_value(read_text(source))) if is_url(source) else read_yaml(source)
    load_foreign_plugins(recipe.get("plugins") or [], source=source, trust=trust_plugins)
    return load_run(recipe, run, best=best)


def load_run(recipe: Mapping[str, Any], run: str | Path, *, best: bool = True) -> PixelModel:
    """The model of a run's `recipe`, with the `best` weights in the folder `run` if there are any, else the last."""
    source = str(join(run, "config.yaml"))
    own_weights = {"pretrained": False, "weights": None, "reset_head": False}
    config = build(ModelConfig, {**(recipe.get("model") or {}), **own_weights}, source=source)
    rules = [without_files(build(AttentionRule, rule, source=source)) for rule in recipe.get("attention") or ()]
    model = create_from_config(config, rules, seed=int(recipe.get("seed", 0)))
    files = [join(run, f"{name}.safetensors") for name in (("best", "last") if best else ("last",))]
    weights = next((file for file in files if exists(file)), None)
    if weights is None:
        raise RunError(f"{run} holds no weights yet (expected {Path(files[0]).name}).")
    load_weights(model, weights)
    return model


def _noted_attention(name: str) -> list[dict[str, Any]]:
    """The rules in the config.json of a folder that timm's `save_for_hf` wrote, with `attention_of(model)` in it."""
    file = Path(name.removeprefix(FOLDER)) / "config.json"
    if not name.startswith(FOLDER) or not file.is_file():
        return []
    return list((read_json(file).get(KEY) or {}).get("attention", ()))


def _make(name: str, pretrained: bool, kwargs: Mapping[str, Any]) -> nn.Module:
    """timm's model or ours; one built for another image size says so in its configuration."""
    build: Callable[..., Any]
    if name.startswith(PREFIX):
        if pretrained:
            raise ConfigError(f"{name!r} has no pretrained weights; start from a run with model.weights.")
        build = models[name]
    else:
        _check_known(name)
        build = functools.partial(timm.create_model, name, pretrained=pretrained)
    for setting, value in kwargs.items():
        _check_setting(name, setting, value)
    try:
        made = build(**kwargs)
    except (TypeError, AssertionError, ValueError, RuntimeError, ArithmeticError, OSError) as error:
        of_a_fetch = any(word in str(error).lower() for word in ("download", "url", "hub", "connection"))
        fetching = isinstance(error, OSError) or (isinstance(error, RuntimeError) and of_a_fetch)  # no setting's fault
        if pretrained and (fetching or (isinstance(error, RuntimeError) and not kwargs)):
            raise CheckpointError(
                f"the pretrained weights of {name!r} cannot be downloaded: {str(error).splitlines()[0]} "
                "Without a network, give a file with model.weights, or pretrained: false."
            ) from error
        if fetching or not kwargs:
            raise
        raise ConfigError(f"{name!r} cannot be made with {dict(kwargs)}: {error}") from error
    if getattr(getattr(made, "patch_embed", None), "num_patches", None) == 0:
        raise ConfigError(f"{name!r} cannot be made with {dict(kwargs)}: not one patch fits into such an image.")
    config, size = getattr(made, "pretrained_cfg", None), kwargs.get("img_size")
    if size is not None and isinstance(config, Mapping) and "input_size" in config:
        made.pretrained_cfg = {**config, "input_size": (config["input_size"][0], *to_2tuple(size))}
        made.default_cfg = made.pretrained_cfg
    assert isinstance(made, nn.Module)
    return made


def _check_setting(name: str, setting: str, value: Any) -> None:
    """Refuse a size that timm takes and that makes no model: no block, no head, minus one class."""
    least = SIZES.get(setting)
    values = value if isinstance(value, list | tuple) else [value]
    if least is not None and not all(isinstance(x, int) and not isinstance(x, bool) and x >= least for x in values):
        raise ConfigError(f"{name!r} cannot be made with {setting}={value!r}: expected whole numbers from {least} on.")
    if setting.endswith("_rate") and not (isinstance(value, int | float) and 0 <= value < 1):
        raise ConfigError(f"{name!r} cannot be made with {setting}={value!r}: expected a share from 0 to below 1.")


def _check_known(name: str) -> None:
    try:
        source, rest = parse_model_name(name)
    except ValueError as error:  # a name with a slash and no source
        raise UnknownName(f"no model named {name!r}: {error}") from error
    if source is not None and source not in ("", "timm"):
        return  # hf-hub:… and local-dir:… are resolved by timm
    architecture = split_model_name_tag(rest)[0]
    if not is_model(architecture):
        ours = f"{PREFIX}{architecture}"
        hint = f"; did you mean {ours!r}?" if ours in models else suggest(architecture, [*list_models(), *models])
        raise UnknownName(
            f"no model named {name!r}{hint} "
            "`vitruvius list models` shows ours; timm.list_models('*deit*') shows timm's."
        )
