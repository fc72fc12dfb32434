"""Weights from files: strict, or every missing key explained."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import vitruvius
from small_run import small_run
from vitruvius._errors import CheckpointError, ConfigError, RunError
from vitruvius._files import atomic_write_bytes, atomic_write_text, save_tensors
from vitruvius.attention import part
from vitruvius.models import create_model, load_model, load_weights
from vitruvius.surgery import restore
from vitruvius.surgery.base import inner

SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 5}


def tiny(*parts: Any, seed: int = 0, **settings: Any) -> Any:
    return create_model("test_vit", attention=parts, seed=seed, **{**SMALL, **settings})


def assert_untouched(model: Any, before: dict[str, torch.Tensor]) -> None:
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("wrapping", [None, "state_dict", "model"])
def test_weights_come_from_safetensors_and_from_pth(wrapping: str | None, tmp_path: Path) -> None:
    source, x = tiny(seed=1), torch.rand(2, 3, 32, 32)
    state = inner(source).state_dict()
    torch.save({wrapping: state, "epoch": 3} if wrapping else state, tmp_path / "w.pth")
    save_file(state, tmp_path / "w.safetensors")
    for file in ("w.pth", "w.safetensors"):
        model = tiny(seed=2)
        assert load_weights(model, tmp_path / file) == []
        torch.testing.assert_close(model(x), source(x), rtol=0, atol=0)


@pytest.mark.parametrize("more", ["scaled", "mask"])
def test_a_checkpoint_of_fewer_parts_loads_into_more(more: str) -> None:
    source = tiny(part("low_rank", rank=1), seed=1)
    state = inner(source).state_dict()
    target = tiny(part("low_rank", rank=1), part(more, **({"keep": "all"} if more == "mask" else {})), seed=2)
    missing = load_weights(target, state)
    assert missing
    assert all(f".core.{more}." in key for key in missing)
    for key, value in state.items():
        assert torch.equal(inner(target).state_dict()[key], value)


def test_plain_weights_load_into_a_rewired_model_and_back_after_restore() -> None:
    plain = tiny(seed=1)
    rewired = tiny(part("low_rank", rank=1), seed=2)
    missing = load_weights(rewired, inner(plain).state_dict())
    assert all(".core.low_rank." in key for key in missing)
    upstream = timm.create_model("test_vit", **SMALL)
    upstream.load_state_dict(inner(restore(rewired)).state_dict(), strict=True)


def test_a_part_that_is_half_there_is_an_error() -> None:
    state = inner(tiny(part("low_rank", rank=1))).state_dict()
    lost = next(key for key in state if "blocks.0.attn.core.low_rank" in key)
    del state[lost]
    with pytest.raises(CheckpointError, match=rf"1 keys the weights lack \({lost}\)"):
        load_weights(tiny(part("low_rank", rank=1)), state)


def test_trained_parts_are_never_dropped_in_silence() -> None:
    state = inner(tiny(part("low_rank", rank=1))).state_dict()
    with pytest.raises(CheckpointError, match=r"16 keys the model does not have \(blocks.0.attn.core.low_rank.k"):
        load_weights(tiny(), state)


def test_weights_of_another_model_are_one_error_and_change_nothing(tmp_path: Path) -> None:
    save_file(timm.create_model("test_resnet", num_classes=5).state_dict(), tmp_path / "other.safetensors")
    model = tiny()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, tmp_path / "other.safetensors")
    letter = str(caught.value)
    assert "other.safetensors does not fit this VisionTransformer" in letter
    assert "keys the model does not have (" in letter
    assert "keys the weights lack (" in letter
    assert "Is it the same architecture, number of classes and attention?" in letter
    assert "\n" not in letter
    assert_untouched(model, before)


def test_another_number_of_classes_names_the_keys_and_shapes() -> None:
    model = tiny()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = r"2 shapes that differ \(head.weight \(7, 64\) → \(5, 64\), head.bias.*For other classes set model.reset"
    with pytest.raises(CheckpointError, match=expected):
        load_weights(model, inner(tiny(num_classes=7)).state_dict())
    assert_untouched(model, before)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("kind", ["safetensors", "pth"])
def test_a_truncated_file_is_one_error(kind: str, kept: float, tmp_path: Path) -> None:
    model, file = tiny(), tmp_path / f"w.{kind}"
    state = inner(model).state_dict()
    if kind == "pth":
        torch.save(state, file)
    else:
        save_file(state, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * kept)])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=str(file)):
        load_weights(model, file)
    assert_untouched(model, before)


def test_a_flipped_bit_in_our_own_file_is_noticed(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", "train.epochs=1")
    file = run / "last.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="its tensors do not match its checksum"):
        load_model(run, best=False)


def test_a_file_that_is_no_state_dict_or_not_there_is_said(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(CheckpointError, match=r"list.pth holds list, expected a state dict of tensors"):
        load_weights(tiny(), tmp_path / "list.pth")
    for missing in (tmp_path / "nothing.pth", tmp_path):
        with pytest.raises(CheckpointError, match=r"expected a run folder, a .safetensors or a .pth file"):
            load_weights(tiny(), missing)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64], ids=str)
def test_weights_that_are_no_floats_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = {**inner(model).state_dict(), "head.weight": inner(model).state_dict()["head.weight"].to(dtype)}
    torch.save(state, tmp_path / "w.pth")
    for source in (state, tmp_path / "w.pth"):
        with pytest.raises(CheckpointError, match=r"1 tensors that are not of floating point.*\(head.weight"):
            load_weights(model, source)
    assert_untouched(model, before)


def test_what_holds_no_weights_is_refused() -> None:
    for source in (None, 5, [1]):
        with pytest.raises(ConfigError, match="expected a state dict"):
            load_weights(tiny(), source)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"1 values are no tensors \(a\)"):
        load_weights(tiny(), {"a": "b"})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="None names no model"):
        vitruvius.load_model(None)  # type: ignore[arg-type]


def test_a_run_folder_is_a_model(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run", "attention=[{parts: [{use: rpc, iterations: 2}]}]", "model.mean=[0.1, 0.2, 0.3]")
    model = load_model(run)
    assert not model.training
    assert model.model.blocks[0].attn.core.rpc.iterations == 2
    assert model.statistics == ((0.1, 0.2, 0.3), (0.5, 0.5, 0.5))
    for best, name in ((True, "best"), (False, "last")):
        state = load_file(run / f"{name}.safetensors")
        found = inner(load_model(run, best=best)).state_dict()
        assert all(torch.equal(found[key], value) for key, value in state.items())
    other = create_model("vitruvius/vit_digits", depth=1, embed_dim=24)
    assert load_weights(other, run) == []


def test_weights_and_runs_may_lie_at_a_url() -> None:
    model, x = create_model("vitruvius/vit_digits", depth=1, seed=1), torch.rand(2, 3, 8, 8)
    config = "model: {name: vitruvius/vit_digits, kwargs: {depth: 1}, mean: [0.5, 0.5, 0.5], std: [0.5, 0.5, 0.5]}"
    atomic_write_text("memory://there/run/config.yaml", config)
    save_tensors("memory://there/run/best.safetensors", model.model.state_dict(), {})
    buffer = io.BytesIO()
    torch.save(model.model.state_dict(), buffer)
    atomic_write_bytes("memory://there/w.pth", buffer.getvalue())
    torch.testing.assert_close(load_model("memory://there/run")(x), model(x), rtol=0, atol=0)
    for place in ("memory://there/run", "memory://there/w.pth"):
        other = create_model("vitruvius/vit_digits", depth=1, seed=2)
        assert load_weights(other, place) == []
        torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="no weights at memory://there/nothing"):
        load_weights(model, "memory://there/nothing")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"is not a run folder: it has no config.yaml"):
        load_model(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=r"config.yaml: name is missing; expected text"):
        load_model(tmp_path)
    (tmp_path / "config.yaml").write_text("model: {name: vitruvius/vit_digits}\n")
    with pytest.raises(RunError, match="holds no weights yet"):
        load_model(tmp_path)
