"""Settings that make no sense and sites where a part makes none are refused by its name, and say what to do."""

import math

import pytest
import torch
from attending import make_heads, make_site

from vitruvius._errors import ConfigError, SurgeryError, UnsuitableSite
from vitruvius.attention import part
from vitruvius.attention.base import build_core

KEEP = torch.ones(3, 7, 7, dtype=torch.bool)
WITHOUT_KEYS = KEEP.clone()
WITHOUT_KEYS[1, 2:5] = False
CLASS, DOWN = make_site("class", queries=1, keys=7), make_site("downsampled", queries=4, keys=7)
XCIT = make_site("channels", family="xcit")


@pytest.mark.parametrize(
    ("name", "settings", "word"),
    [
        ("differential", {"depth": -1}, "depth"),
        ("sigmoid", {"offset": math.inf}, "offset"),
        ("twicing", {"strength": math.nan}, "strength"),
        ("pro", {"iterations": -1}, "iterations"),
        ("pro", {"gamma": 0.0}, "gamma"),
        ("pro", {"penalty": "huber_mcp", "delta": 5.0}, "gamma"),
        ("l2", {"strength": 0.0}, "strength"),
        ("linear", {"count": 8}, "count"),
        ("sink", {"start": math.inf}, "start"),
        ("top_k", {"share": 0.0}, "share"),
        ("rpc", {"sparsity": -1.0}, "sparsity"),
        ("rpc", {"sparsity": math.nan}, "sparsity"),
        ("rpc", {"iterations": 0}, "iterations"),
        ("rpc", {"iterations": 1.5}, "whole number"),
        ("rpc", {"variant": "paer"}, "released, paper"),
        ("rpc", {"dual_sign": 0}, "-1, 1"),
        ("scaled", {"form": "vector"}, "matrix, alpha"),
        ("truncated", {"rank": 5}, "rank"),
        ("truncated", {"rank": 0}, "rank"),
        ("truncated", {"mode": "mix_head", "rank": 4}, "rank"),
        ("truncated", {"probability": 0.0}, "probability"),
        ("low_rank", {"rank": 0}, "has 3 heads"),
        ("low_rank", {"rank": 4}, "has 3 heads"),
        ("value_residual", {"share": 2.0}, "share"),
        ("tome", {"r": -1}, "r=-1"),
        ("mask", {}, "one pattern"),
        ("mask", {"keep": "all", "file": "masks.safetensors"}, "one pattern"),
        ("mask", {"keep": "everything"}, "one of all"),
        ("mask", {"keep": KEEP.float()}, "must be bool"),
        ("mask", {"keep": KEEP[:, :5]}, "needs .3, 7, 7.: heads, queries, keys"),
        ("mask", {"keep": WITHOUT_KEYS}, "removes every key of 3 queries in head 1"),
    ],
)
def test_senseless_settings_are_refused_with_the_name(name, settings, word):
    with pytest.raises(ConfigError, match=f"{name}.*{word}"):
        build_core([part(name, **settings)], make_site())


@pytest.mark.parametrize(
    ("piece", "site", "word"),
    [
        ("differential", make_site(key_dim=5), "halves the width"),
        ("linear", make_site(biased=True), "adds a bias"),
        ("gated", make_site(knows_input=False), "tokens that ask"),
        ("symmetric", CLASS, "self-attention"),
        ("symmetric", DOWN, "self-attention"),
        ("symmetric", XCIT, "temperature"),
        ("standardised", make_site("channels"), "attends over channels"),
        ("standardised", make_site(key_dim=1), "width 2 or more"),
        ("rpc", CLASS, "self-attention"),
        ("rpc", make_site(value_dim=8), "one width"),
        ("rpc", XCIT, "asymmetric=True keeps q"),
    ],
)
def test_sites_where_a_part_makes_no_sense_are_refused(piece, site, word):
    with pytest.raises(UnsuitableSite, match=f"'{piece}'.*{word}"):
        build_core([piece], site)


def test_the_asymmetric_pursuit_needs_no_key_that_asks():
    build_core([part("rpc", asymmetric=True)], XCIT)


@pytest.mark.parametrize(("parts", "more"), [((part("l2"), "linear"), {}), (("linear",), {"dropout": 0.1})])
def test_linear_attention_refuses_what_needs_pairs(parts, more):
    with pytest.raises(SurgeryError, match="never forms pairs"):
        build_core(parts, make_site()).double()(make_heads()._replace(**more))
