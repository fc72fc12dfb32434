"""Encoders of transformers, tiny and random, built here; skipped where the extra `nlp` is not installed."""

import inspect

import pytest
import torch

from vitruvius._errors import ConfigError, DataError, NoSiteError, UnsuitableSite
from vitruvius.analysis import Table
from vitruvius.analysis.language import analyse_text, attention_modules, encode, load_encoder, recorded
from vitruvius.analysis.language_command import choose, read_sentences
from vitruvius.analysis.norms import norms
from vitruvius.cli import main

transformers = pytest.importorskip("transformers", reason="the extra `nlp` is not installed: no language models")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}
SIZES |= {"max_position_embeddings": 40}
OWN = {  # where an architecture has other words
    "Albert": {**SIZES, "embedding_size": 16},
    "Deberta": {**SIZES, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 60},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60, "bos_token_id": 1, "eos_token_id": 1},
    "Longformer": {**SIZES, "attention_window": 4},
    "Luke": {**SIZES, "entity_vocab_size": 10, "entity_emb_size": 16},
    "RoFormer": {**SIZES, "embedding_size": 16},
}


def build(kind="Bert", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**OWN.get(kind, SIZES), **changes})
    model = getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():  # attention that differs from uniform
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def sentences(lengths=(12, 7, 9), extra=0):
    size = max(lengths) + extra
    mask = torch.stack([torch.arange(size) < length for length in lengths]).long()
    ids = torch.randint(2, 60, (len(lengths), size), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * mask, "attention_mask": mask}


FIT = ["Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "DistilBert", "Albert", "Luke"]


@pytest.mark.parametrize("kind", FIT)
def test_recorded_heads_reproduce_the_model_s_own_attention(kind):
    model, tokens = build(kind), sentences()
    seen = {}
    with recorded(attention_modules(model), tokens["attention_mask"], seen.__setitem__), torch.no_grad():
        attentions = model(**tokens, output_attentions=True).attentions
    assert len(seen) == 2
    for heads, theirs in zip(seen.values(), attentions, strict=True):
        ours = ((heads.q @ heads.k.mT) * heads.scale + heads.bias).softmax(-1)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_padding_changes_no_number():
    model = build()
    alone = analyse_text(model, [sentences((8,))], "norms", "value_vectors", nulls=False)
    padded = {key: value[:1] for key, value in sentences((8, 15)).items()}
    padded["input_ids"][:, :8] = sentences((8,))["input_ids"]
    both = analyse_text(model, [padded], "norms", "value_vectors", nulls=False)
    assert len(alone.rows) == len(both.rows) > 0
    for one, other in zip(alone.rows, both.rows, strict=True):
        assert (one.site, one.head, one.statistic) == (other.site, other.head, other.statistic)
        if "cosine" in one.statistic or one.statistic in ("negative", "matched_negative", "pearson", "allclose"):
            continue  # eigenvectors have no sign
        assert one.mean == pytest.approx(other.mean, rel=1e-3, abs=1e-6), one.statistic


def test_the_head_width_comes_from_the_model_and_not_from_a_literal():
    model, tokens = build(), sentences((10,))  # width 8, where a literal √64 would be wrong
    seen = {}
    with recorded(attention_modules(model), None, seen.__setitem__), torch.no_grad():
        model(**tokens)
    heads = next(iter(seen.values()))
    assert heads.scale == pytest.approx(8**-0.5)
    table = analyse_text(model, [tokens], "norms", nulls=False)
    expected = norms(heads)["phi2"][0]
    found = [row.mean for row in table.select(site=table.rows[0].site, statistic="phi2")]
    assert found == pytest.approx(expected.tolist(), rel=1e-6)


def test_nulls_stand_beside_the_numbers_of_padded_sentences():
    table = analyse_text(build(), [sentences(), sentences((5, 6))], "value_vectors")
    rows = table.select(statistic="matched_cosine", null="gaussian")
    assert len(rows) == 2 * 4
    assert {row.n for row in rows} == {5}
    assert {row.null_n for row in rows} == {5}
    assert not table.curves


def test_layers_that_share_their_weights_are_passes_of_one_module():
    table = analyse_text(build("Albert"), [sentences()], "norms")
    first, second = table.names("site")
    assert second == f"{first}, pass 2"
    assert {row.n for row in table.rows} == {3}  # each pass sees each sentence once
    assert table.select(site=first)[0].mean != table.select(site=second)[0].mean
    assert {curve.statistic for curve in table.curves} == {"log10_phi2_quantiles", "log10_h2_quantiles"}


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("GPT2", "it is a decoder"),
        ("Deberta", "disentangled"),
        ("DebertaV2", "disentangled"),
        ("MPNet", "relative positions"),
        ("Longformer", "sliding window"),
        ("RoFormer", "rotary positions"),
    ],
)
def test_architectures_that_do_not_fit_are_refused_by_name(kind, reason):
    with pytest.raises((NoSiteError, UnsuitableSite), match=f"{kind}Model does not fit: .*{reason}.*RoBERTa"):
        analyse_text(build(kind), [sentences()], "norms")


