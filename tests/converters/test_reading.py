"""Checkpoints are read as data: no pickled code runs, nothing is lost in silence, damage is told."""

import os
import pickle

import numpy as np
import pytest
import torch
from layouts import save, tiny_vit
from safetensors.torch import save_file

from vitruvius._errors import CheckpointError, ConfigError, UnknownName
from vitruvius.converters import convert
from vitruvius.converters.base import read_checkpoint

STATE = {"weight": torch.ones(2, 2), "bias": torch.zeros(2)}


class Trap:
    """Pickles as a call of os.system."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_pickled_code_is_never_run(tmp_path):
    witness = tmp_path / "witness"
    torch.save({"model": STATE, "args": Trap(f"touch {witness}")}, tmp_path / "trap.pth")
    with pytest.raises(CheckpointError, match="without running code"):
        read_checkpoint(tmp_path / "trap.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Trap(f"touch {witness}")))
    with pytest.raises(CheckpointError, match="without running code"):
        read_checkpoint(tmp_path / "plain.pth")
    assert not witness.exists()


def test_namespaces_numbers_and_paths_are_data(tmp_path):
    args = {"model": "deit_tiny", "lambd": 4.0, "output_dir": tmp_path, "clip": None}
    path = save(tmp_path / "c.pth", STATE, args=args, metric=np.float64(0.5), best=np.int64(3))
    checkpoint = read_checkpoint(path)
    assert checkpoint.args == args
    assert checkpoint.state.keys() == STATE.keys()


def test_what_is_left_behind_is_named(tmp_path):
    path = save(tmp_path / "c.pth", STATE, model_ema=STATE, scaler={"scale": 1.0})
    (rest, ema) = read_checkpoint(path).notes
    assert "optimizer, epoch, model_ema, scaler" in rest
    assert "weights=ema" in ema


@pytest.mark.parametrize(("key", "ema"), [("model", "model_ema"), ("state_dict", "state_dict_ema")])
def test_ema_weights_are_taken_when_asked_for(tmp_path, key, ema):
    other = {name: value + 1 for name, value in STATE.items()}
    path = save(tmp_path / "c.pth", STATE, key=key, **{ema: other})
    assert torch.equal(read_checkpoint(path).state["weight"], STATE["weight"])
    assert torch.equal(read_checkpoint(path, weights="ema").state["weight"], other["weight"])
    with pytest.raises(CheckpointError, match="no EMA weights"):
        read_checkpoint(save(tmp_path / "d.pth", STATE), weights="ema")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_prefixes_of_wrappers_come_off(tmp_path, prefix):
    path = save(tmp_path / "c.pth", {f"{prefix}{key}": value for key, value in STATE.items()})
    assert read_checkpoint(path).state.keys() == STATE.keys()


def test_bare_state_dicts_and_safetensors_are_read(tmp_path):
    torch.save(STATE, tmp_path / "c.pth")
    save_file(STATE, tmp_path / "c.safetensors")
    for name in ("c.pth", "c.safetensors"):
        assert read_checkpoint(tmp_path / name).state.keys() == STATE.keys()


def test_damage_is_told(tmp_path):
    path = tmp_path / "c.pth"
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        read_checkpoint(path)
    path.write_bytes(b"no checkpoint")
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(path)
    save(path, STATE)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(path)
    torch.save([1, 2], path)
    with pytest.raises(CheckpointError, match="holds list"):
        read_checkpoint(path)
    torch.save({"weights": STATE, "epoch": 1}, path)
    with pytest.raises(CheckpointError, match=r"no weights under model or state_dict; it has weights, epoch"):
        read_checkpoint(path)
    torch.save({"model": {"a": 1}}, path)
    with pytest.raises(CheckpointError, match="no plain state dict: a"):
        read_checkpoint(path)


def test_weights_that_are_not_finite_are_refused_by_name(tmp_path):
    path = save(tmp_path / "c.pth", STATE | {"bad": torch.tensor([1.0, torch.nan])})
    with pytest.raises(CheckpointError, match="'bad' holds numbers that are not finite"):
        read_checkpoint(path)


def test_unknown_sources_and_settings_are_refused(tmp_path):
    path = save(tmp_path / "c.pth", STATE)
    with pytest.raises(UnknownName, match="did you mean 'kpca'"):
        convert(path, "kcpa")
    with pytest.raises(ConfigError, match="num_head"):
        convert(path, "kpca", num_head=3)
    with pytest.raises(CheckpointError, match=r"lacks 'blocks\.0\.attn\.qkv\.weight'"):
        convert(path, "kpca")


def test_a_key_that_nobody_uses_and_one_that_is_missing_are_errors(tmp_path):
    whole, args = tiny_vit().state_dict(), {"model": "deit_tiny_patch16_224"}
    more = save(tmp_path / "more.pth", whole | {"blocks.0.attn.mystery": torch.ones(1)}, args=args)
    with pytest.raises(CheckpointError, match=r"does not have.*blocks\.0\.attn\.mystery"):
        convert(more, "reproduction", num_heads=3)
    del whole["blocks.1.norm1.weight"]
    with pytest.raises(CheckpointError, match=r"blocks\.1\.norm1\.weight"):
        convert(save(tmp_path / "less.pth", whole, args=args), "reproduction", num_heads=3)
