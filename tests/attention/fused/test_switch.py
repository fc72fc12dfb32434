"""The switch between fused and plain, and what it says when it refuses."""

import pytest
import torch
from heads_and_oracles import make_heads

from vitruvius._errors import ConfigError
from vitruvius.attention.fused import _switch, use, wanted


def test_the_kernels_are_chosen_by_themselves_but_never_on_the_cpu():
    assert _switch._mode == "auto"
    assert not wanted(make_heads(5, 32, torch.float16), part="rpc")


def test_single_precision_takes_the_fused_path_only_when_asked(monkeypatch):
    monkeypatch.setattr(_switch, "INTERPRETED", True)
    monkeypatch.setattr(_switch, "TRITON_IS_HERE", True)
    heads = make_heads(5, 32, torch.float32)
    assert not wanted(heads, part="rpc")
    with use("fused"):
        assert wanted(heads, part="rpc")


def test_forcing_the_fused_path_on_the_cpu_says_why_not():
    with use("fused"), pytest.raises(ConfigError, match=r"'rpc' cannot run: the tensors are on cpu"):
        wanted(make_heads(5, 32, torch.float32), part="rpc")


def test_the_choice_before_comes_back_even_after_an_error():
    chosen = use("plain")
    assert _switch._mode == "plain"
    with pytest.raises(ZeroDivisionError), chosen:
        1 / 0  # noqa: B018
    assert _switch._mode == "auto"


def test_an_unknown_choice_gets_a_suggestion():
    with pytest.raises(ConfigError, match="did you mean 'plain'"):
        use("plane")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dropout": 0.1}, "dropout is 0.1"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"v": torch.zeros(1, 2, 5, 32, dtype=torch.float64)}, "float64"),
        ({"k": torch.zeros(1, 2, 6, 32, dtype=torch.float16)}, "one shape"),
        ({"k": torch.zeros(1, 2, 5, 24).half(), "v": torch.zeros(1, 2, 5, 24).half()}, "widths 24 and 24"),
        ({"bias": torch.zeros(2, 5, 5, requires_grad=True)}, "bias wants a gradient"),
    ],
)
def test_what_the_kernels_cannot_do_is_left_to_the_plain_path(change, reason, monkeypatch):
    monkeypatch.setattr(_switch, "INTERPRETED", True)
    monkeypatch.setattr(_switch, "TRITON_IS_HERE", True)
    heads = make_heads(5, 32, torch.float16)
    with use("auto"):
        assert wanted(heads, part="rpc")
        assert not wanted(heads._replace(**change), part="rpc")
    with use("fused"), pytest.raises(ConfigError, match=reason):
        wanted(heads._replace(**change), part="rpc")
