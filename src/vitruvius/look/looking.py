"""Where a model looks on pictures: the true map of every layer and head, rollout, explanations, and the best classes.

Maps are taken layer by layer while the model runs, and kept in 16 bits.
W windows of an image (1 where there are none), H heads, N queries, M keys
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitruvius._checks import check_logits, check_model, device_of, in_eval_mode
from vitruvius._errors import ConfigError, MissingExtra, NoSiteError, UnsuitableSite, VitruviusError, suggest
from vitruvius._imagenet import NUM_CLASSES, imagenet_classes
from vitruvius._notebook import Records, Shown
from vitruvius._progress import Progress, no_progress, part_of, scaled
from vitruvius._registry import Spec
from vitruvius.analysis.base import normalised
from vitruvius.analysis.explanations import explanations, relevance
from vitruvius.analysis.recording import survey_if_any
from vitruvius.analysis.rollout import Rollout
from vitruvius.attacks.base import disturb
from vitruvius.attention.base import Core, part
from vitruvius.attention.mask import Mask
from vitruvius.compression import average_maps, load_masks, make_masks
from vitruvius.data.base import class_words
from vitruvius.data.classes import in_words
from vitruvius.evaluation.threats import Threat, describe, make_threat
from vitruvius.heads import Heads, Site
from vitruvius.look.pictures import Picture, read_pictures
from vitruvius.models import PixelModel
from vitruvius.surgery import record, restore, rewire
from vitruvius.surgery.base import inner
from vitruvius.surgery.recording import core_of, map_of
from vitruvius.surgery.rewiring import plug
from vitruvius.surgery.sites import match
from vitruvius.targets.base import Target, open_target

BEST = 5  # classes that are named, and whose relevance is shown
STEPS = 20  # of integrated gradients
AT_ONCE = 64_000_000  # numbers in the maps of all layers for which relevance of several classes is found at once
Kind = Literal["tokens", "windows", "matrix"]


class Packed(NamedTuple):
    """Numbers in 16 bits, evenly spaced from the lowest to the highest: of those in [0, 1] none is off by 1e-5."""

    codes: np.ndarray  # uint16
    low: float
    high: float

    @classmethod
    def of(cls, values: Tensor) -> Packed:
        low, high = min(0.0, float(values.min())), max(float(values.max()), 1e-12)
        codes = ((values.float() - low) * (65535 / (high - low))).round()
        return cls(codes.cpu().numpy().astype(np.uint16), low, high)

    def numpy(self) -> np.ndarray:
        return (self.codes.astype(np.float32) * np.float32((self.high - self.low) / 65535)) + np.float32(self.low)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What one attention site did on one picture, and where its tokens lie."""

    name: str
    core: str  # softmax, rpc → softmax, …
    kind: Kind  # over the patches of the picture, inside windows of it, or over items that have no place on it
    packed: Packed  # (W, H, N, M)
    grid: tuple[int, int] | None = None  # rows and columns of patches
    prefix: tuple[str, ...] = ()  # class token, register 1, …
    answering: int = 0  # the token the head reads; -1: the mean of patches
    window: tuple[int, int] = (0, 0)  # rows and columns of patches in a window
    shift: tuple[int, int] = (0, 0)  # by which windows begin later

    @property
    def maps(self) -> np.ndarray:
        """The weights given to the values, (H, N, M); (W, H, N, M) of windows."""
        values = self.packed.numpy()
        return values if self.kind == "windows" else values[0]

    @property
    def num_heads(self) -> int:
        return self.packed.codes.shape[1]

    def over(self, head: int | None = None) -> np.ndarray:
        """(rows, columns): where the token that answers looks, or the patches on average; of one head or all."""
        assert self.grid is not None
        maps = self.packed.numpy()
        chosen = maps.mean(1) if head is None else maps[:, head]  # (W, N, M)
        if self.kind == "windows":
            return self.in_windows(chosen.mean(1))
        first = len(self.prefix)
        rows = chosen[0, self.answering : self.answering + 1] if self.answering >= 0 else chosen[0, first:]
        return rows.mean(0)[first:].reshape(self.grid)

    def in_windows(self, values: np.ndarray) -> np.ndarray:
        """(W, M) by window → (rows, columns) of the picture."""
        assert self.grid is not None
        rows, columns = self.grid
        high, wide = self.window
        y = (np.arange(rows)[:, None] - self.shift[0]) % rows
        x = (np.arange(columns)[None] - self.shift[1]) % columns
        return values[(y // high) * -(-columns // wide) + x // wide, (y % high) * wide + x % wide]


class Answer(NamedTuple):
    """A class, and how likely the model finds it."""

    name: str
    number: int
    probability: float


@dataclass(frozen=True, kw_only=True)
class View:
    """One picture, clean or disturbed, as one model sees it."""

    picture: str
    model: str
    threat: str  # empty where it is clean
    pixels: Tensor  # (C, h, w), what went in
    layers: tuple[Layer, ...]
    answers: tuple[Answer, ...]  # the best first; none of a model without a head
    rollout: np.ndarray | None = None  # (rows, columns)
    relevance: Mapping[str, np.ndarray] = field(default_factory=dict)  # by the name of the class
    gradients: Mapping[str, np.ndarray] = field(default_factory=dict)  # integrated, (h, w)
    notes: tuple[str, ...] = ()  # what could not be shown, and why

    @property
    def title(self) -> str:
        return f"{self.model}, {self.threat}" if self.threat else self.model

    def layer(self, name: str | int) -> Layer:
        """By name, or by number from 0; -1 is the last."""
        if isinstance(name, int) and -len(self.layers) <= name < len(self.layers):
            return self.layers[name]
        known = [layer.name for layer in self.layers]
        if name not in known:
            raise ConfigError(f"no layer {name!r}{suggest(str(name), known)} Layers: {', '.join(known) or 'none'}.")
        return self.layers[known.index(str(name))]


@dataclass(frozen=True, kw_only=True, repr=False)
class Look(Shown):
    """What `look` found: views in order of pictures, models, clean before attacked.

    A row of its frame is a patch: the weight that a head of a layer gives it, as `Layer.over` says.
    """

    title: str
    views: tuple[View, ...]

    def save(self, path: str | Path) -> Path:
        """Write the page, one file that needs no network, to `path`."""
        from vitruvius._files import atomic_write_text
        from vitruvius.look.page import render

        atomic_write_text(Path(path), render(self))
        return Path(path)

    def plot(self, layer: str | int = -1, head: int | None = None) -> Any:  # type: ignore[override]
        """The pictures under what they attend to, in a figure of pyplot; its axes, (views, methods).

        layer: by name or number. head: default: the mean of all.
        """
        from matplotlib import pyplot

        from vitruvius.look.figures import draw_overview

        return draw_overview(self.views, layer, head, pyplot.figure)[1]

    def save_figures(self, folder: str | Path) -> list[Path]:
        """Write figures for a paper into `folder`, PNG and PDF: an overview, and all heads of the last layer."""
        from vitruvius.look.figures import save_figures

        return save_figures(self, Path(folder))

    def __str__(self) -> str:
        """The best classes of every view, and what could not be shown."""
        lines = []
        for view in self.views:
            best = ", ".join(f"{answer.name} {100 * answer.probability:.1f} %" for answer in view.answers)
            lines.append(f"{view.picture} · {view.title}: {best or 'no head, so no classes'}")
        notes = dict.fromkeys(note for view in self.views for note in view.notes)
        return "\n".join([*lines, *notes])

    def _title(self) -> str:
        return f"{self.title}, {len(self.views)} views"

    def _records(self) -> Records:
        named = ("picture", "model", "threat")
        return [
            {**{key: getattr(view, key) for key in named}, "layer": layer.name, "head": head, "row": y, "column": x,
             "weight": float(weight)}
            for view in self.views
            for layer in view.layers if layer.kind != "matrix"
            for head in range(layer.num_heads)
            for (y, x), weight in np.ndenumerate(layer.over(head))
        ]  # fmt: skip

    def _repr_html_(self) -> str:
        from html import escape

        from vitruvius.look.page import render

        return f'<iframe srcdoc="{escape(render(self))}" style="width:100%;height:52rem;border:0"></iframe>'


class Variant(NamedTuple):
    """A model to look at, and what it is called."""

    title: str
    model: nn.Module
    names: Sequence[str]  # of its classes


def look(
    model: str | Path | nn.Module,
    image: Any = (),
    *,
    threat: Spec | Threat | None = None,
    attention: Sequence[Spec] | Spec = (),
    masks: str | Path | None = None,
    sparsity: float | None = None,
    beside: str | Path | nn.Module | None = None,
    of_class: str | int | None = None,
    names: Sequence[str] = (),
    progress: Progress = no_progress,
) -> Look:
    """Where a model looks on pictures: true maps of every layer and head, rollout, explanations, best classes.

    model: whatever names a model on the command line, or a module: a timm model or classifier of transformers, rewired
        or plain. It is left as it was. image: a file, a folder, a PIL image, pixels (C, h, w) or (n, C, h, w) in
        [0, 1] that are cropped already, or a list of these. threat: disturbs each picture, shown beside the clean one.
        attention: what to put in the place of the model's, trained or not, one model beside the other; of a single one
        the model as it is stands beside it. masks: a file of `vitruvius masks`; sparsity: a share of pairs that goes,
        those with the least attention on these pictures; both show the pruned model beside. beside: another model.
        of_class: what integrated gradients and relevance are about, by name or number (default: integrated gradients
        of the model's answer, relevance of the five best). names: of the classes, by number (default: those of a run's
        own data, ImageNet's for 1,000). progress: told how many views are done.
    """
    variants = [_variant(each, names) for each in ([model] if beside is None else [model, beside])]
    sources = image if isinstance(image, list | tuple) else [image]
    pictures = read_pictures(sources, variants[0].model.data_config)
    variants = compare(variants, pictures, attention=attention, masks=masks, sparsity=sparsity)
    return look_at(variants, pictures, threat=threat, of_class=of_class, progress=progress)


def variant_of(target: Target, device: torch.device) -> Variant:
    """What names a model elsewhere, to look at: its classes are called as in the data it was trained on."""
    model = target.model.to(device).eval()
    names: Sequence[str] = ()
    if target.is_run or target.own_data:
        with suppress(VitruviusError, OSError):  # the data are elsewhere: their classes have numbers
            names = class_words(target.config.data)
    title = target.config.model.name if target.config.model.weights == target.text else Path(target.text).name
    return Variant(title, model, names if len(names) == model.num_classes else class_names(model))


def look_at(
    variants: Sequence[Variant],
    pictures: Sequence[Picture],
    *,
    threat: Spec | Threat | None = None,
    of_class: str | int | None = None,
    gradients: bool = True,
    progress: Progress = no_progress,
) -> Look:
    """Every picture through every model, clean and under the threat.

    variants and pictures: as `compare` and `read_pictures` make them. gradients: also the integrated ones, which take
    as many passes as all else together. The rest is as for `look`.
    """
    attack = None if threat is None else make_threat(threat, where="--threat")
    for variant in variants:
        _check_question(variant, attack, of_class)
    total = len(variants) * len(pictures) * (1 if attack is None else 2)
    views: list[View] = []

    def see(variant: Variant, picture: Picture, pixels: Tensor, threat: str = "") -> None:
        progress(len(views), total, f"{picture.name}, {variant.title}")
        views.append(_see(variant, picture.name, pixels, threat, of_class, gradients))

    for place, picture in enumerate(pictures):
        for variant in variants:
            x = picture.pixels[None].to(device_of(variant.model))
            with in_eval_mode(variant.model):
                see(variant, picture, x)
                if attack is not None:
                    told = part_of(scaled(progress, 1), len(views), total - len(views) - 1, describe(attack))
                    ids = torch.tensor([place])
                    see(variant, picture, _attacked(attack, variant.model, x, ids, told), describe(attack))
    progress(total, total, "")
    shown = " · ".join(dict.fromkeys(variant.title for variant in variants))
    return Look(
        title=f"{shown} on {pictures[0].name if len(pictures) == 1 else f'{len(pictures)} pictures'}",
        views=tuple(views),
    )


def compare(
    variants: Sequence[Variant],
    pictures: Sequence[Picture],
    *,
    attention: Sequence[Spec] | Spec = (),
    masks: str | Path | None = None,
    sparsity: float | None = None,
) -> list[Variant]:
    """The models to look at: as they are, with other attentions, pruned; the first of `variants` is what is changed.

    pictures: whose maps say which pairs go. attention, masks, sparsity: as for `look`.
    """
    first, *others = variants
    specs = [attention] if isinstance(attention, str | Mapping) else list(attention)
    for spec in specs:
        part(spec, where="--attention")
    shown = [first] if len(specs) < 2 else []
    for spec in specs:
        title = spec if isinstance(spec, str) else str(getattr(spec, "__name__", spec))
        shown.append(Variant(title, with_attention(first.model, spec), first.names))
    if masks is not None and sparsity is not None:
        raise ConfigError("--masks and --sparsity both say which pairs go; give one of them.")
    if masks is not None:
        pruned = with_masks(first.model, load_masks(masks).keep)
        shown.append(Variant(f"{first.title}, {Path(masks).name}", pruned, first.names))
    elif sparsity is not None:
        batch = torch.stack([picture.pixels for picture in pictures]).to(device_of(first.model))
        with in_eval_mode(first.model):
            maps = average_maps(first.model, [(batch, torch.zeros(len(batch), dtype=torch.int64))])
        on_cpu = {name: map_.cpu() for name, map_ in maps.items()}
        made = make_masks(on_cpu, sparsity=sparsity, sites=survey_if_any(first.model))
        pruned = with_masks(first.model, made.keep)
        shown.append(Variant(f"{first.title}, {100 * sparsity:g} % pruned", pruned, first.names))
    return [*shown, *others]


def with_attention(model: nn.Module, spec: Spec) -> nn.Module:
    """A copy with another attention at every site; new parameters begin as they would in training, from seed 0."""
    copied = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return rewire(restore(copied), spec)


def with_masks(model: nn.Module, keep: Mapping[str, Tensor]) -> nn.Module:
    """A copy whose cores keep only the pairs (H, N, M) that are True in `keep`, by site."""
    sites = survey_if_any(model)
    copied = copy.deepcopy(model)
    modules = {name: inner(copied).get_submodule(name) for name in match(copied, list(sites), list(keep))}
    cores = {}
    for name in modules:
        old = core_of(copied, name)
        parts = [("softmax", part("softmax")(sites[name]))] if old is None else list(old.parts.items())
        mask = ("mask", Mask(sites[name], keep=keep[name].cpu()))
        cores[name] = Core([mask, *(item for item in parts if item[0] != "mask")], sites[name])
    plug(modules, cores)
    return copied


def class_names(model: nn.Module, names: Sequence[str] = ()) -> Sequence[str]:
    """What its classes are called: as given, as its configuration says, or ImageNet's where there are 1,000."""
    root: Any = inner(model)
    number = int(getattr(root, "num_classes", 0) or 0)
    if names:
        return list(names)
    labels = getattr(getattr(getattr(root, "network", root), "config", None), "id2label", None)  # of transformers
    if isinstance(labels, Mapping):
        return [str(labels.get(place, place)) for place in range(number)]
    return in_words(imagenet_classes()) if number == NUM_CLASSES else ()


def moved(before: Layer, after: Layer) -> float:
    """How much attention moved between two views of a layer: the mean over heads and queries of ½ Σ |a − b|."""
    return float(np.abs(after.packed.numpy() - before.packed.numpy()).sum(-1).mean() / 2)


def _variant(model: str | Path | nn.Module, names: Sequence[str]) -> Variant:
    if isinstance(model, str | Path):
        target = open_target(str(model), data_needed=False)
        found = variant_of(target, device_of(target.model))
        return found._replace(names=list(names)) if names else found
    made = as_pixel_model(model)
    return Variant(type(inner(model)).__name__, made, class_names(made, names))


def as_pixel_model(model: nn.Module) -> nn.Module:
    """As images in [0, 1] go in: wrapped, if it is timm's own or a classifier of transformers."""
    check_model(model)
    if isinstance(model, PixelModel):
        return model
    training = model.training
    if hasattr(getattr(model, "config", None), "num_labels"):
        from vitruvius.targets.hugging_face import Classifier

        config: Any = model.config
        size = config.image_size if isinstance(config.image_size, Sequence) else (config.image_size,) * 2
        halves = (0.5,) * int(config.num_channels)
        model = Classifier(model, {"input_size": (len(halves), *size), "mean": halves, "std": halves})
    return PixelModel(model).train(training)


def has_head(model: nn.Module) -> bool:
    """Whether it answers with classes; without one it returns features."""
    return bool(getattr(inner(model), "num_classes", 1))


def class_number(variant: Variant, wanted: str | int) -> int:
    """The number of a class that somebody named, by its name, one of its words, or its number."""
    names = [name.lower() for name in variant.names]
    number = int(getattr(inner(variant.model), "num_classes", len(names)))
    text = str(wanted).strip().lower()
    if text in names:
        return names.index(text)
    if text.isdigit() and int(text) < number:
        return int(text)
    raise ConfigError(f"no class {wanted!r}{suggest(text, names)} {variant.title} has {number}, numbered from 0.")


def _check_question(variant: Variant, attack: Threat | None, of_class: str | int | None) -> None:
    """Refuse what a model without a head cannot answer, and a class it does not have, before anything runs."""
    if has_head(variant.model):
        if of_class is not None:
            class_number(variant, of_class)
    elif of_class is not None or (attack is not None and not hasattr(attack, "severity")):
        asked = "--class" if of_class is not None else "this threat"
        raise ConfigError(
            f"{variant.title} has no head, so it answers with features and no class; {asked} needs one. "
            "Corruptions such as fog:severity=3 need none."
        )


def _attacked(attack: Threat, model: nn.Module, x: Tensor, ids: Tensor, progress: Progress) -> Tensor:
    """x' (1, C, h, w), led away from what the model answers."""
    with torch.no_grad():
        answers = model(x).argmax(-1) if has_head(model) else torch.zeros(len(x), dtype=torch.int64, device=x.device)
    return disturb(attack, model, x, answers, ids, progress).detach()


def _see(variant: Variant, picture: str, x: Tensor, threat: str, of_class: str | int | None, gradients: bool) -> View:
    model, names = variant.model, variant.names
    sites = survey_if_any(model)
    notes: list[str] = [] if sites else [f"no maps: {variant.title} has no attention that can be shown."]
    layers, rollout, output = _attend(model, x, sites, notes)
    shown: dict[str, Any] = {"answers": ()}
    if has_head(model):
        check_logits(output, len(x))
        best = output[0].float().softmax(-1).topk(min(BEST, output.shape[1]))
        likely = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        shown["answers"] = tuple(Answer(_name(number, names), number, share) for number, share in likely)
        asked = [answer.number for answer in shown["answers"]]
        asked = asked if of_class is None else [class_number(variant, of_class)]
        shown["relevance"] = _relevance(model, x, asked, names, sites, notes) if sites else {}
        shown["gradients"] = _gradients(model, x, asked[0], names, notes) if gradients else {}
    else:
        notes.append("no classes, and no relevance or integrated gradients for one: the model has no head.")
    shown |= {"rollout": rollout, "notes": tuple(dict.fromkeys(notes))}
    return View(picture=picture, model=variant.title, threat=threat, pixels=x[0].cpu(), layers=tuple(layers), **shown)


@torch.no_grad()
def _attend(
    model: nn.Module, x: Tensor, sites: Mapping[str, Site], notes: list[str]
) -> tuple[list[Layer], np.ndarray | None, Tensor]:
    """The layers of one image, its rollout if it can be followed, and what the model puts out."""
    layers: list[Layer] = []
    follow: Rollout | None = Rollout()

    def note(name: str, heads: Heads) -> None:
        nonlocal follow
        try:
            weights = map_of(model, name, heads)
            layers.append(_layer(model, sites[name], weights))
        except UnsuitableSite as error:
            notes.append(str(error))
            follow = None
        try:
            if follow is not None:
                follow.follow(sites[name], normalised(weights))
        except UnsuitableSite:
            follow = None

    if not sites:
        return [], None, model(x)
    with record(model, sites=sites, on_heads=note):
        output = model(x)
    grid = next((layer.grid for layer in layers if layer.kind == "tokens"), None)
    if follow is None or follow.flow is None or grid is None:
        notes.append("no rollout: attention cannot be followed from layer to layer over the same patches.")
        return layers, None, output
    return layers, follow.result()["map"][0].view(grid).cpu().numpy(), output


def _layer(model: nn.Module, site: Site, weights: Tensor) -> Layer:
    """One site's map and where its tokens lie; an UnsuitableSite where it has no place in a page."""
    core = core_of(model, site.name)
    shared: dict[str, Any] = {"name": site.name, "core": "softmax" if core is None else core.describe()}
    shared["packed"] = Packed.of(weights)
    if site.attends == "windows":
        return _windows(inner(model), site, weights, shared)
    queries, keys = weights.shape[-2:]  # fewer than the site says where tokens were merged
    patches = site.grid is not None and keys == site.num_prefix_tokens + math.prod(site.grid)
    if patches and (site.attends == "class" or queries == keys):
        prefix = _prefix_names(inner(model), site.num_prefix_tokens)
        answering = 0 if site.attends == "class" or (site.num_prefix_tokens and site.num_answering) else -1
        return Layer(kind="tokens", grid=site.grid, prefix=prefix, answering=answering, **shared)
    return Layer(kind="matrix", **shared)


def _windows(root: Any, site: Site, weights: Tensor, shared: dict[str, Any]) -> Layer:
    block: Any = root.get_submodule(site.name.rpartition(".")[0])
    size = getattr(block, "input_resolution", None) or getattr(block, "feat_size", None)
    shift = getattr(block, "shift_size", None)
    grid = None if size is None else (int(size[0]), int(size[1]))
    if grid is None or shift is None or site.grid is None:
        raise UnsuitableSite(
            f"{site.name} attends in windows that do not say where they lie on the picture; it is left out."
        )
    across = math.prod(math.ceil(side / step) for side, step in zip(grid, site.grid, strict=True))
    if across != len(weights):
        raise UnsuitableSite(
            f"{site.name} attends in {len(weights)} windows, {across} would cover the picture; it is left out."
        )
    shared["shift"] = (int(shift[0]), int(shift[1]))
    return Layer(kind="windows", grid=grid, window=site.grid, answering=-1, **shared)


def _prefix_names(root: Any, count: int) -> tuple[str, ...]:
    """Tokens before the patches: those that may answer, then registers, as timm and transformers order them."""
    config = getattr(getattr(root, "network", None), "config", None)
    registers = getattr(root, "num_reg_tokens", None) or getattr(config, "num_register_tokens", None) or 0
    plain = ("class token", "distillation token")[: max(0, count - int(registers))]
    return (*plain, *(f"register {number + 1}" for number in range(count - len(plain))))


def _name(number: int, names: Sequence[str]) -> str:
    return names[number] if number < len(names) else f"class {number}"


def _relevance(
    model: nn.Module, x: Tensor, classes: list[int], names: Sequence[str], sites: Mapping[str, Site], notes: list[str]
) -> dict[str, np.ndarray]:
    """Of each class, (rows, columns); all classes in one pass where their maps fit into memory."""
    numbers = sum(site.num_heads * site.num_queries * site.num_keys for site in sites.values())
    step = max(1, AT_ONCE // max(numbers, 1))
    found: dict[str, np.ndarray] = {}
    try:
        for first in range(0, len(classes), step):
            some = classes[first : first + step]
            maps = relevance(model, x.expand(len(some), -1, -1, -1), torch.tensor(some, device=x.device), sites)
            shown = maps.detach().float().cpu().numpy()
            found |= {_name(number, names): map_ for number, map_ in zip(some, shown, strict=True)}
    except (UnsuitableSite, NoSiteError) as error:
        notes.append(f"no relevance: {error}")
    return found


def _gradients(
    model: nn.Module, x: Tensor, number: int, names: Sequence[str], notes: list[str]
) -> dict[str, np.ndarray]:
    explain: Callable[..., Tensor] = explanations["integrated_gradients"]
    try:
        maps = explain(model, x, torch.tensor([number], device=x.device), steps=STEPS)
    except MissingExtra as error:
        notes.append(f"no integrated gradients: {error}")
        return {}
    return {_name(number, names): maps[0].float().cpu().numpy()}
