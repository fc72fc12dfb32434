"""Each code base's own layout becomes a model that computes what the original did."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from layouts import LEVIT, VIT, XCIT, old_levit, randomised, save, tiny_levit, tiny_vit
from safetensors import safe_open
from timm.layers import build_sincos2d_pos_embed
from timm.models.xcit import Xcit

from vitruvius._errors import CheckpointError
from vitruvius.attention import part
from vitruvius.converters import convert
from vitruvius.models import restride
from vitruvius.models.resnets import WideResNet
from vitruvius.surgery import rewire

GOLDEN = Path(__file__).parent.parent / "golden" / "rpc_model.safetensors"
DEIT = "deit_tiny_patch16_224"


def inner_of(converted, dtype=torch.float32):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return converted.build().model.to(dtype).eval()


def golden_network():
    with safe_open(GOLDEN, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        cases = json.loads(file.metadata()["cases"])
    return {key.removeprefix("sd."): tensors[key] for key in tensors if key.startswith("sd.")}, tensors, cases


@pytest.mark.parametrize("case", golden_network()[2], ids=lambda case: case["id"])
def test_kpca_networks_compute_the_golden_logits_and_input_gradients(tmp_path, case):
    state, tensors, _ = golden_network()
    args = {"model": DEIT, "robust": False, "num_iter": 1, "lambd": 0.0, "layer": 0}
    args |= {"robust": case.get("robust", False), "num_iter": case.get("n", 1), "lambd": case.get("lambd", 0.0)}
    args["layer"] = case.get("layer", 0)
    path = save(tmp_path / "c.pth", {f"module.{key}": value for key, value in state.items()}, args=args)
    model = inner_of(convert(path, "kpca"), torch.float64)
    images = tensors["images"].clone().requires_grad_()
    # weights pass through float32 on their way into the model
    model.load_state_dict(model.state_dict() | convert(path, "kpca").state_dict)
    logits = model(images)
    torch.testing.assert_close(logits, tensors[f"{case['id']}.logits"], rtol=1e-10, atol=1e-10)
    (gradient,) = torch.autograd.grad(logits.square().sum(), images)
    expected = tensors[f"{case['id']}.grad_images"]
    assert (gradient - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_kpca_fills_the_idle_queries_with_keys_so_that_plain_timm_is_symmetric(tmp_path):
    state, tensors, _ = golden_network()
    converted = convert(save(tmp_path / "c.pth", state, args={"model": DEIT, "robust": False}), "kpca")
    plain = timm.models.VisionTransformer(
        **{k: v for k, v in converted.model.items() if k not in ("name", "mean", "std")}
    )
    plain.double().load_state_dict(converted.state_dict)
    torch.testing.assert_close(plain.eval()(tensors["images"]), tensors["plain.logits"], rtol=1e-10, atol=1e-10)
    assert any("idle q rows" in note for note in converted.notes)


def test_kpca_settings_may_be_given_when_the_file_has_none(tmp_path):
    state, *_ = golden_network()
    torch.save(state, tmp_path / "c.pth")
    with pytest.raises(CheckpointError, match="how many heads"):
        convert(tmp_path / "c.pth", "kpca")
    converted = convert(tmp_path / "c.pth", "kpca", num_heads=3)
    assert converted.attention == [{"where": "blocks.*.attn", "parts": [{"use": "symmetric"}]}]
    assert any("robust=true" in note for note in converted.notes)
    given = {"robust": True, "iterations": 2, "sparsity": 3.0, "layer": 1}
    rules = convert(tmp_path / "c.pth", "kpca", num_heads=3, **given).attention
    pursuit = {"use": "rpc", "iterations": 2, "sparsity": 3.0, "variant": "released"}
    assert [rule["parts"][0] for rule in rules] == [{"use": "symmetric"}, pursuit, {"use": "symmetric"}]


@pytest.mark.parametrize("form", ["matrix", "alpha"])
def test_kpca_scaled_attention_brings_its_s(tmp_path, form):
    model = tiny_vit()
    shape = (3, 17, 17) if form == "matrix" else (1,)
    scales = {
        f"blocks.{i}.attn.s": 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(3)
    }
    path = save(tmp_path / "c.pth", model.state_dict() | scales, args={"model": DEIT, "s_scalar": form == "alpha"})
    converted = convert(path, "kpca")
    rewire(model, part("scaled", form=form))
    own = {f"blocks.{i}.attn.core.scaled.{form}": scales[f"blocks.{i}.attn.s"] for i in range(3)}
    model.load_state_dict(own, strict=False)
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(inner_of(converted)(x), model(x))


@pytest.mark.parametrize(("source", "name", "heads"), [("kpca", DEIT, 6), ("reproduction", "vit_tiny_patch16_224", 3)])
def test_reconstruction_networks_standardise_and_have_the_heads_of_their_factory(tmp_path, source, name, heads):
    model = tiny_vit(num_heads=heads)
    converted = convert(save(tmp_path / "c.pth", model.state_dict(), args={"model": name}), source)
    assert converted.model["num_heads"] == heads
    assert converted.model["mean"] == (0.485, 0.456, 0.406)  # its harness normalised so, also for vit_tiny
    rewire(model, "standardised")
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(inner_of(converted)(x), model(x))


def auto_encoders(sites, heads, rank, tensors="qk"):
    generator = torch.Generator().manual_seed(5)
    made = {}
    for site in sites:
        for tensor in tensors:
            made[f"{site}.encoder_{tensor}.weight"] = torch.randn(rank, heads, generator=generator)
            made[f"{site}.encoder_{tensor}.bias"] = torch.randn(rank, generator=generator)
            made[f"{site}.decoder_{tensor}.weight"] = torch.randn(heads, rank, generator=generator)
            made[f"{site}.decoder_{tensor}.bias"] = torch.randn(heads, generator=generator)
    return made


def mixed_by_hand(model, extra, keep):
    """ViTCoD's layer written out: heads last, encoder, decoder, −inf where pruned."""

    def attend(attn, site):
        def forward(x, **_):
            B, N, C = x.shape
            q, k, v = attn.qkv(x).reshape(B, N, 3, 3, C // 3).permute(2, 0, 3, 1, 4)
            made = []
            for tensor, y in (("q", q), ("k", k)):
                flat = y.reshape(B, 3, -1).mT
                for half in ("encoder", "decoder"):
                    name = f"{site}.{half}_{tensor}"
                    flat = torch.nn.functional.linear(flat, extra[f"{name}.weight"], extra[f"{name}.bias"])
                made.append(flat.mT.reshape(B, 3, N, -1))
            logits = made[0] @ made[1].mT * attn.scale
            logits = logits if keep is None else logits.masked_fill(~keep[site], -torch.inf)
            return attn.proj((logits.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))

        return forward

    for i, block in enumerate(model.blocks):
        block.attn.forward = attend(block.attn, f"blocks.{i}.attn")
    return model


@pytest.mark.parametrize("masked", [False, True])
def test_vitcod_deit_brings_its_auto_encoders_and_masks(tmp_path, masked):
    model, names = tiny_vit(), [f"blocks.{i}.attn" for i in range(3)]
    extra = auto_encoders(names, heads=3, rank=2)
    sums = {f"{name}.attention_sum": torch.ones(3, 17, 17) for name in names}
    path = save(
        tmp_path / "c.pth", model.state_dict() | extra | sums, args={"model": DEIT, "svd_type": "mix_head_fc_qk"}
    )
    pruned = np.random.default_rng(0).random((3, 3, 17, 17)) < 0.7
    pruned[..., 0] = False
    np.save(tmp_path / "info_0.7.npy", pruned)
    converted = convert(path, "vitcod", **({"mask": str(tmp_path / "info_0.7.npy")} if masked else {}))
    keep = dict(zip(names, ~torch.from_numpy(pruned), strict=True)) if masked else None
    x = torch.randn(2, 3, 16, 16)
    expected = mixed_by_hand(model, extra, keep)(x)
    torch.testing.assert_close(inner_of(converted)(x), expected, rtol=1e-4, atol=1e-4)
    assert any("attention_sum" in note for note in converted.notes)
    assert [rule["where"] for rule in converted.attention] == ["blocks.*.attn"]
    assert converted.attention[0]["parts"][0] == {
        "use": "low_rank",
        "rank": 2,
        "tensors": "qk",
        "reconstruction": "released",
    }


def test_vitcod_masks_that_do_not_fit_are_refused(tmp_path):
    state = tiny_vit().state_dict() | auto_encoders([f"blocks.{i}.attn" for i in range(3)], 3, 2)
    path = save(tmp_path / "c.pth", state, args={"model": DEIT})
    np.save(tmp_path / "short.npy", np.zeros((2, 3, 17, 17), dtype=bool))
    with pytest.raises(CheckpointError, match="does not fit the 3 attentions"):
        convert(path, "vitcod", mask=str(tmp_path / "short.npy"))
    np.save(tmp_path / "object.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(CheckpointError, match="not one of ViTCoD's arrays"):
        convert(path, "vitcod", mask=str(tmp_path / "object.npy"))


def test_vitcod_levit_with_auto_encoders_and_a_folder_of_masks(tmp_path):
    model = tiny_levit()
    sites = {"blocks.0.m": ("stages.0.blocks.0.attn", 2), "blocks.2.m": ("stages.0.blocks.1.attn", 2)}
    sites |= {"blocks.6.m": ("stages.1.blocks.0.attn", 3), "blocks.10.m": ("stages.2.blocks.0.attn", 4)}
    state = old_levit(model)
    for old, (_, heads) in sites.items():
        state |= auto_encoders([old], heads, 2)
    sizes = {"dpt0": (2, 2, 16, 16), "dpt1": (1, 3, 4, 4), "dpt2": (1, 4, 1, 1), "subsample0": (1, 4, 4, 16)}
    for name, shape in sizes.items():
        pruned = np.random.default_rng(1).random(shape) < 0.5
        pruned[..., 0] = False
        np.save(tmp_path / f"mask_{name}.npy", pruned)
    path = save(tmp_path / "c.pth", state, args={"model": "LeViT_128"})
    converted = convert(path, "vitcod", mask=str(tmp_path))
    assert converted.model["embed_dim"] == LEVIT["embed_dim"]
    row = [f"stages.{stage}.blocks.*.attn" for stage in range(3)]
    assert [rule["where"] for rule in converted.attention] == [*row, "stages.1.downsample.attn_downsample"]
    built = inner_of(converted)
    keys = built.state_dict()
    for old, (site, _) in sites.items():
        assert torch.equal(keys[f"{site}.core.low_rank.k.1.bias"], state[f"{old}.decoder_k.bias"])
    assert built(torch.randn(2, 3, 64, 64)).isfinite().all()


def test_levit_of_its_authors_computes_what_timms_does(tmp_path):
    model = tiny_levit()
    path = save(tmp_path / "c.pth", old_levit(model), args={"model": "LeViT_128"})
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(inner_of(convert(path, "deit"))(x), model(x))


def test_structured_init_gets_its_unsaved_position_table_back(tmp_path):
    model = randomised(timm.models.VisionTransformer(**{**VIT, "class_token": False, "global_pool": "avg"}))
    model.pos_embed.data = build_sincos2d_pos_embed([4, 4], dim=12)[None]
    state = {key: value for key, value in model.state_dict().items() if key != "pos_embed"}
    args = {"model": "vit_tiny_patch2_32", "model_kwargs": {"num_heads": 3, "sin_pe": True}, "img_size": 16}
    args |= {"mean": [0.4914, 0.4822, 0.4465], "std": [0.2471, 0.2435, 0.2616]}
    path = save(tmp_path / "c.pth.tar", state, key="state_dict", args=args, arch="vit_tiny_patch2_32")
    converted = convert(path, "structured")
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(inner_of(converted)(x), model(x))
    assert converted.model["name"] == "vitruvius/vit_tiny_patch2_32"
    assert converted.model["mean"] == (0.4914, 0.4822, 0.4465)
    assert any("sin-cos" in note for note in converted.notes)


def test_structured_init_convmixers_are_refused_with_the_reason(tmp_path):
    path = save(tmp_path / "c.pth", {"stem.0.weight": torch.ones(2, 3, 2, 2)}, key="state_dict", arch="convmixer")
    with pytest.raises(CheckpointError, match="never saved"):
        convert(path, "structured")


def light_xcit(patch):
    return restride(randomised(Xcit(patch_size=16, tokens_norm=True, img_size=32, **XCIT)), patch)


def test_light_xcit_p4_weights_find_their_re_strided_model(tmp_path, monkeypatch):
    model = light_xcit(4)
    monkeypatch.setitem(
        __import__("vitruvius.models", fromlist=["models"]).models._pieces,
        "vitruvius/xcit_small_12_p4_32",
        lambda **kwargs: restride(Xcit(patch_size=16, tokens_norm=True, img_size=32, **{**XCIT, **kwargs}), 4),
    )
    torch.save(model.state_dict(), tmp_path / "bare.pth.tar")  # as released: the model alone
    stats = {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2471, 0.2435, 0.2616)}
    converted = convert(tmp_path / "bare.pth.tar", "light", model_name="xcit_small_12_p4_32", **stats)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(inner_of(converted)(x), model(x))
    assert converted.model["mean"] == stats["mean"]
    path = tmp_path / "best.pth.tar"
    torch.save(
        {"model": model.state_dict(), "arch": "xcit_small_12_p4_32", "hparams": {"normalize_model": False}}, path
    )
    assert convert(path, "light").model["std"] == (1.0, 1.0, 1.0)
    with pytest.raises(CheckpointError, match="Set model_name"):
        convert(tmp_path / "bare.pth.tar", "light")
    wrapped = {f"model.{key}": value for key, value in model.state_dict().items()}
    wrapped |= {"normalize.mean": torch.full((3, 1, 1), 0.25), "normalize.std": torch.full((3, 1, 1), 0.5)}
    torch.save({"model": wrapped, "arch": "xcit_small_12_p4_32"}, path)
    assert convert(path, "light").model["mean"] == (0.25, 0.25, 0.25)


def hollow(model):
    """Weights of the right shapes that take no room: each a single zero, repeated."""
    return {key: torch.zeros((), dtype=value.dtype).expand(value.shape) for key, value in model.state_dict().items()}


def on_meta(make):
    with torch.device("meta"):
        return make()


LIGHT = {
    "xcit_medium_12_p16_224": lambda: Xcit(patch_size=16, embed_dim=512, depth=12, num_heads=8, tokens_norm=True),
    "xcit_large_12_h8_p16_224": lambda: Xcit(patch_size=16, embed_dim=768, depth=12, num_heads=8, tokens_norm=True),
    "xcit_small_12_p8_32": lambda: Xcit(patch_size=16, embed_dim=384, depth=12, num_heads=8, tokens_norm=True),
    "cait_s12_224": lambda: timm.models.Cait(patch_size=16, embed_dim=384, depth=12, num_heads=8),
    "resnet18_gelu": lambda: timm.create_model("resnet18", act_layer="gelu"),
    "wide_resnet28_10": lambda: WideResNet(depth=28, width=10),
}


@pytest.mark.parametrize("name", LIGHT)
def test_light_models_of_the_full_size_fit_strictly(tmp_path, name):
    path = tmp_path / "c.pth.tar"
    torch.save({"model": hollow(on_meta(LIGHT[name])), "arch": name, "hparams": {"normalize_model": False}}, path)
    assert convert(path, "light").model["std"] == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "deit_base_patch16_384"])