@pytest.fixture
def folder(tmp_path):
    """A tiny BERT with its tokenizer, as save_pretrained writes them."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "sat", "here"]
    place = tmp_path / "bert"
    place.mkdir()
    (place / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(place / "vocab.txt")).save_pretrained(place)
    build(vocab_size=len(words)).save_pretrained(place)
    return place


def test_the_verb_analyses_a_file_of_sentences_and_keeps_what_report_reads(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a cat\n\na cat sat here\nhere sat a cat\n")
    words = ["analyse", str(folder), "norms", "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]
    assert main([*words, "--images", "2"]) == 0
    shown = capsys.readouterr().out
    assert "images 2" in shown
    assert "encoder.layer.1.attention.self" in shown
    table = Table.load(tmp_path / "out")
    assert table.facts["data"] == str(tmp_path / "text.txt")
    assert {row.null for row in table.rows} == {"gaussian", "spectrum", "permuted"}
    assert (tmp_path / "out" / "figures" / "norms-joint.png").stat().st_size > 1000
    assert main(["report", str(tmp_path / "out"), "--out", str(tmp_path / "page.html")]) == 0
    assert "log₁₀ ratio" in (tmp_path / "page.html").read_text()


def test_wikitext_is_its_test_split_without_headings(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the extra `nlp` is not installed: no WikiText")
    asked = []
    signature = inspect.signature(datasets.load_dataset)
    lines = ["", " = Heading = \n", " A sentence that is long enough to be looked at . \n"]

    def load(*args, **kwargs):
        asked.append(signature.bind(*args, **kwargs).arguments)
        return {"text": lines}

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_sentences("wikitext") == ["A sentence that is long enough to be looked at ."]
    assert asked == [{"path": "Salesforce/wikitext", "name": "wikitext-103-raw-v1", "split": "test"}]
    monkeypatch.setattr(datasets, "load_dataset", raise_no_network)
    with pytest.raises(DataError, match=r"cannot be fetched: no network\. Without a network, save its sentences"):
        read_sentences("wikitext")


def raise_no_network(*_, **__):
    raise ConnectionError("no network.")


def test_what_is_wrong_with_a_text_or_a_model_is_said(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a cat\n")
    (tmp_path / "empty.txt").write_text("\n")
    for words, letter in (
        ([str(folder), "--text", str(tmp_path / "none.txt")], "there is no such file"),
        ([str(folder), "--text", str(tmp_path / "empty.txt")], "holds no sentences"),
        ([str(folder), "norm", "--text", str(text)], "did you mean 'norms'"),
        ([str(folder), "data.root=x", "--text", str(text)], "means nothing to a language model"),
        ([str(tmp_path), "--text", str(text)], "cannot be opened as a language model"),
    ):
        assert main(["analyse", *words]) == 1
        assert letter in capsys.readouterr().err


def test_sentences_are_chosen_by_the_seed_in_their_order():
    sentences_ = [str(number) for number in range(50)]
    some = choose(sentences_, 10, 0)
    assert some == sorted(some, key=int)
    assert some == choose(sentences_, 10, 0) != choose(sentences_, 10, 1)
    assert choose(sentences_, 100, 0) == sentences_


def test_an_encoder_opens_from_a_folder_and_sentences_are_padded(folder):
    encoder = load_encoder(str(folder))
    batches = encode(encoder.tokenizer, ["a cat", "a cat sat here", "here"], batch_size=2)
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(2, 6), (1, 3)]
    assert batches[0]["attention_mask"][0].tolist() == [1, 1, 1, 1, 0, 0]
    table = analyse_text(encoder.model, batches, "entropy", nulls=False)
    assert table.facts["images"] == 3


def test_attention_that_is_not_plain_is_refused():
    causal = build(is_decoder=True)
    with pytest.raises(UnsuitableSite, match="misread"):
        analyse_text(causal, [sentences()], "norms")


def test_models_without_attention_no_sentences_and_whole_model_questions_are_refused():
    with pytest.raises(NoSiteError, match="query/key/value"):
        analyse_text(torch.nn.Linear(2, 2).eval(), [sentences()], "norms")
    with pytest.raises(DataError, match="no sentences"):
        analyse_text(build(), [], "norms")
    with pytest.raises(ConfigError, match="whole image model"):
        analyse_text(build(), [sentences()], "rollout")
    with pytest.raises(ConfigError, match="train mode"):
        analyse_text(build().train(), [sentences()], "norms")
