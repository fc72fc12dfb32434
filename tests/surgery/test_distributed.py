"""Rewired models train under DistributedDataParallel: two processes, one gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from families import FAMILIES
from two_processes import in_two_processes
from vitruvius._errors import SurgeryError
from vitruvius._processes import process_group
from vitruvius.attention import part
from vitruvius.surgery import rewire, survey

KEEP = torch.rand(2, 17, 17, generator=torch.Generator().manual_seed(0)) < 0.5
KEEP[..., 0] = True
CHAINS = {
    "softmax": ["softmax"],
    "all": [part("low_rank", tensors="k"), "symmetric", part("mask", keep=KEEP), part("rpc", iterations=2)],
}


def _half(rank: int, chain: str, folder: str) -> None:
    with process_group("cpu"):
        model, x = FAMILIES[0].randomised()
        parallel = DistributedDataParallel(rewire(model, *CHAINS[chain]))
        for _ in range(2):  # an unused parameter is reported in the second step
            model.zero_grad()
            parallel(x[rank : rank + 1]).square().mean().backward()
        torch.save([p.grad for p in model.parameters()], Path(folder) / f"{rank}.pt")
        with pytest.raises(SurgeryError, match="VisionTransformer is wrapped in DistributedDataParallel"):
            rewire(parallel, "softmax")
        assert len(survey(parallel)) == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("chain", CHAINS)
def test_two_processes_agree_with_one(chain: str, tmp_path: Path) -> None:
    in_two_processes(_half, chain, str(tmp_path), start="spawn")
    model, x = FAMILIES[0].randomised()
    rewire(model, *CHAINS[chain])(x).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    for rank in (0, 1):
        torch.testing.assert_close(torch.load(tmp_path / f"{rank}.pt"), expected, atol=1e-5, rtol=1e-4)
