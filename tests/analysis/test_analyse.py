"""analyse: sites, images, nulls and processes; every family; and what it says when something is wrong."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from torch import nn

import vitruvius
from families import Family
from vitruvius._errors import ConfigError, DataError, NoSiteError, UnknownName, UnsuitableSite
from vitruvius._processes import Process
from vitruvius.analysis import Table, analyse, analyses
from vitruvius.analysis.entropy import entropy
from vitruvius.attention import part
from vitruvius.heads import Heads


def digits_model(**settings):
    return vitruvius.create_model("vitruvius/vit_digits", depth=2, **settings)


def pixels(count=6, size=8, seed=0):
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def numbers(table: Table):
    return {(r.site, r.head, r.analysis, r.statistic, r.null): (r.mean, r.std, r.n, r.null_mean) for r in table.rows}


def assert_same_numbers(one: Table, other: Table):
    left, right = numbers(one), numbers(other)
    assert left.keys() == right.keys()
    for key, values in left.items():
        for a, b in zip(values, right[key], strict=True):
            assert a == pytest.approx(b, rel=1e-4, abs=1e-9) if a is not None else b is None, key


def test_the_table_holds_the_mean_and_spread_of_the_function_over_images():
    model, x = digits_model(), pixels()
    table = analyse(model, [x], "entropy", nulls=False)
    with vitruvius.record(model) as seen, torch.no_grad():
        model(x)
    for site, heads in seen.items():
        expected = entropy(heads)["nats"]
        rows = table.select(site=site, statistic="nats")
        assert [row.mean for row in rows] == pytest.approx(expected.mean(0).tolist())
        assert [row.std for row in rows] == pytest.approx(expected.std(0).tolist(), rel=1e-6)
        assert {row.n for row in rows} == {6}
        assert [row.head for row in rows] == [0, 1, 2]


def test_batches_and_their_sizes_make_no_difference(monkeypatch):
    model, x = digits_model(), pixels(7)
    asked = ("eigenvalues", "norms", "effective_rank", "rollout")
    whole = analyse(model, [x], *asked, null_images=5)
    assert_same_numbers(analyse(model, [(part, None) for part in x.split(3)], *asked, null_images=5), whole)
    monkeypatch.setattr("vitruvius.analysis.analysing.ENTRIES", 1)  # one image at a time
    assert_same_numbers(analyse(model, [x], *asked, null_images=5), whole)


def test_images_limits_how_many_are_looked_at():
    model = digits_model()
    table = analyse(model, iter([pixels(4), pixels(4, seed=1), pixels(4, seed=2)]), "entropy", images=6, nulls=False)
    assert {row.n for row in table.rows} == {6}
    assert table.facts["images"] == 6
    both = torch.cat([pixels(4), pixels(4, seed=1)])[:6]
    assert_same_numbers(analyse(model, [both], "entropy", nulls=False), table)


def test_every_number_has_three_nulls_beside_it_and_a_claim():
    table = analyse(digits_model(), [pixels(12)], "value_vectors", null_images=8)
    rows = table.select(site="blocks.0.attn", head=0, statistic="matched_cosine")
    assert [row.null for row in rows] == ["gaussian", "spectrum", "permuted"]
    assert all(row.claim and row.null_n == 8 and row.null_std > 0 and row.effect is not None for row in rows)


def test_a_null_that_changes_nothing_says_so():
    table = analyse(digits_model(), [pixels()], "effective_rank")
    claims = {row.null: row.claim for row in table.select(site="blocks.0.attn", head=0, statistic="keys")}
    assert claims["spectrum"] == claims["permuted"] == "the same by construction"
    assert claims["gaussian"].startswith(("above", "below", "indist"))


def test_random_heads_are_called_chance_and_heads_with_structure_are_not():
    """A model whose attention is noise against one that looks at itself."""

    def noisy(heads: Heads):
        return {"same": (heads.q * heads.k).sum((-2, -1))}

    class Mirror(vitruvius.attention.Stage):
        def forward(self, heads: Heads) -> Heads:
            return heads._replace(q=5 * heads.k)

    model = digits_model(attention=[lambda site: Mirror()])
    for row in analyse(model, [pixels(16)], noisy).rows:
        if row.null != "spectrum":
            assert row.claim.startswith("above chance")
            assert row.effect > 1


def test_what_is_analysed_is_what_the_kernel_receives_after_the_stages():
    symmetric = digits_model(attention=["symmetric"])

    def gap(heads: Heads):
        return {"gap": (heads.q - heads.k).abs().amax((-2, -1))}

    assert all(row.mean == 0 for row in analyse(symmetric, [pixels()], gap, nulls=False).rows)
    assert all(row.mean > 0 for row in analyse(digits_model(), [pixels()], gap, nulls=False).rows)


def test_the_model_is_left_as_it_was():
    model, x = digits_model(attention=[part("rpc", iterations=2)]), pixels()
    before, kinds = model(x), [type(m) for m in model.modules()]
    analyse(model, [x], "entropy")
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)
    assert [type(m) for m in model.modules()] == kinds
    bare = digits_model()
    analyse(bare, [x], "entropy")
    assert type(bare.model.blocks[0].attn) is timm.layers.Attention


def test_all_analyses_run_on_every_family_and_no_table_holds_nan(family: Family):
    model, _ = family.randomised()
    x = torch.rand(2, *family.input_size, generator=torch.Generator().manual_seed(0))
    table = analyse(model, [x], nulls=False)
    assert {row.n for row in table.rows} <= {1, 2}
    assert all(math.isfinite(row.mean) for row in table.rows)
    assert {"eigenvalues", "norms", "value_vectors", "gammas", "reconstruction"} <= set(table.names("analysis"))
    json.loads(table.to_json())  # strict JSON
    assert "nan" not in str(table).replace("nano", "")
    for remark in table.remarks:
        assert "left out" in remark


def test_windows_have_their_nulls_and_count_as_their_image():
    sizes = {"img_size": 32, "embed_dim": 16, "depths": (2,), "num_heads": (2,), "window_size": 4}
    model = timm.create_model("swin_tiny_patch4_window7_224", **sizes)
    table = analyse(model.eval(), [pixels(3, 32)], "entropy")
    assert {row.n for row in table.rows} == {row.null_n for row in table.rows} == {3}
    assert table.names("null") == ["gaussian", "spectrum", "permuted"]


def test_a_question_that_suits_some_sites_answers_for_those_and_says_why_not_for_others():
    sizes = {"img_size": 32, "embed_dim": 32, "num_heads": 2, "depth": 1, "cls_attn_layers": 1}
    model, x = timm.create_model("xcit_nano_12_p16_224", **sizes).eval(), pixels(2, 32)
    with pytest.raises(UnsuitableSite, match=r"nothing could be analysed.*one grid of patches"):
        analyse(model, [x], "distance")
    table = analyse(model, [x], "distance", "entropy", nulls=False)
    assert table.names("analysis") == ["entropy"]
    assert "distance left out" in table.remarks[0]


@pytest.mark.parametrize("batches", [[], [torch.empty(0, 3, 8, 8)]])
def test_no_images_is_an_error(batches):
    with pytest.raises(DataError, match="no images"):
        analyse(digits_model(), batches, "entropy")


def test_a_model_without_tokens_is_an_error():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    with pytest.raises(NoSiteError, match="nothing that looks like attention"):
        analyse(model, [pixels()], "entropy")


def test_wrong_pixels_train_mode_and_misspelt_names_are_errors():
    model = digits_model()
    with pytest.raises(DataError, match=r"expected \[0, 1\]"):
        analyse(model, [pixels() * 255], "entropy")
    with pytest.raises(ConfigError, match="train mode"):
        analyse(digits_model().train(), [pixels()], "entropy")
    with pytest.raises(UnknownName, match="did you mean 'entropy'"):
        analyse(model, [pixels()], "entropie")
    with pytest.raises(ConfigError, match="variante"):
        analyse(model, [pixels()], "norms:variante=released")
    with pytest.raises(ConfigError, match="asked twice"):
        analyse(model, [pixels()], "norms", "norms")
    with pytest.raises(ConfigError, match="no null named"):
        analyse(model, [pixels()], "norms", nulls=["uniform"])


class Loud(vitruvius.attention.Stage):
    """Keys too long for float32 once squared; the first image even not finite."""

    def __init__(self, size: float, broken: bool) -> None:
        super().__init__()
        self.size, self.broken = size, broken

    def forward(self, heads: Heads) -> Heads:
        k = heads.k * self.size
        if self.broken:
            k = torch.cat([k[:1] * math.inf, k[1:]])
        return heads._replace(k=k)


def test_keys_that_overflow_float32_leave_only_finite_numbers_and_remarks():
    model = digits_model(attention=[lambda site: Loud(1e25, False)])
    table = analyse(model, [pixels()], "eigenvalues:standardise=false", "norms", "value_vectors", "gammas")
    assert table.rows
    for row in table.rows:
        told = [v for v in (row.mean, row.std, row.null_mean, row.null_std, row.effect) if v is not None]
        assert all(math.isfinite(value) for value in told), row
    json.loads(table.to_json())
    assert any("not a finite number" in remark for remark in table.remarks)


def test_an_image_whose_keys_are_not_finite_is_left_out_and_remarked():
    model = digits_model(attention=[lambda site: Loud(1.0, True)])
    table = analyse(model, [pixels()], "entropy", "rollout")
    assert {row.n for row in table.rows} == {5}
    assert any("at most 1 of 6" in remark for remark in table.remarks)


def test_every_analysis_is_listed_with_a_line_and_its_settings():
    described = {name: (settings, line) for name, settings, line in analyses.describe()}
    sites = {"distance", "effective_rank", "eigenvalues", "entropy", "gammas", "head_similarity", "norms"}
    assert set(described) >= sites | {"reconstruction", "rollout", "token_norms", "value_vectors"}
    assert all(line.endswith(".") for _, line in described.values())
    assert "standardise=True" in described["eigenvalues"][0]


class Peer(Process):
    """One of several processes that are threads here: what they gather, they gather through a list."""

    def __init__(self, rank: int, everyone: list[list[object]], meet: threading.Barrier) -> None:
        super().__init__(device=torch.device("cpu"), rank=rank, world_size=len(everyone))
        object.__setattr__(self, "everyone", everyone)
        object.__setattr__(self, "meet", meet)

    def gather(self, value: object) -> list[object]:
        self.everyone[self.rank].append(value)
        self.meet.wait(60)
        place = len(self.everyone[self.rank]) - 1
        return [own[place] for own in self.everyone]


class Share:
    """Seven images, dealt out like cards."""

    name, num_images = "seven", 7

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.ids = torch.arange(rank, 7, world_size)

    def with_ids(self):
        yield pixels(7)[self.ids], self.ids, self.ids


def test_two_processes_find_what_one_finds():
    asked = {"images": 7, "null_images": 5}
    alone = analyse(digits_model(), Share(), "norms", "rollout", **asked)
    everyone, meet, models = [[], []], threading.Barrier(2), [digits_model() for _ in range(2)]

    def work(rank: int) -> Table:
        peer = Peer(rank, everyone, meet)
        return analyse(models[rank], Share(rank, 2), "norms", "rollout", process=peer, **asked)

    with ThreadPoolExecutor(2) as pool:
        tables = list(pool.map(work, range(2)))
    assert_same_numbers(tables[0], alone)
    assert tables[0].rows == tables[1].rows
