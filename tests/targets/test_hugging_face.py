"""Image classifiers of transformers as pixel models: what they answer, how they are attacked, rewired and refused."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import vitruvius
from shift_layouts import write_arrays
from vitruvius._errors import CheckpointError, ConfigError, MissingExtra, NoSiteError
from vitruvius.analysis import explain
from vitruvius.attention import part
from vitruvius.cli import main
from vitruvius.surgery import record, restore, rewire, survey
from vitruvius.surgery.base import _SOCKETS, load_transformers_sockets
from vitruvius.surgery.recording import map_of
from vitruvius.surgery.rewiring import MARK
from vitruvius.targets import open_target

HERE = importlib.util.find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(not HERE, reason="needs transformers (extra hf)")
SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 10,
}
CLASSES = {
    "vit": ("ViTConfig", "ViTForImageClassification", {}),
    "deit": ("DeiTConfig", "DeiTForImageClassificationWithTeacher", {}),
    "dinov2": ("Dinov2Config", "Dinov2ForImageClassification", {"mlp_ratio": 2}),
    "registers": (
        "Dinov2WithRegistersConfig",
        "Dinov2WithRegistersForImageClassification",
        {"mlp_ratio": 2, "num_register_tokens": 3},
    ),
}
PREFIX_TOKENS = {"vit": 1, "deit": 2, "dinov2": 1, "registers": 4}
OTHERS = {  # (class of the config, class of the model, settings of the config)
    "swin": (
        "SwinConfig",
        "SwinForImageClassification",
        {"image_size": 32, "embed_dim": 12, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4, "num_labels": 10},
    ),
    "siglip": (
        "SiglipConfig",
        "SiglipForImageClassification",
        {"vision_config": SMALL, "text_config": {**SMALL, "bos_token_id": 1, "eos_token_id": 2}, "num_labels": 10},
    ),
    "mae": ("ViTMAEConfig", "ViTMAEModel", {**SMALL, "mask_ratio": 0.0}),
}
DIGITS = ["data.dataset=digits", "data.val_num_samples=12", "device=cpu"]


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Write a tiny model of one kind, and how its images are prepared; the folder."""

    def write(kind: str = "vit", *, processor: bool = True, **more: Any) -> Path:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        config, model, own = CLASSES[kind]
        torch.manual_seed(0)
        made = getattr(transformers, model)(getattr(transformers, config)(**SMALL, **own, **more))
        folder = tmp_path / kind
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        made.save_pretrained(folder)
        if processor:
            said = {"image_processor_type": "ViTImageProcessor", "do_normalize": True, "do_resize": True}
            said |= {"size": {"height": 8, "width": 8}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
            (folder / "preprocessor_config.json").write_text(json.dumps({**said, "resample": 2}))
        return folder

    return write


FORWARDS = {f"{name}Attention" for name in ("ViT", "ViTMAE", "DeiT", "Dinov2", "Dinov2WithRegisters", "Swin", "Siglip")}
SEEN = {  # SHA-256, first 12 digits, of the forwards that surgery/_transformers.py repeats (5.23)
    "54ffa42620ce",
    "d002167133cc",  # Swin's
    "66b32085cb78",  # SigLIP's
}


def bare(kind: str) -> tuple[Any, torch.Tensor]:
    """A classifier of transformers without anything of ours around it, every number random, and images for it."""
    import transformers

    config, model, settings = OTHERS[kind] if kind in OTHERS else (*CLASSES[kind][:2], {**SMALL, **CLASSES[kind][2]})
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**settings)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return made, torch.rand(2, 3, *[32 if kind == "swin" else 8] * 2)


def write_processor(folder: Path, size: int) -> None:
    said = {"image_processor_type": "ViTImageProcessor", "do_normalize": False, "size": {"height": size, "width": size}}
    (folder / "preprocessor_config.json").write_text(json.dumps(said))


def answer(model: Any, x: torch.Tensor, **asked: Any) -> Any:
    torch.manual_seed(0)  # ViTMAE shuffles patches
    with torch.no_grad():
        return model(pixel_values=x, **asked)


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("transformers", "peft", "accelerate")),
    reason="needs transformers, peft and accelerate (extra hf)",
)
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "hugging_face.md"
    monkeypatch.chdir(tmp_path)
    known: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries among themselves
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            exec(block, known)
    x = torch.rand(2, 3, 8, 8)
    for maps, site in zip(known["maps"], survey(known["model"]).values(), strict=True):
        assert maps.shape == (2, site.num_heads, site.num_queries, site.num_keys)
    assert all(core.describe() == "rpc" for name in ("again", "merged") for core in _cores(known[name]))
    assert known["again"](x).shape == (2, 10)
    assert "core" in str(known["prepared"])


