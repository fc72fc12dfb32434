"""Gradients reach PyTorch's attention in the memory layout of its output, however they come."""

import pytest
import torch

from vitruvius.attention.softmax import matched


class Spy(torch.autograd.Function):
    """Notes the strides of the gradient that passes."""

    seen: list[tuple[int, ...]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_out):
        Spy.seen.append(grad_out.stride())
        return grad_out


@pytest.mark.parametrize("rows_outside", [False, True])
@pytest.mark.parametrize("layout", ["heads outside", "rows outside", "part of another", "broadcast"])
def test_the_gradient_arrives_as_the_output_lies(rows_outside, layout):
    leaf = torch.randn(2, 5, 3, 4) if rows_outside else torch.randn(2, 3, 5, 4)
    x = (leaf.transpose(1, 2) if rows_outside else leaf).requires_grad_()
    grad_out = {
        "heads outside": torch.randn(2, 3, 5, 4),
        "rows outside": torch.randn(2, 5, 3, 4).transpose(1, 2),
        "part of another": torch.randn(2, 5, 3, 3, 4)[:, :, 1].transpose(1, 2),
        "broadcast": torch.randn(2, 1, 1, 4).expand(2, 3, 5, 4),
    }[layout]
    Spy.seen.clear()
    (found,) = torch.autograd.grad(matched(Spy.apply(x)), x, grad_out)
    assert Spy.seen == [x.stride()]
    assert torch.equal(found, grad_out)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler of torch 2.11 does
def test_the_compiler_takes_it_as_one_graph():
    x = torch.randn(2, 5, 3, 4).transpose(1, 2).requires_grad_()
    grad_out = torch.randn(2, 3, 5, 4)
    compiled = torch.compile(lambda x: matched(x * 2), fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(x), x, grad_out)
    assert torch.equal(found, 2 * grad_out)
