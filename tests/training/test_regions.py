"""Compiling by region: the right blocks, the same answers, and only while a step runs."""

from __future__ import annotations

import pytest
import timm
import torch

from vitruvius.training._fast.regions import Regions, repeated_blocks


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


def test_blocks_are_compiled_inside_a_step_alone_and_say_the_same() -> None:
    model = timm.create_model("test_vit").eval()
    x = torch.rand(2, 3, 160, 160)
    expected = model(x)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    regions = Regions(model, backend=backend)  # type: ignore[arg-type]
    keys = list(model.state_dict())
    with regions.compiled():
        torch.testing.assert_close(model(x), expected)
    assert len(graphs) == 1  # six blocks share one graph
    model(torch.rand(1, 3, 160, 160))
    assert len(graphs) == 1
    assert list(model.state_dict()) == keys
