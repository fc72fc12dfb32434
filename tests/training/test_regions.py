"""Compiling by region: the right blocks, the same answers, and only while a step runs."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from timm.models.xcit import Xcit

from vitruvius.tasks import tasks
from vitruvius.training.fast_step import Regions, TensorDropPath, repeated_blocks


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("test_vit", "Block", 6),
        ("test_resnet", "BasicBlock", 3),
        ("test_convnext", "ConvNeXtBlock", 9),
        ("xcit_nano_12_p16_224", "XCABlock", 12),
        ("swin_tiny_patch4_window7_224", "SwinTransformerBlock", 12),
    ],
)
def test_the_repeated_blocks_of_a_model_are_found(name: str, kind: str, count: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    found = [type(block).__name__ for block in repeated_blocks(model)]
    assert found.count(kind) == count


def test_kinds_of_which_there_are_few_are_left_as_they_are() -> None:
    with torch.device("meta"):
        model = timm.create_model("xcit_nano_12_p16_224")
    assert {type(block).__name__ for block in Regions(model).blocks} == {"XCABlock"}


class Counting:
    """A backend that counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: object) -> object:
        self.graphs += 1
        return graph.forward


def trades(model: torch.nn.Module, regions: Regions) -> None:
    """A step of TRADES as our task makes it: an answer without a gradient, attacks in eval mode, both passes."""
    task = tasks.make({"use": "trades", "eps": 8 / 255, "attack": {"use": "pgd", "steps": 2}}, model)
    task.train()
    with regions.compiled():
        task(torch.rand(2, 3, 32, 32), torch.tensor([0, 1]))["loss"].backward()


def test_a_step_of_trades_on_an_xcit_compiles_two_graphs() -> None:
    torch.compiler.reset()
    network = Xcit(img_size=32, patch_size=16, embed_dim=16, depth=9, num_heads=2, num_classes=3, drop_path_rate=0.1)
    count = Counting()
    trades(network, Regions(network, backend=count))  # type: ignore[arg-type]
    assert count.graphs == 2  # of the attack, and of the loss


def test_drop_rates_that_differ_from_block_to_block_share_their_graphs() -> None:
    torch.compiler.reset()
    network = VisionTransformer(
        img_size=32, patch_size=16, embed_dim=16, depth=4, num_heads=2, num_classes=3, drop_path_rate=0.3
    )
    before = list(network.modules())
    count = Counting()
    trades(network, Regions(network, backend=count))  # type: ignore[arg-type]
    assert count.graphs == 2
    assert list(network.modules()) == before


def test_paths_are_dropped_at_their_rate_and_what_is_kept_makes_up_for_it() -> None:
    torch.manual_seed(0)
    drop = TensorDropPath(torch.tensor(0.8), scale=True)
    x = torch.ones(20_000, 2, 1)
    kept = drop(x)
    assert set(kept.unique().tolist()) == {0.0, 1.25}
    assert torch.equal(kept[:, 0], kept[:, 1])
    assert float(kept.mean()) == pytest.approx(1.0, abs=0.02)
    assert torch.equal(drop.eval()(x), x)


def test_blocks_are_compiled_inside_a_step_alone_and_say_the_same() -> None:
    model = timm.create_model("test_vit").eval()
    x = torch.rand(2, 3, 160, 160)
    expected = model(x)
    count = Counting()
    regions = Regions(model, backend=count)  # type: ignore[arg-type]
    keys = list(model.state_dict())
    with regions.compiled():
        torch.testing.assert_close(model(x), expected)
    assert count.graphs == 1  # six blocks share one graph
    model(torch.rand(1, 3, 160, 160))
    assert count.graphs == 1
    assert list(model.state_dict()) == keys
