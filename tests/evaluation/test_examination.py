"""Sanity checks from the command line, with a smooth surrogate for robust attention."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import vitruvius
from vitruvius._errors import ConfigError
from vitruvius._progress import Bar, no_progress
from vitruvius.attention import part
from vitruvius.cli import main
from vitruvius.data import DataConfig, eval_loader
from vitruvius.evaluation.sanity import Sanity, _Examination, examine, make_twins

NAME = "vitruvius/vit_digits"


def test_the_surrogate_of_rpc_is_symmetric_softmax_with_the_same_weights() -> None:
    model = vitruvius.create_model(NAME, depth=2)
    vitruvius.rewire(model, part("rpc", iterations=3), where="blocks.1.attn")
    surrogate = make_twins(model)["plain"]
    expected = vitruvius.create_model(NAME, depth=2)
    vitruvius.rewire(expected, "symmetric", where="blocks.1.attn")
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(surrogate(x), expected(x))
    assert "rpc" in str(model.model.blocks[1].attn.core)  # the model itself is as it was


def test_a_model_without_rpc_needs_no_surrogate() -> None:
    assert make_twins(vitruvius.create_model(NAME, depth=1)) == {}


@pytest.fixture
def no_long_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long black-box searches are tried on no image: they take thousands of queries."""
    monkeypatch.setattr("vitruvius.evaluation.sanity.SAMPLE", 0)
    monkeypatch.setattr("vitruvius.evaluation.sanity.MOST", 0)


@pytest.mark.usefixtures("no_long_search")
@pytest.mark.parametrize(
    ("norm", "eps", "half"), [("l2", 0.5, "l2 eps 0.25"), ("L1", 10, "l1 eps 5.0"), ("linf", 8 / 255, "eps 4/255")]
)
def test_the_checks_take_every_norm(norm: str, eps: float, half: str) -> None:
    net = vitruvius.create_model(NAME, depth=1).eval()
    loader = eval_loader(DataConfig(val_num_samples=2), input_size=net.data_config)
    findings = {finding.name: finding for finding in examine(net, loader, eps, norm=norm)}
    assert half in findings["larger radius"].numbers
    assert "longer black box" in findings
    assert ("decision based" in findings) == (norm != "L1")  # HopSkipJump knows linf and l2


@pytest.mark.usefixtures("no_long_search")
def test_the_command_prints_and_keeps_the_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["evaluate", NAME, "data.dataset=digits", "data.val_num_samples=6", "model.kwargs.depth=1", "device=cpu"]
    words += ["attention=[{where: blocks.0.attn, parts: [rpc]}]"]
    assert main([*words, "--sanity", "8/255", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    findings = json.loads((tmp_path / "sanity.json").read_text())
    assert len(findings) >= 5
    for finding in findings:
        assert finding["name"] in printed
    assert "(eps 4/255 0" in printed
    assert {"transfer (plain)", "adaptive (plain)", "worst case"} <= {finding["name"] for finding in findings}


def test_accuracies_are_told_before_the_checks_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("interrupted")

    monkeypatch.setattr("vitruvius.evaluation.sanity.examine", refuse)
    words = ["evaluate", NAME, "data.dataset=digits", "data.val_num_samples=6", "model.kwargs.depth=1", "device=cpu"]
    assert main([*words, "--sanity", "8/255", "--out", str(tmp_path)]) != 0
    assert "clean" in capsys.readouterr().out


def test_a_strength_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", NAME, "data.dataset=digits", "--sanity", "much"]) == 1
    assert "8/255" in capsys.readouterr().err
    assert main(["evaluate", NAME, "data.dataset=digits", "--sanity", "l3:0.5"]) == 1
    assert "no norm named 'l3'" in capsys.readouterr().err


def test_findings_do_not_depend_on_how_many_images_are_looked_at_at_once() -> None:
    model = vitruvius.create_model(NAME, depth=2).eval()
    vitruvius.rewire(model, part("rpc", iterations=2), where="blocks.1.attn")
    x, y = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 4, 4, 9])
    plan = Sanity(eps=8 / 255, steps=6, queries=20, long_queries=30, hops=2, twins=make_twins(model))
    sizes: list[int] = []
    handle = model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    few = replace(plan, batch_size=2)(model, x, y)
    handle.remove()
    assert max(sizes) == 2
    whole = plan(model, x, y)
    assert [finding.passed for finding in few] == [finding.passed for finding in whole]
    for ours, theirs in zip(few, whole, strict=True):
        assert ours.numbers == pytest.approx(theirs.numbers, abs=1e-4)


