"""Masks equal the published code's, hit a wanted sparsity exactly, and never leave a query without keys."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from goldens import cases, deit_tiny_keep, golden
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import vitruvius
from vitruvius._errors import CheckpointError, ConfigError, DataError, UnsuitableSite
from vitruvius._files import load_tensors
from vitruvius.attention import part
from vitruvius.attention.sparse_softmax import tile_order
from vitruvius.compression.files import load_maps, load_masks, save_maps, save_masks
from vitruvius.compression.masks import Tiling, count, guess_site, make_masks
from vitruvius.compression.polarisation import polarise_all
from vitruvius.compression.rules import Rule, rules
from vitruvius.compression.rules.local_global import distances
from vitruvius.heads import Site

METHODS = {
    "info": lambda value: (rules["information"](mass=value, variant="released"), (0,)),
    "ratio": lambda value: (rules["ratio"](ratio=value), (0,)),
    "std": lambda value: (rules["deviation"](deviations=value), ()),
}
ALL_RULES = ["information", "ratio", "deviation", "random", "local_global", "window"]


def some_maps(sites: int = 2, heads: int = 3, tokens: int = 17, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(sites, heads, tokens, tokens, generator=generator, dtype=torch.float64)
    return {f"blocks.{i}.attn": map_ for i, map_ in enumerate(logits.softmax(-1))}


@pytest.mark.parametrize("name", ["vitcod_masks_a", "vitcod_masks_b"])
def test_golden_masks_and_sparsities_are_matched(name: str) -> None:
    tensors, metadata = golden(name)
    maps = {f"blocks.{i}.attn": map_ for i, map_ in enumerate(tensors["maps"])}
    for case in cases(metadata):
        rule, protect = METHODS[case["method"]](case["value"])
        masks = make_masks(maps, rule, protect=protect)
        assert torch.equal(torch.stack(list(masks.keep.values())), ~tensors[f"{case['id']}.mask"]), case["id"]
        assert masks.sparsity.total.sparsity == pytest.approx(case["sparsity"], abs=1e-12)


@pytest.mark.parametrize("cut", [0.0, 0.2, 0.6, 0.9])
def test_information_keeps_the_fewest_keys_that_hold_the_mass(cut: float) -> None:
    (map_,) = some_maps(sites=1).values()
    keep = make_masks({"blocks.0.attn": map_}, rules["information"](mass=cut), protect=()).keep["blocks.0.attn"]
    for head in range(3):
        for query in range(17):
            row = sorted(map_[head, query].tolist(), reverse=True)
            fewest = next(n for n in range(18) if sum(row[:n]) >= cut)
            kept = map_[head, query][keep[head, query]]
            assert len(kept) == max(fewest, 1)
            assert sorted(kept.tolist(), reverse=True) == row[: len(kept)]


@pytest.mark.parametrize("name", ALL_RULES)
@pytest.mark.parametrize("budget", ["global", "layer", "head"])
def test_a_wanted_sparsity_is_hit_exactly_in_every_purse(name: str, budget: str) -> None:
    masks = make_masks(some_maps(), rules[name](), sparsity=0.7, budget=budget)  # type: ignore[arg-type]
    kept = [[head.kept for head in heads] for heads in masks.sparsity.heads.values()]  # of 2 sites with 3 heads
    purses = {"global": [sum(map(sum, kept))], "layer": [sum(heads) for heads in kept], "head": [*kept[0], *kept[1]]}[
        budget
    ]
    pairs = 6 * 17 * 17 // len(purses)
    assert set(purses) == {pairs - round(0.7 * pairs)}
    for keep in masks.keep.values():
        assert keep[:, 0].all()
        assert keep[:, :, 0].all()


def test_the_searched_limit_gives_the_same_masks_as_the_rule_with_that_limit() -> None:
    maps = some_maps()
    searched = make_masks(maps, rules["information"](), sparsity=0.6)
    direct = make_masks(maps, rules["information"](mass=searched.limits["all"]))
    for name, keep in searched.keep.items():
        assert torch.equal(keep, direct.keep[name])


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(ALL_RULES), st.floats(0, 0.82), st.integers(0, 1000), st.booleans())
def test_no_query_ever_loses_all_keys(name: str, sparsity: float, seed: int, protected: bool) -> None:
    maps = some_maps(sites=1, heads=2, seed=seed)
    masks = make_masks(maps, rules[name](), sparsity=sparsity, protect=None if protected else ())
    assert all(keep.any(-1).all() for keep in masks.keep.values())


@pytest.mark.parametrize("rule", [rules["deviation"](deviations=50.0), rules["random"](share=1.0)], ids=repr)
def test_a_rule_that_would_remove_everything_leaves_the_best_key(rule: Rule) -> None:
    keep = make_masks(some_maps(sites=1), rule, protect=()).keep["blocks.0.attn"]
    assert (keep.sum(-1) == 1).all()


def test_random_removes_its_share_and_differs_between_heads_sites_and_seeds() -> None:
    maps = some_maps(tokens=26)
    keep = make_masks(maps, rules["random"](share=0.9), protect=()).keep
    share = 1 - sum(float(k.double().mean()) for k in keep.values()) / len(keep)
    assert 0.86 < share <= 0.9  # every query gets a key back, where it had lost all
    again = make_masks(maps, rules["random"](share=0.9, seed=1), protect=()).keep
    first, second = keep.values()
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, second)
    assert not torch.equal(first, again["blocks.0.attn"])
    assert torch.equal(first, make_masks(maps, rules["random"](share=0.9), protect=()).keep["blocks.0.attn"])


def test_local_and_global_tokens_are_what_a_loop_says() -> None:
    map_ = some_maps(sites=1, heads=2)["blocks.0.attn"]  # a class token and 4 x 4 patches
    keep = make_masks({"blocks.0.attn": map_}, rules["local_global"](radius=1, tokens=1)).keep["blocks.0.attn"]
    for head in range(2):
        popular = 1 + int(map_[head, :, 1:].sum(0).argmax())
        for query in range(17):
            for key in range(17):
                row, column, across, down = (query - 1) // 4, (query - 1) % 4, (key - 1) // 4, (key - 1) % 4
                near = max(abs(row - across), abs(column - down)) <= 1
                expected = 0 in (query, key) or popular in (query, key) or near
                assert bool(keep[head, query, key]) == expected


def test_pairs_equally_far_apart_leave_by_least_attention() -> None:
    map_ = some_maps(sites=1, heads=1)["blocks.0.attn"]
    site = guess_site("blocks.0.attn", map_)
    levels = rules["local_global"](radius=1, tokens=0).levels(map_, site)[0]
    apart = distances(site)
    for distance in (1, 2, 3):
        ring = apart == distance
        assert torch.equal(levels[ring].argsort(), map_[0][ring].argsort(descending=True))


def test_the_level_of_a_tile_is_the_mean_of_its_pairs_of_a_smaller_one_too() -> None:
    blocks = torch.tensor([0, 0, 0, 1, 1, -1])
    levels = torch.rand(2, 6, 6, dtype=torch.float64)
    means = Tiling(blocks, blocks).means(levels)
    for row in range(2):
        for column in range(2):
            tile = levels[:, blocks == row][:, :, blocks == column]
            torch.testing.assert_close(means[:, row, column], tile.mean((1, 2)))


@pytest.mark.parametrize("budget", ["global", "layer", "head"])
@pytest.mark.parametrize("tiles", [None, 4])
@pytest.mark.parametrize("sparsity", [None, 0.6])
def test_a_window_never_sees_the_maps(budget: Any, tiles: int | None, sparsity: float | None) -> None:
    wanted: dict[str, Any] = {"sparsity": sparsity, "budget": budget, "tiles": tiles, "sites": tile_site()}
    maps = tile_maps()
    others = {name: map_.flip(-1, 0) for name, map_ in maps.items()}
    keep, kept_by_others = (make_masks(some, "window:radius=1", **wanted).keep for some in (maps, others))
    assert all(torch.equal(keep[name], kept_by_others[name]) for name in maps)
    if budget == "head":  # every head keeps the same pairs, so the accelerator waits for none
        heads = torch.cat(list(keep.values()))
        assert bool((heads == heads[0]).all())


def test_a_window_is_what_a_loop_says_and_grows_by_distance() -> None:
    site = tile_site()["blocks.0.attn"]
    patches = [(row, column) for row in range(6) for column in range(6)]
    maps = {"blocks.0.attn": tile_maps()["blocks.0.attn"]}
    keep = make_masks(maps, "window:radius=1", sites={site.name: site}).keep[site.name][0]
    for query, (row, column) in enumerate(patches, 1):
        for key, (across, down) in enumerate(patches, 1):
            assert bool(keep[query, key]) == (max(abs(row - across), abs(column - down)) <= 1)
    assert keep[0].all()
    assert keep[:, 0].all()
    searched = make_masks(maps, "window", sites={site.name: site}, sparsity=0.85).keep[site.name][0, 1:, 1:]
    apart = torch.tensor([[(r - a) ** 2 + (c - d) ** 2 for a, d in patches] for r, c in patches])
    assert int(apart[searched].max()) <= int(apart[~searched].min())  # 12 % of the pairs: between 1 and sqrt(2)
    nearest = [int((row & (near == 1)).sum()) for row, near in zip(searched, apart, strict=True)]
    complete = [count == int((near == 1).sum()) for count, near in zip(nearest, apart, strict=True)]
    assert any(complete)
    assert sum(not whole and count > 0 for whole, count in zip(complete, nearest, strict=True)) <= 1  # query by query


def test_class_attention_and_downsampling_protect_columns_only() -> None:
    map_ = torch.rand(2, 4, 10, dtype=torch.float64)
    maps = {"down": map_ / map_.sum(-1, keepdim=True)}
    keep = make_masks(maps, rules["information"](mass=0.2), protect=(3,)).keep["down"]
    assert keep[:, :, 3].all()
    assert not keep[:, 3].all()


def test_golden_accounting_with_and_without_the_class_token() -> None:
    tensors, _ = golden("vitcod_accounting")
    masks = {f"blocks.{i}.attn": ~removed for i, removed in enumerate(tensors["masks"])}
    total = count(masks, dict.fromkeys(masks, (0,))).total
    assert total.pairs - total.kept == int(tensors["num_pruned"])
    assert total.pairs == int(tensors["num_total"])
    assert total.pairs_inside - total.kept_inside == int(tensors["num_pruned_wo_cls"])
    assert total.pairs_inside == int(tensors["num_total_wo_cls"])


def test_the_published_mask_has_the_published_sparsity() -> None:
    masks = {f"blocks.{i}.attn": keep for i, keep in enumerate(deit_tiny_keep())}
    total = count(masks, dict.fromkeys(masks, (0,))).total
    assert total.kept == 74_399
    assert round(total.sparsity, 5) == 0.94675
    assert round(total.sparsity_inside, 5) == 0.95643


def test_files_tell_rule_sites_sparsity_and_permutations(tmp_path: Path) -> None:
    maps = some_maps()
    save_maps(tmp_path / "maps.safetensors", maps, data="digits")
    assert load_tensors(tmp_path / "maps.safetensors")[1]["data"] == '"digits"'
    masks = make_masks(load_maps(tmp_path / "maps.safetensors")[0], rules["information"](), sparsity=0.5)
    polarised = polarise_all(masks.keep)
    save_masks(tmp_path / "masks.safetensors", masks, polarised=polarised)
    read = load_masks(tmp_path / "masks.safetensors")
    assert read.rule == masks.rule
    assert read.limits == masks.limits
    assert read.protected == dict.fromkeys(maps, (0,))
    assert read.sites == masks.sites
    assert read.keep.keys() == masks.keep.keys()
    assert all(torch.equal(read.keep[name], masks.keep[name]) for name in maps)
    orders, _ = load_tensors(tmp_path / "masks.safetensors")
    assert all(torch.equal(orders[f"{name}:order"], polarised[name].order) for name in maps)
    with pytest.raises(ConfigError, match="expected average maps"):
        load_maps(tmp_path / "masks.safetensors")
    with pytest.raises(ConfigError, match="expected masks"):
        load_masks(tmp_path / "maps.safetensors")


def test_vitcods_arrays_come_in_and_go_out_turned_over(tmp_path: Path) -> None:
    maps = some_maps()
    array = torch.stack(list(maps.values())).numpy()
    np.save(tmp_path / "attention_score.npy", array)
    read, sites = load_maps(tmp_path / "attention_score.npy")
    assert sites["blocks.1.attn"].grid == (4, 4)
    masks = make_masks(read, rules["information"](variant="released"), sites=sites)
    save_masks(tmp_path / "info.npy", masks)
    removed = np.load(tmp_path / "info.npy")
    assert removed.dtype == bool
    assert np.array_equal(removed, ~np.stack([keep.numpy() for keep in masks.keep.values()]))
    back = load_masks(tmp_path / "info.npy")
    assert all(torch.equal(back.keep[name], masks.keep[name]) for name in maps)
    np.save(tmp_path / "floats.npy", removed.astype(np.float64))  # as the released reordering writes them
    assert torch.equal(load_masks(tmp_path / "floats.npy").keep["blocks.0.attn"], masks.keep["blocks.0.attn"])
    save_maps(tmp_path / "out.npy", maps)
    assert np.array_equal(np.load(tmp_path / "out.npy"), array)


def test_levits_folder_of_arrays_comes_in_and_goes_out(tmp_path: Path) -> None:
    shapes = {"stages.0.blocks.0.attn": (2, 16, 16), "stages.0.blocks.1.attn": (2, 16, 16)}
    shapes |= {"stages.1.downsample.attn_downsample": (4, 4, 16), "stages.1.blocks.0.attn": (3, 4, 4)}
    maps = {name: torch.rand(shape).softmax(-1) for name, shape in shapes.items()}
    save_maps(tmp_path / "maps", maps)
    files = {file.name for file in (tmp_path / "maps").iterdir()}
    assert files == {"attention_score_dpt0.npy", "attention_score_subsample0.npy", "attention_score_dpt1.npy"}
    read, _ = load_maps(tmp_path / "maps")
    assert read.keys() == maps.keys()
    assert all(torch.equal(read[name], maps[name]) for name in maps)


def test_rows_that_do_not_sum_to_one_are_refused() -> None:
    maps = some_maps()
    maps["blocks.1.attn"][2, 5] *= 1.5
    with pytest.raises(DataError, match=r"'blocks.1.attn'.*row 5 of head 2 sums to 1.5"):
        make_masks(maps, rules["information"]())
    maps["blocks.1.attn"][2, 5] = math.nan
    with pytest.raises(DataError, match="row 5 of head 2 sums to nan"):
        make_masks(maps, rules["information"]())


def test_an_impossible_sparsity_says_what_is_possible() -> None:
    protected = 2 * 17 - 1 + 16  # a row, a column, and a key for each other query, which is not in that column
    with pytest.raises(ConfigError, match=r"cannot be reached.*protected rows and columns") as error:
        make_masks(some_maps(), rules["information"](), sparsity=0.99)
    most = float(str(error.value).split("At most ")[1].split(",")[0])
    assert 1 - protected / 17**2 - 1e-4 <= most < 0.99
    masks = make_masks(some_maps(), rules["information"](), sparsity=most - 1e-4)
    assert masks.sparsity.total.sparsity == pytest.approx(most, abs=2e-3)


def test_maps_of_another_model_are_refused() -> None:
    model = vitruvius.create_model("vitruvius/vit_digits", depth=2)  # 16 tokens, no class token
    sites = vitruvius.survey(model)
    with pytest.raises(ConfigError, match=r"shape \(3, 17, 17\).*needs \(3, 16, 16\)"):
        make_masks(some_maps(), rules["information"](), sites=sites)
    with pytest.raises(ConfigError, match=r"maps of another model: there is no site 'layers.0'"):
        make_masks({"layers.0": torch.full((3, 16, 16), 1 / 16)}, rules["information"](), sites=sites)


def test_a_mask_for_another_resolution_or_model_is_refused_when_wired(tmp_path: Path) -> None:
    save_masks(tmp_path / "masks.safetensors", make_masks(some_maps(), rules["information"]()))
    model = vitruvius.create_model("vitruvius/vit_digits", depth=2)
    with pytest.raises(ConfigError, match="another resolution can be resampled"):
        vitruvius.rewire(model, part("mask", file=str(tmp_path / "masks.safetensors")))
    deeper = vitruvius.create_model("vitruvius/vit_digits", depth=3, class_token=True, global_pool="token")
    with pytest.raises(UnsuitableSite, match=r"no mask for 'blocks.2.attn'"):
        vitruvius.rewire(deeper, part("mask", file=str(tmp_path / "masks.safetensors")))


def test_a_file_with_masks_for_sites_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    maps = {f"blocks.{block}.attn": torch.full((3, 16, 16), 1 / 16) for block in (0, 1)}
    save_masks(tmp_path / "m.safetensors", make_masks(maps, sparsity=0.5))
    rule = {"where": "*", "parts": [{"use": "mask", "file": str(tmp_path / "m.safetensors")}]}
    with pytest.raises(ConfigError, match=r"blocks\.1\.attn"):
        vitruvius.create_model("vitruvius/vit_digits", attention=[rule], depth=1)
    one = {**rule, "where": "blocks.0.attn"}  # of a model that has the other site, one may be left as it is
    assert vitruvius.create_model("vitruvius/vit_digits", attention=[one], depth=2)


def test_other_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="protect names token 17"):
        make_masks(some_maps(), rules["information"](), protect=(17,))
    with pytest.raises(ConfigError, match="from 0 to below 1"):
        make_masks(some_maps(), rules["information"](), sparsity=1.0)
    with pytest.raises(ConfigError, match=r"information.mass = 1.5"):
        rules["information"](mass=1.5)
    with pytest.raises(UnsuitableSite, match="one grid of patches"):
        make_masks({"x": torch.full((1, 3, 5), 0.2)}, rules["local_global"]())
    with pytest.raises(ConfigError, match="radius"):
        rules["window"](radius=-1)
    with pytest.raises(DataError, match="no maps"):
        make_masks({}, rules["ratio"]())
    np.save(tmp_path / "flat.npy", np.zeros((3, 4)))
    with pytest.raises(CheckpointError, match=r"expected \(layers, heads, queries, keys\)"):
        load_masks(tmp_path / "flat.npy")


def test_ties_stay_by_most_attention() -> None:
    map_ = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]]], dtype=torch.float64)
    keep = make_masks({"x": map_}, Level(), sparsity=0.5, protect=()).keep["x"]
    assert keep.tolist() == [[[False, False, True, True], [True, True, False, False]]]


class Level(Rule):
    """All pairs are worth the same."""

    limit = 1.0

    def levels(self, map_: Tensor, site: Site) -> Tensor:
        return torch.zeros_like(map_)


def tile_site() -> dict[str, Site]:
    """Two sites of 1 + 6 × 6 tokens."""
    return {
        name: Site(
            name=name, family="vit", attends="tokens", num_heads=2, num_queries=37, num_keys=37, key_dim=4, value_dim=4,
            dim=8, num_prefix_tokens=1, grid=(6, 6),
        )
        for name in ("blocks.0.attn", "blocks.1.attn")
    }  # fmt: skip


def tile_maps() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.rand(2, 37, 37, generator=generator).softmax(-1) for name in tile_site()}


TILES = tile_order(37, (6, 6), 1, 4)[1:]  # the patches of a tile follow each other


def tile_means(x: Tensor) -> Tensor:
    """(heads, rows, columns) of tiles: their means."""
    return x[:, TILES][:, :, TILES].view(2, 9, 4, 9, 4).double().mean((2, 4))


@pytest.mark.parametrize("budget", ["global", "layer", "head"])
@pytest.mark.parametrize("rule", ALL_RULES)
def test_whole_tiles_go_for_an_exact_share_by_any_rule(rule: str, budget: str) -> None:
    masks = make_masks(tile_maps(), rule, sparsity=0.6, budget=budget, sites=tile_site(), tiles=4)  # type: ignore[arg-type]
    pairs = sum(keep.numel() for keep in masks.keep.values())
    kept = sum(int(keep.sum()) for keep in masks.keep.values())
    assert pairs - kept == pytest.approx(0.6 * pairs, abs=4)  # rounded in each group
    cut = 0
    for keep in masks.keep.values():
        assert bool(keep[:, 0].all())
        assert bool(keep[:, :, 0].all())
        tiles = tile_means(keep)
        assert bool((tiles == 1).any(-1).all())  # no query is without a tile
        cut += int(((tiles > 0) & (tiles < 1)).sum())
    assert cut <= {"global": 1, "layer": 2, "head": 4}[budget]


@pytest.mark.parametrize("rule", ["information", "information:variant=released", "ratio", "deviation"])
def test_the_tiles_that_stay_are_the_most_attended(rule: str) -> None:
    sharp = {name: (40 * map_).softmax(-1) for name, map_ in tile_maps().items()}
    tile = (torch.arange(36) // 4)[:, None] == torch.arange(9)  # (patches, tiles)
    wanted = tile_maps()["blocks.0.attn"].new_zeros(9, 9)
    wanted[torch.arange(9), (torch.arange(9) * 4 + 2) % 9] = 1.0  # one tile of keys for each tile of queries
    for map_ in sharp.values():
        block = tile.float() @ wanted @ tile.float().T  # (patches, patches), 1 where attention shall be
        map_[:, TILES[:, None], TILES] += block
    maps = {name: map_ / map_.sum(-1, keepdim=True) for name, map_ in sharp.items()}
    masks = make_masks(maps, rule, sparsity=0.84, sites=tile_site(), tiles=4)
    for keep in masks.keep.values():
        tiles = tile_means(keep)
        assert bool((tiles[:, wanted > 0] == 1).all())


def test_tiles_go_from_the_highest_mean_level_down() -> None:
    maps, sites = tile_maps(), tile_site()
    masks = make_masks(maps, "ratio", sparsity=0.6, sites=sites, tiles=4)
    stayed, went = [], []
    for name, keep in masks.keep.items():
        means = tile_means(rules["ratio"]().levels(maps[name].double(), sites[name]))
        kept = tile_means(keep)
        best = means == means.amin(-1, keepdim=True)  # which stay in any case
        stayed.append(means[(kept == 1) & ~best])
        went.append(means[kept == 0])
    assert torch.cat(stayed).max() <= torch.cat(went).min()


def test_rows_of_equal_attention_stay_whole_in_tiles_too() -> None:
    maps = {name: torch.full((2, 37, 37), 1 / 37) for name in tile_site()}
    for tiles in (None, 4):
        masks = make_masks(maps, "deviation", sites=tile_site(), tiles=tiles)
        assert masks.sparsity.total.sparsity == 0


def test_tiles_by_a_rules_own_limit_are_whole() -> None:
    masks = make_masks(tile_maps(), "ratio:ratio=0.5", sites=tile_site(), tiles=4)
    for keep in masks.keep.values():
        tiles = tile_means(keep)
        assert set(tiles.unique().tolist()) <= {0.0, 1.0}


def test_tiles_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="tiles = 1, expected the number of queries and keys"):
        make_masks(tile_maps(), "ratio", sites=tile_site(), tiles=1)
