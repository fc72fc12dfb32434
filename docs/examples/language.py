"""The analyses of attention for BERT-like encoders from transformers, padding left out of every number.

    python docs/examples/language.py google-bert/bert-base-uncased wikitext --sentences 100 --out bert
    python docs/examples/language.py my/encoder sentences.txt --analysis norms --analysis entropy
    vitruvius report bert --out bert.html

Needs `pip install transformers`, and `datasets` for WikiText-103 (its test split without headings, as in the
reproduction study, arXiv:2505.07908); any other text is a file with one sentence per line. Queries, keys and values are
read from the three projections of each self-attention. What a layer makes of them is compared with plain attention, so
that decoders, rotary or relative positions and sparse patterns are refused, not misread.

B sentences, H heads, N tokens
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from vitruvius.analysis import Table
from vitruvius.analysis.analysing import ask_all
from vitruvius.analysis.base import NULLS
from vitruvius.analysis.collecting import Collector
from vitruvius.attention.softmax import attend
from vitruvius.heads import Heads, Site
from vitruvius.report.analysis_figures import save_figures

CURVES = ("log10_phi2_quantiles", "log10_h2_quantiles")  # those whose length does not depend on the sentence
PROJECTIONS = (("query", "key", "value"), ("q_lin", "k_lin", "v_lin"))  # BERT and similar encoders, DistilBERT
OUTPUTS = ("out_lin", "dense")  # projections of the output inside the module: DistilBERT, ALBERT
HEAD_COUNTS = ("num_attention_heads", "n_heads")
SHORTEST = 30  # characters: shorter lines of WikiText are headings and blanks
See = Callable[[str, Heads], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="an id on the hub, or a folder that save_pretrained has written")
    parser.add_argument("text", help="a file with one sentence per line, or wikitext")
    parser.add_argument("--analysis", action="append", help="default: norms and value_vectors")
    parser.add_argument("--sentences", type=int, default=100, help="a random choice of so many (default: %(default)s)")
    parser.add_argument("--max-length", type=int, default=128, help="tokens; longer sentences are cut")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sentences and chance")
    parser.add_argument("--out", type=Path, help="folder for table and figures")
    options = parser.parse_args()
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModel.from_pretrained(options.model).eval()
    sentences = choose(read_sentences(options.text), options.sentences, options.seed)
    batches = [
        tokenizer(part, padding=True, truncation=True, max_length=options.max_length, return_tensors="pt")
        for part in (sentences[start : start + 16] for start in range(0, len(sentences), 16))
    ]
    facts = {"model": options.model, "data": options.text}
    table = analyse_text(model, batches, *(options.analysis or ()), seed=options.seed, facts=facts)
    print(table)
    if options.out is not None:
        table.save(options.out)
        save_figures(table, options.out)
        (options.out / "config.yaml").write_text(yaml.safe_dump({"model": {"name": options.model}}))


def read_sentences(text: str) -> list[str]:
    """The sentences of a file, one per line, or of WikiText-103."""
    if text != "wikitext":
        return [line.strip() for line in Path(text).read_text(encoding="utf-8").splitlines() if line.strip()]
    from datasets import load_dataset

    lines = load_dataset("Salesforce/wikitext", "wikitext-103-raw-v1", split="test")["text"]
    return [line.strip() for line in lines if len(line.strip()) > SHORTEST]


def choose(sentences: Sequence[str], count: int, seed: int) -> list[str]:
    """At most `count` of the sentences, in their order."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randperm(len(sentences), generator=generator)[:count].sort().values
    return [sentences[place] for place in places.tolist()]


