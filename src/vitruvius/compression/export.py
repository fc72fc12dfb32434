"""Export a model for inference elsewhere: torch.export, ONNX, safetensors or timm's hub; what is written must agree.

Auto-encoders are folded into the projections where that is exact; masks go along as constants. The input is a batch of
images in pixels [0, 1], of any number; normalisation is inside.
"""

from __future__ import annotations

import copy
import io
import json
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitruvius._config import build
from vitruvius._errors import CheckpointError, ConfigError, SurgeryError
from vitruvius._files import atomic_write_bytes, check_out, is_lock, load_tensors, pack_tensors, unpack_tensors
from vitruvius._registry import read_spec, require
from vitruvius._version import __version__
from vitruvius.attention.low_rank import LowRank
from vitruvius.attention.mask import Mask
from vitruvius.compression.sparse import use_sparse
from vitruvius.converters.exporting import save_for_hub
from vitruvius.models import PixelModel, load_weights
from vitruvius.models.config import AttentionRule, ModelConfig
from vitruvius.models.create import create_from_config
from vitruvius.surgery.base import inner
from vitruvius.surgery.folding import fold

Format = Literal["torch-export", "onnx", "safetensors", "timm-hub"]
TOLERANCE = 1e-3  # of the largest logit
KIND = "a vitruvius model for inference"
NAMES = {  # of what is written into a run folder
    "torch-export": "export.pt2",
    "onnx": "export.onnx",
    "safetensors": "export.safetensors",
    "timm-hub": "export_timm_hub",
}
HUB_FILES = ("model.safetensors", "config.json")
Answer = Callable[[Tensor], Tensor]
Files = dict[str, bytes]  # by their names in the folder of the export; one without a name is the export


def export(
    model: PixelModel,
    path: str | Path,
    *,
    format: Format = "torch-export",
    sparse: bool = False,
    recipe: Mapping[str, Any] | None = None,
) -> Path:
    """Write the model to `path`, unless what would be written answers otherwise than the model.

    The export is made in memory, read back and compared, then written whole: on any failure, of a full disk too, what
    was at `path` before stays.

    format: torch-export, onnx, safetensors, or timm-hub: a folder that `timm.create_model("local-dir:…")` reads.
    sparse: masks followed by softmax become `sparse_softmax`, which computes only what they keep.
    recipe: of the run, its `model` and `attention`; safetensors needs it, since weights alone do not say what they are.
    """
    if format not in WRITERS:
        raise ConfigError(f"format = {format!r}, expected one of {', '.join(WRITERS)}.")
    if format == "timm-hub":
        folder = Path(path)
        files = [file.name for file in folder.iterdir() if not is_lock(file)] if folder.is_dir() else []
        if folder.is_file() or not {*files} <= {*HUB_FILES}:
            raise ConfigError(
                f"{path} is not an empty folder, and format timm-hub writes one; name another with --out."
            )
    check_out(path, example="" if format == "timm-hub" else NAMES[format])
    prepared, folded = prepare(model, sparse=sparse)
    images = torch.rand(3, *prepared.data_config["input_size"], generator=torch.Generator().manual_seed(0))
    path = Path(path)
    contents, again = WRITERS[format](prepared, images, _rewritten(recipe, folded, sparse))
    with torch.no_grad():
        expected = copy.deepcopy(model).cpu().eval()(images)
        _compare(again(images), expected, path)
    for name, data in contents.items():
        atomic_write_bytes(path / name if name else path, data)
    return path


@torch.no_grad()
def prepare(model: PixelModel, *, sparse: bool = False) -> tuple[PixelModel, bool]:
    """A copy on the CPU in eval mode with folded auto-encoders; and whether there was anything to fold.

    `model` stays as it is; `sparse` also replaces masks by kernels that skip what they remove (default: no).
    """
    ready = copy.deepcopy(model).cpu().eval()
    folded = any(isinstance(module, LowRank) for module in ready.modules())
    if folded:
        try:
            fold(ready)
        except SurgeryError:
            folded = False  # something stands between projection and auto-encoder; it is exported as it is
    if sparse and any(isinstance(module, Mask) for module in ready.modules()):
        use_sparse(ready)
    return ready, folded


def load_export(path: str | Path) -> PixelModel:
    """A model from a safetensors export."""
    return _read_export(*load_tensors(path), path)


