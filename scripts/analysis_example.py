"""Analyse a real pretrained ViT on real images and write the example page of docs/examples.

    python scripts/analysis_example.py WEIGHTS IMAGES [--images 64] [--out docs/examples]

WEIGHTS is a safetensors file with the keys of timm's vit_small_patch14_dinov2, without a head; IMAGES a folder that
holds val/<class>.
Every analysis is asked of every layer, at 224 pixels; the run folder with all numbers stays beside the page in runs/.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed

import vitruvius
from vitruvius._files import atomic_write_text
from vitruvius._yaml import dump_yaml
from vitruvius.analysis import analyse
from vitruvius.data import DataConfig, class_words, eval_loader
from vitruvius.models import PixelModel
from vitruvius.report import record_examples, save_model_facts, write_page
from vitruvius.report.sections.analyses_gallery import save_figures

NAME, SIZE = "vit_small_patch14_dinov2", 224
PICTURES = 6  # photographs in the viewer


def load(weights: Path) -> PixelModel:
    """The model at 224 pixels; its table of positions is resampled from 518."""
    model = vitruvius.create_model(NAME, num_classes=0, img_size=SIZE)
    state = {key: value.float() for key, value in load_file(weights).items()}
    grid = model.model.patch_embed.grid_size
    state["pos_embed"] = resample_abs_pos_embed(state["pos_embed"], grid, num_prefix_tokens=1)
    model.model.load_state_dict(state)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/examples"))
    options = parser.parse_args()
    model, began = load(options.weights), time.perf_counter()
    chosen = {"val_num_samples": options.images, "batch_size": 16, "workers": 0}
    data = DataConfig(dataset="folder", root=str(options.data), val_split="val", **chosen)
    loader = eval_loader(data, input_size=model.data_config)
    facts = {"model": f"{NAME}, {SIZE} pixels", "data": "Imagenette, validation"}
    table = analyse(model, loader, images=options.images, seed=options.seed, facts=facts)
    print(table)
    print(f"{time.perf_counter() - began:.0f} s")
    run = Path("runs") / NAME
    config = {"model": {"name": NAME, "kwargs": {"num_classes": 0, "img_size": SIZE}}, "seed": options.seed}
    atomic_write_text(run / "config.yaml", dump_yaml({**config, "data": {"dataset": "folder", "val_split": "val"}}))
    table.save(run / "analysis")
    save_model_facts(run, model)
    x, y, ids = (column[:PICTURES] for column in next(loader.with_ids()))
    names = [str(number) for number in ids.tolist()]
    record_examples(run, model, x, y.tolist(), names=class_words(data), pictures=names)
    save_figures(table, run / "analysis")
    print(write_page([run], options.out / "analysis.html", title="Inside a pretrained vision transformer"))


if __name__ == "__main__":
    main()