def test_deit_models_of_the_full_size_fit_strictly(tmp_path, name):
    model = on_meta(lambda: timm.create_model(name, num_classes=100))
    size = int(name.rsplit("_", 1)[1])
    converted = convert(save(tmp_path / "c.pth", hollow(model), args={"model": name, "input_size": size}), "deit")
    assert converted.model["num_classes"] == 100


def test_deit_three_layer_scales_are_renamed(tmp_path):
    model = on_meta(lambda: timm.create_model("deit3_small_patch16_224", num_classes=3))
    state = {k.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v for k, v in hollow(model).items()}
    assert any("gamma_1" in key for key in state)
    converted = convert(save(tmp_path / "c.pth", state, args={"model": "deit_small_patch16_LS"}), "deit")
    assert converted.state_dict.keys() == model.state_dict().keys()


def test_xcit_of_its_authors_has_its_class_attention_split(tmp_path):
    model = on_meta(lambda: timm.create_model("xcit_nano_12_p16_224"))
    state = {k.replace("pos_embed.", "pos_embeder."): v for k, v in hollow(model).items()}
    for i in range(2):
        for kind in ("weight", "bias"):
            parts = [state.pop(f"cls_attn_blocks.{i}.attn.{t}.{kind}") for t in "qkv"]
            state[f"cls_attn_blocks.{i}.attn.qkv.{kind}"] = torch.cat(parts)
    converted = convert(save(tmp_path / "c.pth", state, args={"model": "xcit_nano_12_p16_224"}), "deit")
    assert converted.state_dict.keys() == model.state_dict().keys()
    assert not any("timm's own filter" in note for note in converted.notes)