@torch.no_grad()
def analyse_text(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    *asked: str,
    seed: int = 0,
    nulls: Sequence[str] = tuple(NULLS),
    null_sentences: int = 12,
    facts: Mapping[str, Any] | None = None,
) -> Table:
    """Ask questions of an encoder's attention; a padded token is neither query nor key nor value.

    model: in eval mode.
    batches: of input_ids (B, N), attention_mask (B, N) and what else the model takes.
    asked: analyses of single sites; default: norms and value_vectors.
    """
    modules = attention_modules(model)
    sites = {name: describe_site(name, module) for name, module in modules.items()}
    collector = Collector(ask_all(asked or ("norms", "value_vectors")), sites, nulls=nulls, seed=seed, curves=CURVES)

    def see(name: str, heads: Heads) -> None:
        if name not in sites:  # a module that runs again: layers that share their weights
            sites[name] = replace(sites[name.partition(", pass ")[0]], name=name)
        collector.see(name, heads)

    done = 0
    for tokens in batches:
        count = len(tokens["input_ids"])
        few = min(count, max(0, null_sentences - done)) if nulls else 0
        collector.begin(torch.arange(done, done + count), with_nulls=few)
        with recorded(modules, tokens.get("attention_mask"), see):
            model(**tokens)
        collector.end()
        done += count
    return collector.table(facts={"seed": seed, **(facts or {})})


def attention_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every self-attention with separate projections for queries, keys and values, by name."""
    modules = {name: module for name, module in model.named_modules() if projections(module)}
    if not modules:
        raise ValueError(
            f"{type(model).__name__} does not fit: no attention with query/key/value or q_lin/k_lin/v_lin."
        )
    return modules


def projections(module: nn.Module) -> tuple[str, ...]:
    if not any(hasattr(module, name) for name in HEAD_COUNTS):
        return ()
    linear = [names for names in PROJECTIONS if all(is_linear(module, name) for name in names)]
    return linear[0] if linear else ()


def is_linear(module: nn.Module, name: str) -> bool:
    return isinstance(getattr(module, name, None), nn.Linear)


def describe_site(name: str, module: nn.Module) -> Site:
    heads = head_count(module)
    query, _, value = (getattr(module, projection) for projection in projections(module))
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


def head_count(module: nn.Module) -> int:
    return int(next(getattr(module, name) for name in HEAD_COUNTS if hasattr(module, name)))


@contextmanager
def recorded(modules: Mapping[str, nn.Module], mask: Tensor | None, see: See) -> Iterator[None]:
    """While open, every run hands the Heads of each module to `see`; `mask` (B, N) is 1 for real tokens.

    A module that runs again (ALBERT's layers are one) is called `NAME, pass 2` and so on.
    """
    handles: list[Any] = []
    try:
        for name, module in modules.items():
            handles += watch(name, module, mask, see)
        yield
    finally:
        for handle in handles:
            handle.remove()


def watch(name: str, module: nn.Module, mask: Tensor | None, see: See) -> list[Any]:
    outputs: dict[str, Tensor] = {}
    passes: list[str] = []
    handles = [
        getattr(module, projection).register_forward_hook(lambda _, __, out, key=key: outputs.__setitem__(key, out))
        for key, projection in zip("qkv", projections(module), strict=True)
    ]
    for last in filter(lambda last: is_linear(module, last), OUTPUTS):
        keep = lambda _, args: outputs.__setitem__("context", args[0])  # noqa: E731
        handles.append(getattr(module, last).register_forward_pre_hook(keep))

    def look(_: nn.Module, __: Any, out: Any) -> None:
        q, k, v = (
            outputs[key].unflatten(-1, (head_count(module), -1)).transpose(1, 2) for key in "qkv"
        )  # (B, H, N, D)
        bias = None
        if mask is not None:
            bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask == 0, -torch.inf)[:, None, None]
        heads = Heads(q, k, v, bias, q.shape[-1] ** -0.5)
        check_plain(name, heads, mask, outputs.get("context", out[0] if isinstance(out, tuple) else out))
        passes.append(name)
        see(name if len(passes) == 1 else f"{name}, pass {len(passes)}", heads)

    return [*handles, module.register_forward_hook(look)]


def check_plain(name: str, heads: Heads, mask: Tensor | None, context: Tensor) -> None:
    """What the module made of these heads must be plain attention."""
    expected = attend(heads).transpose(1, 2).flatten(2)
    real = torch.ones_like(context[..., 0], dtype=torch.bool) if mask is None else mask.bool()
    if expected.shape != context.shape or not torch.allclose(expected[real], context[real], rtol=1e-3, atol=1e-4):
        raise ValueError(f"{name!r} does not attend by softmax(q kᵀ/√D) v alone; its numbers would be misread.")


if __name__ == "__main__":
    main()