@needs_transformers
@pytest.mark.parametrize("kind", [*CLASSES, *OTHERS])
def test_a_bare_model_is_rewired_and_gives_the_true_maps(kind: str) -> None:
    model, x = bare(kind)
    model.set_attn_implementation("eager")
    expected = answer(model, x, output_attentions=True)
    rewire(model, "softmax")
    found = answer(model, x, output_attentions=True)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.attentions, expected.attentions, atol=1e-5, rtol=1e-4)
    restore(model)
    rewire(model, "rpc:iterations=2")
    with record(model) as seen:
        maps = answer(model, x, output_attentions=True).attentions
    last = list(seen)[-1]
    torch.testing.assert_close(maps[-1], map_of(model, last, seen[last]))
    assert not torch.allclose(maps[-1], expected.attentions[-1], atol=1e-3)
    assert answer(model, x).get("attentions") is None


@needs_transformers
@pytest.mark.parametrize("kind", ["vit", "registers", "swin", "siglip"])
def test_a_saved_model_remembers_its_attention(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import transformers

    model, x = bare(kind)
    plain = answer(model, x).logits
    sites = list(survey(model))
    keep = torch.eye(survey(model)[sites[0]].num_keys, dtype=torch.bool).expand(
        survey(model)[sites[0]].num_heads, -1, -1
    )
    rewire(model, part("mask", keep=keep), "rpc:iterations=2", where=sites[0])  # a pattern among the weights
    if kind != "vit":
        rewire(model, "symmetric", where=sites[1:])
    expected = answer(model, x).logits
    model.save_pretrained(tmp_path)
    write_processor(tmp_path, x.shape[-1])
    again = vitruvius.load_model(f"hf:{tmp_path}")
    torch.testing.assert_close(again(x), expected)
    transformers.utils.logging.get_logger("transformers").addHandler(caplog.handler)
    try:  # their own report names what a plain load leaves out
        naive = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    finally:
        transformers.utils.logging.get_logger("transformers").removeHandler(caplog.handler)
    assert MARK in caplog.text
    torch.testing.assert_close(answer(naive, x).logits, plain)
    restore(model)
    assert MARK not in model.state_dict()
    assert "vitruvius" not in model.config.to_dict()


@needs_transformers
def test_weights_of_another_attention_than_noted_are_refused(tmp_path: Path) -> None:
    model, _ = bare("vit")
    rewire(model, part("low_rank", rank=2)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vitruvius"]["attention"][0]["parts"] = [{"use": "low_rank", "rank": 2}, "scaled"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_processor(tmp_path, 8)
    with pytest.raises(CheckpointError, match="attention"):
        vitruvius.load_model(f"hf:{tmp_path}")


def images() -> torch.Tensor:
    return torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@needs_transformers
@pytest.mark.parametrize("kind", CLASSES)
def test_pixels_go_in_and_the_logits_are_those_of_transformers(kind: str, save: Callable[..., Path]) -> None:
    import transformers

    folder = save(kind)
    model = vitruvius.load_model(f"hf:{folder}")
    x = images()
    mean, std = torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1), torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(x), theirs(pixel_values=(x - mean) / std).logits)
    assert model.num_classes == 10
    assert model.data_config["input_size"] == (3, 8, 8)
    assert model.data_config["interpolation"] == "bilinear"
    assert not model.training


@needs_transformers
@pytest.mark.parametrize("kind", CLASSES)
def test_its_attention_is_rewired_and_given_back(kind: str, save: Callable[..., Path]) -> None:
    model, x = vitruvius.load_model(f"hf:{save(kind)}"), images()
    keys = set(model.state_dict())
    with torch.no_grad():
        expected = model(x)
        sites = survey(model)
        assert len(sites) == 2
        for site in sites.values():
            assert (site.num_prefix_tokens, site.grid) == (PREFIX_TOKENS[kind], (2, 2))
        torch.testing.assert_close(rewire(model, "softmax")(x), expected)
        restore(model)
        assert not torch.allclose(rewire(model, "rpc")(x), expected, atol=1e-3)
        with record(model) as seen:
            model(x)
        for name, heads in seen.items():
            core = model.model.get_submodule(name).core
            torch.testing.assert_close(map_of(model, name, heads) @ heads.v, core(heads))
        restore(model)
        assert torch.equal(model(x), expected)
    assert set(model.state_dict()) == keys
    assert explain(model, x).shape == (3, 2, 2)