def test_what_timms_filter_leaves_out_is_named(tmp_path):
    model = on_meta(lambda: timm.create_model("deit_tiny_patch16_224"))
    state = hollow(model) | {"pre_logits.fc.weight": torch.ones(1), "pre_logits.fc.bias": torch.ones(1)}
    converted = convert(save(tmp_path / "c.pth", state, args={"model": DEIT}), "deit")
    assert any("pre_logits.fc.weight, pre_logits.fc.bias" in note for note in converted.notes)


def test_timm_training_checkpoints(tmp_path):
    kwargs = {"img_size": 32, "num_classes": 3, "depth": 2}
    model = randomised(timm.create_model("test_vit", **kwargs))
    ema = {key: value * 2 for key, value in model.state_dict().items()}
    args = {"model": "test_vit", "model_kwargs": {"depth": 2}, "img_size": 32, "mean": [0.1] * 3, "std": [0.2] * 3}
    path = save(
        tmp_path / "c.pth.tar", model.state_dict(), key="state_dict", state_dict_ema=ema, arch="test_vit", args=args
    )
    converted = convert(path, "timm")
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(inner_of(converted)(x), model(x))
    assert converted.config["model"]["mean"] == [0.1] * 3
    assert torch.equal(convert(path, "timm", weights="ema").state_dict["head.bias"], ema["head.bias"])


def test_a_model_that_nobody_has_is_refused(tmp_path):
    path = save(tmp_path / "c.pth", {"a.weight": torch.ones(1)}, args={"model": "resnet50_nobody_has"})
    with pytest.raises(CheckpointError, match="'resnet50_nobody_has', which neither timm"):
        convert(path, "light")
