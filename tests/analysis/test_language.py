"""Encoders of transformers, tiny and random, built here; skipped where the extra `nlp` is not installed."""

import pytest
import torch

from vitruvius._errors import ConfigError, DataError, NoSiteError, UnsuitableSite
from vitruvius.analysis.language import analyse_text, attention_modules, encode, load_encoder, recorded
from vitruvius.analysis.norms import norms

transformers = pytest.importorskip("transformers", reason="the extra `nlp` is not installed: no language models")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}


def build(kind="Bert", **changes):
    torch.manual_seed(0)
    if kind == "DistilBert":
        config = transformers.DistilBertConfig(dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=60)
    else:
        config = getattr(transformers, f"{kind}Config")(**{**SIZES, "max_position_embeddings": 40, **changes})
    model = getattr(transformers, f"{kind}Model")._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():  # attention that differs from uniform
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model


def sentences(lengths=(12, 7, 9), extra=0):
    size = max(lengths) + extra
    mask = torch.stack([torch.arange(size) < length for length in lengths]).long()
    ids = torch.randint(2, 60, (len(lengths), size), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids * mask, "attention_mask": mask}


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "Electra", "DistilBert"])
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


def test_an_encoder_opens_from_a_folder_and_sentences_are_padded(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "sat", "here"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    build(vocab_size=len(words)).save_pretrained(tmp_path)
    encoder = load_encoder(str(tmp_path))
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