def _read_export(state: Mapping[str, Tensor], notes: Mapping[str, str], path: str | Path) -> PixelModel:
    if notes.get("kind") != KIND:
        raise CheckpointError(
            f"{path} is not an export: it does not say what model it holds. `vitruvius export` makes them."
        )
    config = build(ModelConfig, json.loads(notes["model"]), source=str(path))
    rules = [build(AttentionRule, rule, source=str(path)) for rule in json.loads(notes["attention"])]
    model = create_from_config(config, rules)
    if missing := load_weights(model, state):
        raise CheckpointError(f"{path} lacks {missing[0]} and {len(missing) - 1} more keys of the model it tells of.")
    return model


def _write_torch_export(model: PixelModel, images: Tensor, _: Any) -> tuple[Files, Answer]:
    program = torch.export.export(model, (images,), dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1)}})
    file = io.BytesIO()
    torch.export.save(program, file)
    data = file.getvalue()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)  # torch 2.11's own reading
        loaded: nn.Module = torch.export.load(io.BytesIO(data)).module()
    return {"": data}, loaded


def _write_onnx(model: PixelModel, images: Tensor, _: Any) -> tuple[Files, Answer]:
    for package in ("onnx", "onnxscript"):
        require(package, "export")
    runtime: Any = require("onnxruntime", "export")
    shapes = {"x": {0: torch.export.Dim("batch", min=1)}}
    program: Any = torch.onnx.export(
        model, (images,), dynamo=True, dynamic_shapes=shapes, external_data=False, verbose=False,
        input_names=["images"], output_names=["logits"],
    )  # fmt: skip
    data: bytes = program.model_proto.SerializeToString()
    session = runtime.InferenceSession(data, providers=["CPUExecutionProvider"])

    def answer(x: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": x.numpy()})[0])

    return {"": data}, answer


def _write_safetensors(model: PixelModel, _: Tensor, recipe: dict[str, str] | None) -> tuple[Files, Answer]:
    if recipe is None:
        raise ConfigError("format safetensors needs the recipe of the model; export a run folder, or give recipe=….")
    data = pack_tensors(inner(model).state_dict(), {"kind": KIND, "vitruvius": __version__, **recipe})
    name = "the export"
    return {"": data}, _read_export(*unpack_tensors(data, name), name).eval()


def _write_timm_hub(model: PixelModel, _: Tensor, recipe: dict[str, str] | None) -> tuple[Files, Answer]:
    import timm

    arguments = json.loads(recipe["model"]).get("kwargs") if recipe else None
    with tempfile.TemporaryDirectory() as folder:
        save_for_hub(model, folder, arguments=arguments)
        files = {name: Path(folder, name).read_bytes() for name in HUB_FILES}
        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    mean, std = (torch.tensor(loaded.pretrained_cfg[key]).view(-1, 1, 1) for key in ("mean", "std"))
    return files, lambda x: loaded((x - mean) / std)


WRITERS: dict[str, Callable[[PixelModel, Tensor, Any], tuple[Files, Answer]]] = {
    "torch-export": _write_torch_export,
    "onnx": _write_onnx,
    "safetensors": _write_safetensors,
    "timm-hub": _write_timm_hub,
}


def _rewritten(recipe: Mapping[str, Any] | None, folded: bool, sparse: bool) -> dict[str, str] | None:
    """Model and attention as they are in the export: patterns come with the weights, folded stages are gone."""
    if recipe is None:
        return None
    rules = []
    for rule in recipe.get("attention") or ():
        parts = {read_spec(part, where="attention")[0]: part for part in rule["parts"]}  # by name
        if folded:
            parts.pop("low_rank", None)
        if "mask" in parts:
            parts["mask"] = {"use": "sparse_softmax" if sparse else "mask", "keep": "all"}
        if sparse and ("mask" in parts or "sparse_softmax" in parts):
            parts.pop("softmax", None)
        rules.append({"where": rule.get("where", "*"), "parts": list(parts.values()) or ["softmax"]})
    model = {**recipe["model"], "pretrained": False, "weights": None}
    return {"model": json.dumps(model), "attention": json.dumps(rules)}


@torch.no_grad()
def _compare(actual: Tensor, expected: Tensor, path: Path) -> None:
    error = float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not error <= TOLERANCE:
        raise SurgeryError(
            f"the export for {path} answers differently, by {error:.1e} of the largest logit; it is not written."
        )
