"""Language models: the same questions of BERT-like encoders from transformers, padding left out of every number.

Queries, keys and values are read from the three projections of each self-attention; what the model makes of them is
checked against plain attention, so rotary or relative positions and sparse patterns are refused, not misread.
B sentences, H heads, N tokens, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitruvius._checks import Progress, check_eval_mode, device_of
from vitruvius._errors import CheckpointError, ConfigError, DataError, NoSiteError, UnsuitableSite
from vitruvius._processes import Process
from vitruvius._registry import require
from vitruvius._version import __version__
from vitruvius.analysis._collect import Collector
from vitruvius.analysis._registry import Question
from vitruvius.analysis._run import NULL_IMAGES, Asked, ask_all, choose_nulls, summarise
from vitruvius.analysis._table import Table
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site

FIT = "BERT, RoBERTa (also XLM-R and CamemBERT), ELECTRA, DistilBERT, ALBERT, MiniLM and LUKE"
REASONS = {  # by transformers' model_type: why plain attention is not what it computes
    "gpt2": "it is a decoder, whose tokens see only those before them",
    "deberta": "positions enter its scores apart from queries and keys (disentangled attention)",
    "deberta-v2": "positions enter its scores apart from queries and keys (disentangled attention)",
    "mpnet": "a bias of relative positions is added to its scores",
    "t5": "a bias of relative positions is added to its scores",
    "longformer": "its tokens see a sliding window, not all others",
    "big_bird": "its tokens see a sparse pattern, not all others",
    "roformer": "rotary positions turn its queries and keys",
    "modernbert": "rotary positions turn its queries and keys",
    "convbert": "convolutions share its heads",
}
CURVES = ("log10_phi2_quantiles", "log10_h2_quantiles")  # those whose length does not depend on the sentence
OUTPUTS = ("out_lin", "dense")  # projections of the output inside the module: DistilBERT, ALBERT
PROJECTIONS = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))  # BERT and similar encoders, DistilBERT
HEAD_COUNTS = ("num_attention_heads", "n_heads")
PASS = ", pass "
Tokens = Mapping[str, Tensor]  # input_ids (B, N), attention_mask (B, N), …


class Encoder(NamedTuple):
    """A model and its tokenizer."""

    model: nn.Module
    tokenizer: Callable[..., Any]


def load_encoder(name: str) -> Encoder:
    """An encoder by its name on the hub, or from a local folder; needs the extra `nlp`.

    `name` is `bert-base-uncased`, or the path of a folder with a model and its tokenizer.
    """
    transformers: Any = require("transformers", "nlp")
    try:
        model = transformers.AutoModel.from_pretrained(name).eval()
        return Encoder(model, transformers.AutoTokenizer.from_pretrained(name))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{name!r} cannot be opened as a language model with its tokenizer: {str(error).splitlines()[0]} "
            "Expected an id on the hub, or a folder that save_pretrained has written."
        ) from error


def encode(
    tokenizer: Callable[..., Any], sentences: Sequence[str], *, max_length: int = 128, batch_size: int = 16
) -> list[Tokens]:
    """Sentences as padded batches of at most `max_length` tokens.

    tokenizer: of the model that will read them, as `load_encoder` returns it.
    sentences: one text each.
    max_length: tokens; longer sentences are cut.
    batch_size: sentences of a batch, padded to the longest of them.
    """
    parts = [list(sentences[start : start + batch_size]) for start in range(0, len(sentences), batch_size)]
    return [
        dict(tokenizer(part, padding=True, truncation=True, max_length=max_length, return_tensors="pt"))
        for part in parts
    ]


@torch.no_grad()
def analyse_text(
    model: nn.Module,
    batches: Iterable[Tokens],
    *asked: Asked,
    seed: int = 0,
    nulls: bool | Sequence[str] = True,
    null_images: int = NULL_IMAGES,
    progress: Progress | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Table:
    """Ask questions of an encoder's attention; a padded token is neither query nor key nor value.

    model: a BERT-like encoder in eval mode.
    batches: as `encode` makes them: input_ids (B, N), attention_mask (B, N) and what else the model takes.
    asked: analyses of single sites, as for `analyse`; default: norms and value_vectors.
    seed: of chance.
    nulls: compare with chance: all kinds (True), none (False), or these.
    null_images: sentences for which chance is drawn; the first ones.
    progress: called after every batch with the sentences done, how many there are, and a few words.
    facts: what else the table should say about itself.
    """
    check_eval_mode(model)
    questions = _site_questions(asked)
    chosen = choose_nulls(nulls)
    modules = attention_modules(model)
    sites = {name: _site(name, module) for name, module in modules.items()}
    collector = Collector(questions, sites, nulls=chosen, seed=seed, curves=CURVES)
    device = device_of(model)

    def see(name: str, heads: Heads) -> None:
        if name not in sites:  # a module that runs again: layers that share their weights
            first = name.partition(PASS)[0]
            sites[name] = replace(sites[first], name=name)
        collector.see(name, heads)

    done = 0
    for batch in batches:
        tokens = {key: value.to(device) for key, value in batch.items()}
        count = len(tokens["input_ids"])
        few = 0
        if chosen:
            few = min(count, max(0, null_images - done))
        collector.begin(torch.arange(done, done + count), with_nulls=few)
        with _named(model), recorded(modules, tokens.get("attention_mask"), see):
            model(**tokens)
        done += count
        if progress is not None:
            progress(done, None, "sentences")
    if not done:
        raise DataError("no sentences were given; nothing to analyse.")
    own = {"model": type(model).__name__, "data": "sentences", "seed": seed, **(facts or {}), "vitruvius": __version__}
    return summarise(collector.sums, questions, list(sites), chosen, Process(device=device), own)


def _site_questions(asked: Sequence[Asked]) -> list[Question]:
    """Questions about single sites; norms and value vectors if none is asked."""
    questions = ask_all(asked or ("norms", "value_vectors"))
    for question in questions:
        if question.of_model:
            raise ConfigError(f"{question.name!r} looks at a whole image model; ask sentences about single sites.")
    return questions


@contextmanager
def _named(model: nn.Module) -> Iterator[None]:
    """What does not fit is refused by the name of the architecture, with the reason where it is known."""
    try:
        yield
    except UnsuitableSite as error:
        raise UnsuitableSite(f"{type(model).__name__} does not fit: {_reason(model)}{error} {FIT} fit.") from error


def _reason(model: nn.Module) -> str:
    kind = getattr(getattr(model, "config", None), "model_type", "")
    if kind in REASONS:
        return f"{REASONS[kind]}. "
    return ""


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every self-attention with separate projections for queries, keys and values, by name.

    `model` is an encoder of transformers, or any module that holds one.
    """
    found = {name: m for name, m in model.named_modules() if _projections(m) is not None}
    if not found:
        known = " or ".join("/".join(names) for names in PROJECTIONS)
        raise NoSiteError(
            f"{type(model).__name__} does not fit: {_reason(model)}No attention in it has the projections {known}; "
            f"{FIT} do."
        )
    return found


