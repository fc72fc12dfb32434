"""The example of language models: heads read from an encoder, padding left out, what is not plain attention refused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitruvius.analysis import Table
from vitruvius.analysis.norms import norms
from vitruvius.heads import Heads

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "language.py"
spec = importlib.util.spec_from_file_location("language", SCRIPT)
assert spec is not None
assert spec.loader is not None
language: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(language)


class SelfAttention(nn.Module):
    """As BERT's: three projections, padding hidden by a bias; `causal` as a decoder's."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.num_attention_heads, self.causal = 4, causal
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor]:
        q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.query, self.key, self.value))
        bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(mask == 0, -torch.inf)[:, None, None]
        if self.causal:
            bias = bias + torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        return (((q @ k.mT * 8**-0.5 + bias).softmax(-1) @ v).transpose(1, 2).flatten(2),)


class Encoder(nn.Module):
    """Two layers; where they are `shared`, one that runs twice."""

    def __init__(self, *, shared: bool = False, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(60, 32)
        self.layers = nn.ModuleList(SelfAttention(causal) for _ in range(1 if shared else 2))
        self.order = [0, 0] if shared else [0, 1]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.words(input_ids)
        for place in self.order:
            x = x + self.layers[place](x, attention_mask)[0]
        return x


def sentences(*lengths: int) -> dict[str, Tensor]:
    mask = torch.stack([torch.arange(max(lengths)) < length for length in lengths]).long()
    ids = torch.randint(2, 60, mask.shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * mask, "attention_mask": mask}


def test_heads_are_what_the_layer_attends_with_and_their_width_comes_from_the_model() -> None:
    model, tokens = Encoder().eval(), sentences(10)
    seen: dict[str, Heads] = {}
    with language.recorded(language.attention_modules(model), None, seen.__setitem__), torch.no_grad():
        model(**tokens)
    assert list(seen) == ["layers.0", "layers.1"]
    assert seen["layers.0"].scale == pytest.approx(8**-0.5)
    table = language.analyse_text(model, [tokens], "norms", nulls=())
    means = [row.mean for row in table.select(site="layers.0", statistic="phi2")]
    assert means == pytest.approx(norms(seen["layers.0"])["phi2"][0].tolist(), rel=1e-6)


def test_padding_changes_no_number() -> None:
    model, long = Encoder().eval(), sentences(8, 15)
    padded = {key: value[:1] for key, value in long.items()}
    short = {key: value[:, :8] for key, value in padded.items()}
    tables = [language.analyse_text(model, [tokens], "norms", "entropy", nulls=()) for tokens in (short, padded)]
    for one, other in zip(*(table.rows for table in tables), strict=True):
        assert one.mean == pytest.approx(other.mean, rel=1e-4), one


def test_chance_stands_beside_sentences_of_several_lengths() -> None:
    table = language.analyse_text(Encoder().eval(), [sentences(12, 7, 9), sentences(5, 6)], "value_vectors")
    rows = table.select(statistic="matched_cosine", null="gaussian")
    assert [(row.n, row.null_n) for row in rows] == [(5, 5)] * 8
    assert not table.curves


def test_a_layer_that_runs_twice_is_two_passes() -> None:
    table = language.analyse_text(Encoder(shared=True).eval(), [sentences(6, 4)], "norms")
    assert table.names("site") == ["layers.0", "layers.0, pass 2"]
    assert {row.n for row in table.rows} == {2}


def test_what_is_not_plain_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="misread"):
        language.analyse_text(Encoder(causal=True).eval(), [sentences(6)], "norms")
    with pytest.raises(ValueError, match="query/key/value"):
        language.analyse_text(nn.Linear(2, 2), [sentences(6)], "norms")


def test_sentences_are_chosen_by_the_seed_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(f"{number}\n" for number in range(50)))
    every = language.read_sentences(str(tmp_path / "text.txt"))
    some = language.choose(every, 10, 0)
    assert len(every) == 50
    assert some == sorted(some, key=int) == language.choose(every, 10, 0)
    assert some != language.choose(every, 10, 1)


def test_the_script_analyses_a_model_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = tmp_path / "bert"
    folder.mkdir()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "sat", "here"]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder)
    (tmp_path / "text.txt").write_text("a cat\na cat sat here\nhere sat a cat\n")
    command = [str(folder), str(tmp_path / "text.txt"), "--sentences", "2", "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["language.py", *command])
    language.main()
    assert "encoder.layer.1.attention.self" in capsys.readouterr().out
    assert Table.load(tmp_path / "out").facts["images"] == 2
    assert (tmp_path / "out" / "figures" / "norms-joint.png").is_file()
