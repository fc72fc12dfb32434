"""Auto-encoders begin from what the model knows; masks of a run come from its checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch

import vitruvius
from vitruvius._files import save_tensors
from vitruvius._yaml import dump_yaml
from vitruvius.attention import part
from vitruvius.models.config import AttentionRule, ModelConfig
from vitruvius.models.create import create_from_config
from vitruvius.surgery.folding import start_low_rank

NAME = "vitruvius/vit_digits"
RULE = AttentionRule(parts=[{"use": "low_rank", "rank": 2}])


def error(model: torch.nn.Module, plain: torch.nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - plain(x)).norm())


def test_a_low_rank_model_begins_near_the_model_it_comes_from() -> None:
    x = torch.rand(4, 3, 8, 8)
    plain = vitruvius.create_model(NAME, seed=3, init="skip")
    near = vitruvius.create_model(NAME, seed=3, init="skip", attention=[part("low_rank", rank=2)])
    far = vitruvius.create_model(NAME, seed=3, init="skip", attention=[part("low_rank", rank=2, start="released")])
    assert error(near, plain, x) < error(far, plain, x)


def test_weights_that_lack_the_auto_encoder_start_it(tmp_path: Path) -> None:
    plain = vitruvius.create_model(NAME, seed=3, init="skip")
    save_tensors(tmp_path / "plain.safetensors", plain.model.state_dict())
    config = ModelConfig(name=NAME, weights=str(tmp_path / "plain.safetensors"))
    model = create_from_config(config, [RULE], seed=0)
    expected = vitruvius.create_model(NAME, seed=3, init="skip", attention=[RULE])
    start_low_rank(expected)
    for key, value in expected.model.state_dict().items():
        torch.testing.assert_close(model.model.state_dict()[key], value, msg=key)


def test_weights_that_bring_an_auto_encoder_keep_it(tmp_path: Path) -> None:
    trained = vitruvius.create_model(NAME, seed=3, attention=[RULE])
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.01)
    save_tensors(tmp_path / "trained.safetensors", trained.model.state_dict())
    config = ModelConfig(name=NAME, weights=str(tmp_path / "trained.safetensors"))
    model = create_from_config(config, [RULE], seed=0)
    for key, value in trained.model.state_dict().items():
        assert torch.equal(model.model.state_dict()[key], value), key


def test_a_run_with_a_mask_loads_without_the_file_the_mask_came_from(tmp_path: Path) -> None:
    keep = torch.rand(3, 16, 16) > 0.5
    keep |= torch.eye(16, dtype=torch.bool)
    save_tensors(tmp_path / "masks.safetensors", {f"blocks.{i}.attn": keep for i in range(4)})
    rule = AttentionRule(parts=[{"use": "mask", "file": str(tmp_path / "masks.safetensors")}])
    model = vitruvius.create_model(NAME, attention=[rule])
    run = tmp_path / "run"
    save_tensors(run / "best.safetensors", model.model.state_dict())
    (run / "config.yaml").write_text(dump_yaml({"model": {"name": NAME}, "attention": [rule], "seed": 0}))
    (tmp_path / "masks.safetensors").unlink()
    x = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(vitruvius.load_model(run)(x), model(x))
    assert not torch.allclose(vitruvius.create_model(NAME)(x), model(x), atol=1e-6)