@contextmanager
def recorded(
    modules: Mapping[str, nn.Module], mask: Tensor | None, see: Callable[[str, Heads], None]
) -> Iterator[None]:
    """While open, every run hands on the Heads of each module; `mask` (B, N) is 1 for real tokens.

    modules: by name, as `attention_modules` finds them.
    mask: of the batch that is run next; None if nothing is padded.
    see: called with the name of a module and its Heads, in the order in which they run; of a module that runs again
        (ALBERT's layers are one) with `NAME, pass 2` and so on.
    """
    handles: list[Any] = []
    try:
        for name, module in modules.items():
            handles += _watch(name, module, mask, see)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _watch(name: str, module: nn.Module, mask: Tensor | None, see: Callable[[str, Heads], None]) -> list[Any]:
    seen: dict[str, Tensor] = {}
    passes: list[str] = []
    names = _projections(module)
    assert names is not None
    keep = [
        getattr(module, projection).register_forward_hook(lambda _, __, out, own=own: seen.__setitem__(own, out))
        for own, projection in zip("qkv", names, strict=True)
    ]

    def look(_: nn.Module, __: Any, out: Any) -> None:
        heads = _heads(module, seen, mask)
        made: Tensor
        if isinstance(out, tuple):
            made = out[0]
        else:
            made = out
        _check(name, heads, mask, seen.get("context", made))
        passes.append(name)
        if len(passes) > 1:
            see(f"{name}{PASS}{len(passes)}", heads)
        else:
            see(name, heads)

    for last in OUTPUTS:
        if _is_linear(module, last):
            output = getattr(module, last)
            keep.append(output.register_forward_pre_hook(lambda _, args: seen.__setitem__("context", args[0])))
    return [*keep, module.register_forward_hook(look)]


def _heads(module: nn.Module, seen: Mapping[str, Tensor], mask: Tensor | None) -> Heads:
    count = _head_count(module)
    q, k, v = (seen[own].unflatten(-1, (count, -1)).transpose(1, 2) for own in "qkv")  # (B, H, N, D)
    bias = None
    if mask is not None:
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask == 0, -torch.inf)[:, None, None]
    return Heads(q, k, v, bias, q.shape[-1] ** -0.5)


def _check(name: str, heads: Heads, mask: Tensor | None, context: Tensor) -> None:
    """What the module made of these heads must be plain attention."""
    expected = attend(heads).transpose(1, 2).flatten(2)
    if mask is None:
        real = torch.ones_like(context[..., 0], dtype=torch.bool)
    else:
        real = mask.bool()
    same = expected.shape == context.shape
    if not same or not torch.allclose(expected[real], context[real], rtol=1e-3, atol=1e-4):
        raise UnsuitableSite(
            f"{name!r} does not attend by softmax(q kᵀ/√D) v alone (rotary or relative positions, a causal or sparse "
            "pattern?); its numbers would be misread."
        )


def _projections(module: nn.Module) -> tuple[str, str, str] | None:
    counted = any(hasattr(module, name) for name in HEAD_COUNTS)
    return next((own for own in PROJECTIONS if counted and all(_is_linear(module, name) for name in own)), None)


def _is_linear(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(module, name, None), nn.Linear)


def _head_count(module: nn.Module) -> int:
    return int(next(getattr(module, name) for name in HEAD_COUNTS if hasattr(module, name)))


def _site(name: str, module: nn.Module) -> Site:
    names, heads = _projections(module), _head_count(module)
    assert names is not None
    query, value = getattr(module, names[0]), getattr(module, names[2])
    return Site(
        name=name,
        family="text",
        attends="tokens",
        num_heads=heads,
        num_queries=0,
        num_keys=0,
        key_dim=query.out_features // heads,
        value_dim=value.out_features // heads,
        dim=query.in_features,
    )