@needs_transformers
def test_it_is_evaluated_attacked_analysed_and_reported_like_any_model(
    save: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, out = f"hf:{save()}", tmp_path / "out"
    shifted = write_arrays(tmp_path / "c", ["fog"], images=3)
    asked = ["--threat", "fgsm:eps=4/255", "--shift", f"cifar-10-c:{shifted}"]
    assert main(["evaluate", target, *DIGITS, *asked, "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "fgsm" in told
    assert "cifar-10-c" in told
    main(["analyse", target, "entropy", "relevance", *DIGITS, "--images", "4", "--out", str(out / "analysis")])
    main(["attack", target, *DIGITS, "--threat", "fgsm:eps=4/255", "--out", str(tmp_path / "made.safetensors")])
    main(["report", str(out), "--out", str(tmp_path / "page.html")])
    page = (tmp_path / "page.html").read_text()
    assert "relevance" in page
    assert "fgsm" in page


@needs_transformers
def test_settings_of_a_target_reach_it(save: Callable[..., Path]) -> None:
    folder = save(processor=False)
    with pytest.raises(CheckpointError, match=r"does not say how its images are normalised.*model.mean"):
        vitruvius.load_model(f"hf:{folder}")
    said = ["model.mean=[0.1, 0.2, 0.3]", "model.std=[1, 1, 1]", "attention=[{parts: [rpc]}]", *DIGITS]
    target = open_target(f"hf:{folder}", said)
    assert target.model.statistics[0] == (0.1, 0.2, 0.3)
    assert all(core.describe() == "rpc" for core in _cores(target.model))
    with pytest.raises(ConfigError, match="cannot be changed"):
        open_target(f"hf:{folder}", [*DIGITS, "model.pretrained=true"])
    with pytest.raises(ConfigError, match="say which images"):
        open_target(f"hf:{folder}")


def _cores(model: torch.nn.Module) -> list[Any]:
    return [module.core for module in model.modules() if hasattr(module, "core")]


@needs_transformers
def test_a_model_without_its_head_is_refused(save: Callable[..., Path], tmp_path: Path) -> None:
    import transformers

    folder = save()
    model = transformers.AutoModelForImageClassification.from_pretrained(folder)
    model.vit.save_pretrained(tmp_path / "headless")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with pytest.raises(CheckpointError, match=r"lacks weights of ViTForImageClassification: classifier"):
        vitruvius.load_model(f"hf:{tmp_path / 'headless'}")


@needs_transformers
def test_families_without_a_socket_are_pixel_models_whose_attention_stays(tmp_path: Path) -> None:
    import transformers

    config = transformers.ConvNextConfig(depths=[1, 1], hidden_sizes=[8, 16], num_stages=2, num_labels=4, image_size=16)
    folder = tmp_path / "convnext"
    transformers.ConvNextForImageClassification(config).save_pretrained(folder)
    target = open_target(f"hf:{folder}", ["model.mean=[0, 0, 0]", "model.std=[1, 1, 1]"], data_needed=False)
    assert target.model(torch.rand(2, 3, 16, 16)).shape == (2, 4)
    with pytest.raises(NoSiteError, match="no attention that can be rewired"):
        rewire(target.model, "rpc")


@needs_transformers
@pytest.mark.parametrize("text", ["hf:no/such/folder", "hf:./nowhere", "hf:"])
def test_what_is_not_there_is_said_without_asking_the_network(text: str) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        vitruvius.load_model(text)


@needs_transformers
def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config.json"):
        vitruvius.load_model(f"hf:{tmp_path}")


@pytest.mark.skipif(HERE, reason="transformers is installed")
def test_without_transformers_the_extra_is_named() -> None:
    with pytest.raises(MissingExtra, match="hf"):
        vitruvius.load_model("hf:google/vit-base-patch16-224")


@needs_transformers
def test_the_forwards_of_transformers_are_the_ones_we_read() -> None:
    load_transformers_sockets()
    theirs = {kind for kind in _SOCKETS if kind.__module__.startswith("transformers.")}
    assert {kind.__name__ for kind in theirs} == FORWARDS
    for kind in theirs:
        source = inspect.getsource(kind.forward)  # type: ignore[attr-defined]
        found = hashlib.sha256(source.encode()).hexdigest()[:12]
        assert found in SEEN, f"{kind.__name__}.forward has changed: read it, update surgery/_transformers.py, {found}"