def test_an_order_may_be_missed_by_one_image_in_a_hundred_and_by_no_more() -> None:
    x, y = torch.rand(400, 1, 2, 2), torch.zeros(400, dtype=torch.int64)
    examined = _Examination(Sanity(eps=0.1), nn.Flatten(), x, y, y, no_progress)
    for broken, passed in ((4, True), (5, False)):
        examined._not_stronger("black box", "a search", torch.arange(400) >= broken)
        half, more = (torch.arange(400) < number for number in (200, 200 + broken))
        examined._falling("more steps", "with steps", [1, 2], [half, more], "steps")
        assert [finding.passed for finding in examined.found[-2:]] == [passed, passed]


@pytest.mark.parametrize(
    ("parts", "twin"),
    [
        (["rpc"], ["symmetric"]),
        ([part("rpc", asymmetric=True)], ["softmax"]),
        ([part("top_k", share=0.2), "entmax"], ["softmax"]),
        (["pro"], ["softmax"]),
        (["softpick"], ["softmax"]),
        (["twicing"], ["softmax"]),
        (["elliptical", "sigmoid"], ["softmax"]),
        ([part("tome", r=4)], ["softmax"]),
        ([part("truncated", rank=1), "softpick"], ["softmax"]),
    ],
    ids=str,
)
def test_a_twin_has_the_same_weights_and_attention_that_hides_nothing(parts: list[str], twin: list[str]) -> None:
    model = vitruvius.create_model(NAME, depth=2, attention=parts, seed=3).eval()
    expected = vitruvius.create_model(NAME, depth=2, attention=twin, seed=3).eval()
    expected.load_state_dict(model.state_dict())
    x = torch.rand(2, 3, 8, 8)
    before = model(x)
    twins = make_twins(model)
    assert list(twins) == ["plain"]
    torch.testing.assert_close(twins["plain"](x), expected(x))
    assert torch.equal(model(x), before)


def test_parts_without_a_twin_keep_their_parameters_in_it() -> None:
    model = vitruvius.create_model(NAME, depth=1, attention=[part("low_rank", rank=1), "softpick"], seed=3).eval()
    expected = vitruvius.create_model(NAME, depth=1, attention=[part("low_rank", rank=1)], seed=3).eval()
    expected.load_state_dict(model.state_dict())
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(make_twins(model)["plain"](x), expected(x))


def test_a_model_in_half_precision_is_attacked_through_float32() -> None:
    model = vitruvius.create_model(NAME, depth=1).eval().bfloat16()
    twins = make_twins(model)
    assert list(twins) == ["float32"]
    x = torch.rand(2, 3, 8, 8)
    assert twins["float32"](x).dtype == torch.float32


@pytest.mark.usefixtures("no_long_search")
def test_progress_says_which_check_is_made_how_far_it_is_and_what_is_left() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=160)
    told: list[str] = []
    with Bar("checking", console=console) as bar:

        def progress(done: float, total: float | None, text: str = "", /) -> None:
            bar(done, total, text)
            told.append(bar.sentence())

        net = vitruvius.create_model(NAME, depth=1).eval()
        data = DataConfig(val_num_samples=16, batch_size=8)
        loader = eval_loader(data, input_size=net.data_config)
        examine(net, loader, 8 / 255, images=16, progress=progress)
    pattern = r"checking: \d+/1\d, more steps, batch 2 of 2, \d+ of 16 images robust .+, step \d+ of \d+, .+ left"
    assert any(re.fullmatch(pattern, line) for line in told), told[:40]
    assert [line for line in told if not line.startswith("checking: ")] == []
    names = dict.fromkeys(line.split(", ")[1] for line in told)
    assert list(names)[:2] == ["white box", "first look"]
    assert {"black box", "longer black box", "decision based"} <= set(names)
