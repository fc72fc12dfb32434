"""Train and evaluate the digits on an XLA device, through the package's own loop: a check, not a supported way.

torch_xla ends with 2.9, below the range of PyTorch that vitruvius supports (2.11 on), so this runs in an environment of
its own, with the package on the path instead of installed:

    python -m venv xla && xla/bin/pip install torch==2.9.* torch_xla==2.9.* torchvision==0.24.* timm==1.0.30 \
        safetensors pyyaml pydantic scikit-learn rich fsspec matplotlib jinja2
    PJRT_DEVICE=CPU PYTHONPATH=src xla/bin/python scripts/xla_digits.py --out runs/xla

What torch_xla 2.9 needs is supplied here: a random state that `torch.random.fork_rng` can find, `amax` and `amin` over
all numbers of a tensor (they come back unreduced), and marks before and after every update, where its graph ends.
"""

from __future__ import annotations

import argparse
import json
import time
import types
from pathlib import Path
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch.optim.optimizer import register_optimizer_step_post_hook


def mend_torch_xla() -> None:
    """Before the package is imported."""
    device_module: Any = types.ModuleType("torch.xla")
    device_module.device_count, device_module.current_device = lambda: 1, lambda: 0
    device_module.is_available, device_module._is_in_bad_fork = lambda: True, lambda: False
    device_module.manual_seed_all = xm.set_rng_state
    device_module.get_rng_state = lambda _=None: torch.tensor(xm.get_rng_state())
    device_module.set_rng_state = lambda state, _=None: xm.set_rng_state(int(state))
    torch._register_device_module("xla", device_module)
    register_optimizer_step_post_hook(lambda *_: torch_xla.sync())  # one graph an update, compiled once
    for name, whole in (("amax", torch.Tensor.max), ("amin", torch.Tensor.min)):
        setattr(torch.Tensor, name, _reducing(getattr(torch.Tensor, name), whole))


def mark_batches() -> None:
    """A graph ends where a batch is ready: slices at other places would otherwise make every step another graph."""
    from vitruvius.data._tensors import TensorLoader

    upstream = TensorLoader.with_ids

    def with_ids(loader: Any) -> Any:
        for batch in upstream(loader):
            torch_xla.sync()
            yield batch

    TensorLoader.with_ids = with_ids  # type: ignore[method-assign]


def _reducing(upstream: Any, whole: Any) -> Any:
    def reduce(tensor: torch.Tensor, dim: Any = (), keepdim: bool = False) -> torch.Tensor:
        return whole(tensor) if dim in ((), None) and not keepdim else upstream(tensor, dim, keepdim)

    return reduce


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--recipe", default="recipes/digits/softmax.yaml")
    parser.add_argument("--out", default="runs/xla_digits")
    options = parser.parse_args()
    mend_torch_xla()
    mark_batches()

    from vitruvius.data import eval_loader
    from vitruvius.evaluation import evaluate, make_threat
    from vitruvius.models import load_model
    from vitruvius.training import read_recipe, train

    begun = time.perf_counter()
    config = read_recipe(options.recipe, [f"out={options.out}", "train.device=xla", *options.overrides])
    run = train(config, quiet=True)
    rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    print(f"torch {torch.__version__}, torch_xla {torch_xla.__version__}, {xm.xla_device_hw(torch_xla.device())}")
    print(
        f"{len(rows)} epochs in {time.perf_counter() - begun:.0f} s, held-out accuracy {rows[-1]['val_accuracy']:.3f}"
    )
    model = load_model(run).to(torch_xla.device()).eval()
    loader = eval_loader(config.data, input_size=model.data_config, device=torch_xla.device())
    print(evaluate(model, loader, [make_threat("pgd:eps=0.1,steps=5")]))


if __name__ == "__main__":
    main()
