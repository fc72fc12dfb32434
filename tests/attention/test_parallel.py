"""Under DistributedDataParallel every parameter of a chain takes part, with the gradients of the model alone."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from vitruvius.attention import part
from vitruvius.surgery import rewire


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("group")
def test_a_chain_trains_two_steps_without_unused_parameters(tiny_vit):
    model, x = tiny_vit
    keep = torch.rand(2, 17, 17, generator=torch.Generator().manual_seed(0)) < 0.5
    keep[..., 0] = True
    rewire(model, part("low_rank", tensors="k"), "symmetric", part("mask", keep=keep), part("rpc", iterations=2))
    alone = copy.deepcopy(model)
    parallel = DistributedDataParallel(model)
    for _ in range(2):  # an unused parameter is reported in the second step
        parallel(x).square().sum().backward()
    for _ in range(2):
        alone(x).square().sum().backward()
    for (name, a), b in zip(alone.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, msg=name)
