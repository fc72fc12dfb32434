"""Image classifiers of transformers as pixel models: what they answer, how they are attacked, rewired and refused."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import vitruvius
from shift_layouts import write_arrays
from vitruvius._errors import CheckpointError, ConfigError, MissingExtra, NoSiteError
from vitruvius.analysis import explain
from vitruvius.cli import main
from vitruvius.surgery import record, restore, rewire, survey
from vitruvius.surgery.base import _SOCKETS, load_transformers_sockets
from vitruvius.surgery.recording import map_of
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


FORWARDS = {"ViTAttention", "DeiTAttention", "Dinov2Attention", "Dinov2WithRegistersAttention"}
SEEN = {"54ffa42620ce"}  # SHA-256, first 12 digits, of the forward that surgery/_transformers.py repeats (5.23)


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
