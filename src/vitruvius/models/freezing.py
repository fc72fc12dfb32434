"""Freezing by glob: parameters that get no gradient, and batch norms that keep their statistics."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence

from torch.nn.modules.batchnorm import _BatchNorm

from vitruvius._errors import ConfigError
from vitruvius.models.base import PixelModel
from vitruvius.surgery.base import inner


def freeze(model: PixelModel, globs: Sequence[str]) -> PixelModel:
    """Freeze the parameters of `model` that `globs` match; returns the model.

    A glob is over names as in `named_parameters`, or of a module above; `!` before one thaws again. Later globs win.
    Batch norms whose parameters are all frozen stay in eval mode, whatever `model.train()` says.
    """
    root = inner(model)
    parameters = dict(root.named_parameters())
    names = {above for name in parameters for above in _upwards(name)}
    for glob in globs:
        if not fnmatch.filter(names, glob.removeprefix("!")):
            tops = dict.fromkeys(name.split(".")[0] for name in parameters)
            raise ConfigError(
                f"model.freeze: {glob!r} matches no parameter of {type(root).__name__}. "
                f"It has {', '.join(tops)}; a glob may go deeper, e.g. blocks.[0-5]."
            )
    frozen = {name for name in parameters if _matched(name, globs)}
    if len(frozen) == len(parameters):
        raise ConfigError(f"model.freeze = {list(globs)} leaves nothing to train. Thaw something, e.g. with '!head'.")
    for name in frozen:
        parameters[name].requires_grad_(False)
    norms = {name: module for name, module in root.named_modules() if isinstance(module, _BatchNorm)}
    still = []
    for name, norm in norms.items():
        keys = [f"{name}.{parameter}" for parameter, _ in norm.named_parameters()]
        if frozen.issuperset(keys) if keys else _matched(name, globs):
            still.append(f"model.{name}")
    model.still = tuple(still)
    return model.train(model.training)


def _matched(name: str, globs: Sequence[str]) -> bool:
    """Whether the last glob that speaks of a name, or of a module above it, freezes it."""
    for glob in reversed(globs):
        if any(fnmatch.fnmatchcase(above, glob.removeprefix("!")) for above in _upwards(name)):
            return not glob.startswith("!")
    return False


def _upwards(name: str) -> Iterator[str]:
    """a.b.c, a.b, a."""
    while name:
        yield name
        name = name.rpartition(".")[0]
