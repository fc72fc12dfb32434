"""What the verb `look` looks at: the pictures of a request, and the models side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from vitruvius._errors import VitruviusError
from vitruvius.data.naming import class_words
from vitruvius.look.looking import Variant, class_names, compare
from vitruvius.look.pictures import Picture, read_pictures
from vitruvius.request import Request
from vitruvius.targets.base import Target, open_target

OWN = ("data.", "device=", "plugins=")  # settings that are meant for every model


def pictures_of(request: Request, files: Sequence[str], images: int | None) -> list[Picture]:
    """Those in files and folders, else images of the data of the request.

    images: at most, of a folder.
    """
    if files:
        return read_pictures(files, request.model.data_config, images=images)
    batches = ((x, ids) for x, _, ids in request.loader.with_ids())
    each = itertools.chain.from_iterable(zip(x.cpu(), ids.tolist(), strict=True) for x, ids in batches)
    return [Picture(f"{request.loader.name} {number}", pixels) for pixels, number in each]


def open_variants(
    request: Request,
    pictures: Sequence[Picture],
    overrides: Sequence[str],
    *,
    beside: str | None,
    attention: Sequence[str],
    masks: Path | None,
    sparsity: float | None,
) -> list[Variant]:
    """The model of the request, another one beside it, and what is made of it, as for `look`.

    pictures: whose maps say which pairs go. overrides: settings of the first model; those of data and device are for
    the other one too.
    """
    variants = [_variant(request.target, request)]
    if beside is not None:
        other = open_target(beside, [word for word in overrides if word.startswith(OWN)], data_needed=False)
        variants.append(_variant(other, request))
    return compare(variants, pictures, attention=attention, masks=masks, sparsity=sparsity)


def _variant(target: Target, request: Request) -> Variant:
    model = target.model.to(request.process.device).eval()
    names: Sequence[str] = ()
    if target.is_run or target.own_data:
        try:
            names = class_words(target.config.data)
        except (VitruviusError, OSError):  # the data are elsewhere: their classes have numbers
            names = ()
    known = len(names) == model.num_classes
    title = target.config.model.name if target.config.model.weights == target.text else Path(target.text).name
    return Variant(title, model, names if known else class_names(model))
