"""LoRA of PEFT on rewired models: every weight that it adds gets a gradient, or a warning says which do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.nn.parallel import DistributedDataParallel

from families import FAMILIES
from two_processes import in_two_processes
from vitruvius._processes import process_group
from vitruvius.surgery import rewire

peft = pytest.importorskip("peft", reason="needs peft (extra hf)")
transformers = pytest.importorskip("transformers", reason="needs transformers (extra hf)")


def of_transformers() -> tuple[nn.Module, Tensor]:
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32, image_size=8, patch_size=4
    )
    return transformers.ViTForImageClassification(config), torch.rand(2, 3, 8, 8)


def of_timm() -> tuple[nn.Module, Tensor]:
    import timm

    settings = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "qkv_fused": False}
    return timm.create_model("eva02_tiny_patch14_224", **settings), torch.rand(2, 3, 32, 32)


def idle(model: nn.Module, x: Tensor) -> list[str]:
    """Names of trained weights that get no gradient."""
    out: Any = model(x)
    getattr(out, "logits", out).sum().backward()
    return [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]


@pytest.mark.parametrize("make", [of_transformers, of_timm])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of the libraries
def test_weights_of_lora_train_or_are_named(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    def adapted(core: str, modules: str | list[str], **settings: Any) -> tuple[Any, list[str]]:
        model, x = make()
        lora = peft.LoraConfig(r=2, target_modules=modules, **settings)
        found = peft.get_peft_model(rewire(model, core), lora)
        return found, idle(found, x)

    assert adapted("softmax", ["q_proj", "v_proj"])[1] == []
    assert adapted("rpc", ["k_proj", "v_proj"])[1] == []
    assert adapted("rpc", "all-linear", exclude_modules=["q_proj"])[1] == []
    with pytest.warns(UserWarning, match=r"q_proj was given .* \(lora_A.default.weight, lora_B.default.weight\)"):
        model, names = adapted("rpc", ["q_proj", "v_proj"])
    assert len(names) == 4
    assert all("q_proj" in name for name in names)
    model.merge_and_unload()  # gives the layers back, without a word


def test_lora_on_queries_keys_and_values_in_one_trains_whole() -> None:
    model, x = FAMILIES[0].randomised()
    adapted = peft.get_peft_model(rewire(model, "rpc"), peft.LoraConfig(r=2, target_modules=["qkv"]))
    assert idle(adapted, x) == []


def _two_steps(rank: int, module: str) -> None:
    model, x = of_transformers()
    with process_group("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora = peft.LoraConfig(r=2, target_modules=[module, "v_proj"])
        parallel = DistributedDataParallel(peft.get_peft_model(rewire(model, "rpc"), lora))
        for _ in range(2):
            parallel(x).logits.sum().backward()


@pytest.mark.filterwarnings("ignore")
def test_plain_distributed_training_goes_on_with_lora_at_keys_and_stops_at_queries() -> None:
    in_two_processes(_two_steps, "k_proj")
    with pytest.raises(ProcessRaisedException, match="Expected to have finished reduction"):
        in_two_processes(_two_steps, "q_proj")
