"""Maps are true: what a core shows is what it computes, for every registered part and on every family."""

import pytest
import torch
from attending import CHAINS, make_core, make_heads, make_site, registered

from families import FAMILIES
from vitruvius._errors import UnsuitableSite
from vitruvius.analysis import analyse
from vitruvius.analysis.recording import record_examples
from vitruvius.attention import Kernel, Stage, part
from vitruvius.attention.base import attention_map, build_core
from vitruvius.attention.softmax import attend
from vitruvius.compression.maps import average_maps
from vitruvius.models import create_model

FEW = [f for f in FAMILIES if f.name in ("vit", "eva", "beit", "swin", "swin_v2", "xcit", "cait", "levit", "crossvit")]
MAPS_BY_FAMILY = ("softmax", "rpc", "rpc_asymmetric", "scaled_alpha", "symmetric")


class Turned(Kernel):
    """Says nothing of its weights."""

    def __init__(self, site):
        super().__init__()

    def forward(self, heads):
        return attend(heads).flip(-1)


class Doubled(Stage):
    """Changes the values without a word."""

    def __init__(self, site):
        super().__init__()

    def forward(self, heads):
        return heads._replace(v=2 * heads.v)


def test_every_registered_part_is_in_the_chains_of_these_tests():
    used = {name for name in registered() for chain in CHAINS.values() if name in build_core(chain, make_site()).parts}
    assert used | {"gated"} == registered()  # which needs the tokens too: test_context


def test_the_map_of_scaled_is_a_times_i_minus_s_and_has_negative_weights():
    core, heads = make_core("scaled"), make_heads()
    s = core.parts["scaled"].matrix
    expected = attention_map(heads) @ (torch.eye(7, dtype=torch.float64) - s)
    torch.testing.assert_close(core.map(heads), expected)
    assert (expected < 0).any()


def test_a_mask_hides_pairs_in_the_map():
    keep = torch.eye(7, dtype=torch.bool).expand(3, 7, 7)
    core = build_core([part("mask", keep=keep)], make_site()).double()
    assert torch.equal(core.map(make_heads()), torch.eye(7, dtype=torch.float64).expand(2, 3, 7, 7))


@pytest.mark.parametrize(("parts", "blamed"), [([Turned], "turned"), ([Doubled, "softmax"], "doubled")])
def test_a_core_that_cannot_say_is_named_and_never_guessed(parts, blamed):
    core, heads = build_core(parts, make_site()), make_heads()
    assert core.map(heads) is None
    with pytest.raises(UnsuitableSite, match=f"at 'here' has no attention map: '{blamed}' does not say"):
        core.map_of(heads, "here")


def noisy_queries(model):
    """The same model with noise for the weights that make q."""
    for block in model.model.blocks:
        with torch.no_grad():
            block.attn.qkv.weight[: block.attn.qkv.in_features].normal_()
            block.attn.qkv.bias[: block.attn.qkv.in_features].normal_()
    return model


def test_noise_for_the_queries_of_an_rpc_model_changes_no_map_no_average_and_no_statistic(tmp_path):
    x = torch.rand(3, 3, 8, 8)
    looked = []
    for change in (lambda model: model, noisy_queries):
        model = change(create_model("vitruvius/vit_digits", attention=["rpc"], seed=1)).eval()
        run = tmp_path / str(len(looked))
        run.mkdir()
        record_examples(run, model, x)
        shown = (run / "attention.safetensors").read_bytes()
        maps = average_maps(model, [(x, torch.zeros(3, dtype=torch.long))])
        asked = ("entropy", "distance", "rollout", "head_similarity", "norms")
        table = analyse(model, [x], *asked, nulls=False)
        looked.append((model(x), shown, maps, [row.mean for row in table.rows]))
    (logits, shown, maps, means), (logits_2, shown_2, maps_2, means_2) = looked
    assert torch.equal(logits, logits_2)
    assert shown == shown_2
    assert all(torch.equal(maps[name], maps_2[name]) for name in maps)
    assert means == means_2


def test_whoever_shows_averages_or_measures_the_map_of_a_core_without_one_is_told_its_name(tmp_path):
    model = create_model("vitruvius/vit_digits", attention=[Turned], seed=1).eval()
    x = torch.rand(3, 3, 8, 8)
    for asked in (
        lambda: record_examples(tmp_path, model, x),
        lambda: average_maps(model, [(x, torch.zeros(3, dtype=torch.long))]),
        lambda: analyse(model, [x], "entropy", nulls=False),
    ):
        with pytest.raises(UnsuitableSite, match="'turned' does not say which weights"):
            asked()
    table = analyse(model, [x], "effective_rank", nulls=False)  # its output it knows
    assert table.rows
