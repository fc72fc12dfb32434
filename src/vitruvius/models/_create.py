"""create_model and load_model: timm's factory, then initialisation, then surgery, then pixels."""

from __future__ import annotations

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
from vitruvius._errors import CheckpointError, ConfigError, RunError, UnknownName, suggest
from vitruvius._files import StrPath, exists, is_url, join, read_text
from vitruvius._registry import load_foreign_plugins
from vitruvius._yaml import parse_value, read_yaml
from vitruvius.models._adapting import head_keys
from vitruvius.models._adapting import restride as _restride
from vitruvius.models._freezing import freeze
from vitruvius.models._pixel import PixelModel
from vitruvius.models._registry import PREFIX, models
from vitruvius.models._starting import Start, begin_low_rank, start, start_new_parts
from vitruvius.models._weights import load_weights
from vitruvius.models._wiring import Parts, wire, without_files
from vitruvius.models.config import AttentionRule, ModelConfig
from vitruvius.surgery.positions import use_sincos_positions


def create_model(
    name: str,
    *,
    pretrained: bool = False,
    attention: Parts = (),
    init: Start | None = None,
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
        made = _make(name, pretrained, timm_kwargs)
        if restride is not None:
            made = _restride(made, restride)
        model = PixelModel(made, mean=mean, std=std)
        if positions == "sincos":
            use_sincos_positions(model)
        if init is not None:
            start(model, init, seed)
        input_size = None
        if "img_size" in timm_kwargs:
            input_size = model.data_config["input_size"]
        wire(model, attention, input_size=input_size)
        begin_low_rank(model)
    return model.eval()


def create_from_config(
    config: ModelConfig, rules: Sequence[AttentionRule] = (), *, init: Start | None = None, seed: int = 0
) -> PixelModel:
    """The model a recipe describes, weights included.

    `config` is its `model:` section, `rules` its `attention:`, `init` its start (default: timm's), `seed` its seed.
    """
    settings: dict[str, Any] = {
        "attention": rules,
        "init": init,
        "positions": config.positions,
        "restride": config.restride,
    }
    settings |= {"seed": seed, "mean": config.mean, "std": config.std, **config.kwargs}
    model = create_model(config.name, pretrained=config.pretrained, **settings)
    if config.weights is not None:
        start_new_parts(model, load_weights(model, config.weights, reset_head=config.reset_head, resample=True))
    elif config.pretrained and config.reset_head:
        _renew_head(model, create_model(config.name, **settings))
    return freeze(model, config.freeze)


def _renew_head(model: PixelModel, new: PixelModel) -> None:
    """The head of a new model in place of the pretrained one."""
    start = new.model.state_dict()
    model.model.load_state_dict({key: start[key] for key in head_keys(model.model)}, strict=False)


def load_model(run: str | Path, *, best: bool = True, trust_plugins: bool = False) -> PixelModel:
    """The model of a run folder: what its config.yaml describes, with its weights.

    `run` is the folder, here or at a URL. `best` takes the best weights where there are any (the default), else the
    last ones. `trust_plugins` imports the modules that its `plugins:` names, which runs their code; by default only
    modules that are imported already or installed with an entry point are accepted.
    """
    source = str(join(run, "config.yaml"))
    if not exists(source):
        raise RunError(f"{run} is not a run folder: it has no config.yaml. `vitruvius train` makes one.")
    recipe = _read_config(source)
    load_foreign_plugins(recipe.get("plugins") or [], source=source, trust=trust_plugins)
    return restore(recipe, run, best=best)


def restore(recipe: Mapping[str, Any], run: str | Path, *, best: bool = True) -> PixelModel:
    """The model that the `recipe` of a run describes, with the weights that lie in the folder `run`.

    `best` takes the best weights where there are any (the default), else the last ones.
    """
    source = str(join(run, "config.yaml"))
    begun = {"pretrained": False, "weights": None, "reset_head": False}  # how the run began is over
    config = build(ModelConfig, {**(recipe.get("model") or {}), **begun}, source=source)
    rules = [without_files(build(AttentionRule, rule, source=source)) for rule in recipe.get("attention") or ()]
    model = create_from_config(config, rules, seed=int(recipe.get("seed", 0)))
    load_weights(model, _weights_of(run, best))
    return model


def _read_config(source: str) -> dict[str, Any]:
    """A config.yaml, here or at a URL."""
    if is_url(source):
        return dict(parse_value(read_text(source)))
    return read_yaml(source)


def _weights_of(run: str | Path, best: bool) -> StrPath:
    """The best weights of a run if they are wanted and there, else its last ones."""
    wanted = ["last"]
    if best:
        wanted.insert(0, "best")
    for name in wanted:
        file = join(run, f"{name}.safetensors")
        if exists(file):
            return file
    raise RunError(f"{run} holds no weights yet (expected {wanted[0]}.safetensors).")


def _make(name: str, pretrained: bool, timm_kwargs: Mapping[str, Any]) -> nn.Module:
    if name.startswith(PREFIX):
        if pretrained:
            raise ConfigError(f"{name!r} has no pretrained weights; start from a run with model.weights.")
        return _sized(_built(name, lambda: models[name](**timm_kwargs), timm_kwargs), timm_kwargs)
    _check_known(name)
    try:
        made = _built(name, lambda: timm.create_model(name, pretrained=pretrained, **timm_kwargs), timm_kwargs)
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        raise CheckpointError(
            f"the pretrained weights of {name!r} cannot be downloaded: {str(error).splitlines()[0]} "
            "Without a network, give a file with model.weights, or pretrained: false."
        ) from error
    return _sized(made, timm_kwargs)


def _sized(model: Any, timm_kwargs: Mapping[str, Any]) -> nn.Module:
    """Let a model that was built for another image size say so: surveys and loaders ask its configuration."""
    config = getattr(model, "pretrained_cfg", None)
    size = timm_kwargs.get("img_size")
    if size is not None and isinstance(config, Mapping) and "input_size" in config:
        model.pretrained_cfg = {**config, "input_size": (config["input_size"][0], *to_2tuple(size))}
        model.default_cfg = model.pretrained_cfg
    assert isinstance(model, nn.Module)
    return model


def _built(name: str, build: Callable[[], nn.Module], kwargs: Mapping[str, Any]) -> nn.Module:
    try:
        return build()
    except (TypeError, AssertionError, ValueError, RuntimeError) as error:
        if not kwargs or isinstance(error, UnknownName) or _is_download(error):
            raise
        raise ConfigError(f"{name!r} cannot be made with {dict(kwargs)}: {error}") from error


def _is_download(error: Exception) -> bool:
    """Whether weights could not be fetched, which is not the settings' fault; timm says so by a RuntimeError."""
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in words for word in ("download", "url", "hub", "connection"))


def _check_known(name: str) -> None:
    try:
        source, rest = parse_model_name(name)
    except ValueError as error:  # a name with a slash and no source
        raise UnknownName(f"no model named {name!r}: {error}") from error
    if source is not None and source not in ("", "timm"):
        return  # hf-hub:… and local-dir:… are resolved by timm
    architecture = split_model_name_tag(rest)[0]
    if not is_model(architecture):
        raise UnknownName(
            f"no model named {name!r}{_suggest_model(architecture)} "
            "`vitruvius list models` shows ours; timm.list_models('*deit*') shows timm's."
        )


def _suggest_model(name: str) -> str:
    """What was meant: one of ours without its prefix, or a name that is close."""
    if f"{PREFIX}{name}" in models:
        return f"; did you mean {PREFIX + name!r}?"
    return suggest(name, [*list_models(), *models])
