"""Checkpoints laid out as other code bases save them, made by hand from tiny timm models."""

import argparse

import timm
import torch
from timm.models.vision_transformer import VisionTransformer

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 12, "depth": 3, "num_heads": 3, "mlp_ratio": 2.0, "num_classes": 5}
XCIT = {"embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 10, "cls_attn_layers": 1}
LEVIT = {
    "embed_dim": (32, 48, 64),
    "depth": (2, 1, 1),
    "num_heads": (2, 3, 4),
    "key_dim": 8,
    "num_classes": 7,
    "img_size": 64,
}


def randomised(model, seed=0):
    """Every number of a model moved, batch statistics included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return model.eval()


def tiny_vit(**settings):
    return randomised(VisionTransformer(**{**VIT, **settings}))


def save(path, state, *, key="model", args=None, **rest):
    """What a training script saves: weights, optimiser, an argparse namespace."""
    content = {key: state, "optimizer": {"state": {}}, "epoch": 3, **rest}
    if args is not None:
        content["args"] = argparse.Namespace(**args)
    torch.save(content, path)
    return path


def old_levit(model):
    """A timm LeViT's weights under the keys of facebookresearch/LeViT, index tables included."""
    state, old, blocks = model.state_dict(), {}, []
    for stage, depth in enumerate(LEVIT["depth"]):
        if stage:
            blocks += [
                (f"stages.{stage}.downsample.attn_downsample.", "{}"),
                (f"stages.{stage}.downsample.mlp.", "{}.m"),
            ]
        for block in range(depth):
            blocks += [
                (f"stages.{stage}.blocks.{block}.attn.", "{}.m"),
                (f"stages.{stage}.blocks.{block}.mlp.", "{}.m"),
            ]
    for key, value in state.items():
        name = key.replace("head.linear", "head.l").replace("head_dist.linear", "head_dist.l")
        if key.startswith("stem.conv"):
            number = 2 * (int(key[len("stem.conv")]) - 1)
            name = f"patch_embed.{number}." + key.split(".", 2)[2].replace("linear", "c")
        for i, (prefix, place) in enumerate(blocks):
            if key.startswith(prefix):
                rest = key.removeprefix(prefix).replace("ln1.", "0.").replace("ln2.", "2.").replace(".ln.", ".1.")
                name = f"blocks.{place.format(i)}.{rest}".replace(".linear.", ".c.")
        old[name] = value
    old["blocks.0.m.attention_bias_idxs"] = torch.zeros(16, 16, dtype=torch.long)
    return old


def tiny_levit():
    return randomised(timm.create_model("levit_128", **LEVIT))
