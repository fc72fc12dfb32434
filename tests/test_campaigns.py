"""Campaigns: every row resolves, and each file goes through a miniature on small data, home and into its table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import timm
from experiments import collected, milliseconds, packs, tables
from PIL import Image
from safetensors.torch import save_file

from vitruvius._files import load_tensors
from vitruvius._yaml import dump_yaml, read_yaml
from vitruvius.attention import attentions
from vitruvius.cli import main
from vitruvius.evaluation.threats import make_threats
from vitruvius.studies import study
from vitruvius.training import read_recipe
from vitruvius.training.sweep import Sweep

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "experiments" / "campaigns"
SWEEPS = sorted(file for file in FOLDER.glob("*.yaml") if "list" in read_yaml(file))
RECIPES = sorted(set(FOLDER.glob("*.yaml")) - set(SWEEPS))
ROWS = {  # of every campaign: what its table compares with, and one row more
    "attention_cifar_compact": ("softmax", "rpc_all_n2_paper"),
    "attention_cifar_compact_natural": ("softmax", "rpc_layer0_n4"),
    "attention_digits": ("softmax", "rpc_all_n2_paper"),
    "attention_natural": ("softmax", "rpc_layer0_n4"),
    "attention_pgd": ("softmax", "rpc_all_n2_paper"),
    "imagenette": ("plain", "rpc_all_n2"),
    "light": ("light", "pgd3"),
    "light_compact": ("one_step_eps_warmup", "pgd3"),
    "light_digits": ("light", "eps01_light", "eps01_pgd3"),
    "speedruns": ("vit", "preact_resnet18_linf8"),
    "structured": ("timm", "mimetic_released_seed1"),
    "structured_p2": ("timm", "impulse3"),
    "structured_small": ("timm_1k", "impulse3_1k"),
    "together_digits": ("natural", "impulse", "dense", "masked"),
    "vitcod": ("dense", "random_80", "tiles_80", "tiles_95", "random_95", "low_rank_calibrated"),
    "vitcod_pretrained": ("dense", "random_80", "information_80", "random_95", "low_rank_svd"),
    "vitcod_pretrained_90": ("dense", "random", "information", "tiles"),
}
SMALL = ("train.epochs=2", "train.warmup_epochs=0", "train.device=cpu", "train.precision=fp32", "data.batch_size=8")
VIT = ("model.kwargs.depth=1", "model.kwargs.embed_dim=48")


def test_every_campaign_has_a_miniature_and_every_recipe_a_campaign() -> None:
    assert {file.stem for file in SWEEPS} == set(ROWS)
    used = {Path(read_yaml(file)["recipe"]).name for file in SWEEPS}
    begun_from = {
        file.name
        for file in RECIPES
        if any(f"experiments/campaigns/{file.name}" in text.read_text() for text in SWEEPS)
    }
    assert {file.name for file in RECIPES} <= used | begun_from


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_every_row_and_every_threat_of_a_campaign_resolves(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sweep = Sweep(file.relative_to(ROOT))
    assert sweep.folder == f"runs/campaigns/{file.stem}"
    for run in sweep.runs:
        for rule in run.config.attention:
            for part in rule.parts:
                assert attentions.bind(part, where=run.name)
    for plan in sweep.settings.evaluate:
        for spec in plan.threats:
            assert make_threats(spec, where=file.stem)


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_the_head_of_a_campaign_says_its_command(file: Path) -> None:
    head = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert len(head[0]) > 30
    assert any(f"vitruvius sweep experiments/campaigns/{file.name}" in line for line in head)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_the_recipe_of_a_campaign_reads_and_says_its_command_and_data(file: Path) -> None:
    assert read_recipe(file).train.epochs >= 1
    head = [line for line in file.read_text().splitlines() if line.startswith("#")]
    assert any(f"vitruvius train experiments/campaigns/{file.name}" in line for line in head)
    assert any(line.startswith("# Data: ") for line in head)


def write_cifar(folder: Path) -> None:
    """A CIFAR-10 of 48 and 8 images."""
    x = np.random.default_rng(0).integers(0, 256, (56, 32, 32, 3), dtype=np.uint8)
    y = np.arange(56) % 10
    np.savez(folder / "cifar10.npz", x_train=x[:48], y_train=y[:48], x_test=x[48:], y_test=y[48:])


def write_imagenette(folder: Path) -> None:
    """An Imagenette of 40 and 10 images."""
    rng = np.random.default_rng(0)
    for split, each in (("train", 4), ("val", 1)):
        for number in range(10):
            place = folder / "imagenette" / split / f"n{number:08d}"
            place.mkdir(parents=True)
            for image in range(each):
                pixels = rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{image}.jpeg", quality=50)


def miniature(name: str, folder: Path, rows: tuple[str, ...]) -> Path:
    """The campaign with few rows, few images and the first stage of AutoAttack alone."""
    campaign = read_yaml(FOLDER / f"{name}.yaml")
    small = {"train.epochs": 2, "data.batch_size": 8}
    campaign["list"] = [
        {key: small.get(key, value) for key, value in item.items()} for item in campaign["list"] if item["name"] in rows
    ]
    for plan in campaign["evaluate"]:
        plan["images"] = 4
        plan["threats"] = [_shorter(spec) for spec in plan["threats"]]
        if "speed" in plan:
            plan["speed"] = 2
    if "masks" in campaign:
        needed = dump_yaml(campaign["list"])
        campaign["masks"] = [plan for plan in campaign["masks"] if plan["file"] in needed]
        campaign["maps"]["images"] = 8
    file = folder / f"{name}.yaml"
    file.write_text(dump_yaml(campaign))
    return file


def _shorter(spec: str) -> str:
    if spec == "corruptions":
        return "corruptions:severities=[3]"
    if not spec.startswith("autoattack"):
        return spec
    eps = spec.partition("eps=")[2].partition(",")[0]
    return f"autoattack:eps={eps},version=custom,attacks=[apgd-ce]"


def words_of(name: str) -> list[str]:
    if name in ("attention_digits", "light_digits", "together_digits"):  # which need no data
        return [*SMALL, *VIT, "data.train_num_samples=48"]
    root = "data.root=cifar10.npz"
    if name == "imagenette" or name.startswith("vitcod"):
        root = "data.root=imagenette"
    if name == "speedruns":
        return [root, *SMALL, "train.lr=1e-3"]  # no warm-up here
    begun = ["model.weights=null"] if name == "light_compact" else []  # the run its recipe begins from is not here
    return [root, *SMALL, *VIT, *begun]


def go(name: str, folder: Path, rows: tuple[str, ...]) -> int:
    if name == "imagenette":
        write_imagenette(folder)
    file = miniature(name, folder, rows)
    varied = {key for item in read_yaml(file)["list"] for key in item}
    return main(["sweep", str(file), *(word for word in words_of(name) if word.partition("=")[0] not in varied)])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data and campaigns in it, as commands are given in a checkout."""
    write_cifar(tmp_path)
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "campaigns").symlink_to(FOLDER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_home(name: str, folder: Path) -> str:
    """Packed, unpacked elsewhere, collected, and its table."""
    packs.pack(folder / "runs" / "campaigns" / name, folder / "out", weights=[])
    home = packs.unpack(folder / "out" / f"{name}.tar.gz.00", folder / "home")
    assert not list(home.rglob("state.pt"))
    assert list(home.rglob("ledger.safetensors"))
    collected.collect(home, folder / "results")
    text: str = tables.print_table(name, folder / "results")
    return text


def rows_of(text: str) -> list[str]:
    """The names of the runs in a table."""
    return [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]


def test_a_campaign_goes_from_its_command_into_its_table(here: Path) -> None:
    assert go("structured", here, ("timm",)) == 0
    text = check_home("structured", here)
    assert rows_of(text) == ["timm"]
    kept = json.loads((here / "results" / "structured" / "timm.json").read_text())
    clean = kept["threats"]["evaluation/clean"]
    assert clean["n"] == 4
    assert 0 <= clean["ece"] <= 1
    assert kept["status"] == "finished"
    assert kept["config"]["data"]["root"] == "cifar10.npz"
    assert kept["seconds"]["wall_train"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(name for name in ROWS if name != "together_digits" and "vitcod" not in name))
def test_every_campaign_goes_from_its_command_into_its_table(name: str, here: Path) -> None:
    assert go(name, here, ROWS[name]) == 0
    assert len(rows_of(check_home(name, here))) == len(ROWS[name])
    for run in ROWS[name]:
        kept = json.loads((here / "results" / name / f"{run}.json").read_text())
        assert kept["status"] == "finished"
        assert all("correct" in threat for threat in kept["threats"].values())


@pytest.mark.long
def test_masks_are_compared_on_the_plain_run_of_another_campaign(here: Path) -> None:
    assert go("imagenette", here, ("plain",)) == 0
    assert go("vitcod", here, ROWS["vitcod"]) == 0
    text = check_home("vitcod", here)
    assert len(rows_of(text)) == len(ROWS["vitcod"])
    tiles = next(line for line in text.splitlines() if "tiles_80" in line).split("|")
    assert 0 < float(tiles[-2]) < 1, "a mask saves cycles"
    written = study("released-protocol", ["runs/campaigns/imagenette/plain"], {"images": 4}, "runs/protocol")
    collected.collect(written.parent, here / "results")
    kept = json.loads((here / "results" / "protocol" / "study.json").read_text())
    assert all("correct" in row and row["model"] == "plain" for row in kept["rows"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["vitcod_pretrained", "vitcod_pretrained_90"])
def test_masks_are_compared_on_a_pretrained_model(name: str, here: Path) -> None:
    write_imagenette(here)
    bare = timm.create_model("vit_small_patch14_dinov2", img_size=196, num_classes=0, depth=1, embed_dim=48)
    save_file(bare.state_dict(), here / "vit_s14.safetensors")
    words = [*words_of(name), "data.train_num_samples=40"]
    assert main(["train", "experiments/campaigns/imagenette_vit_s14.yaml", *words]) == 0
    assert main(["sweep", str(miniature(name, here, ROWS[name])), *words]) == 0
    assert len(milliseconds.measure(here / "runs" / "campaigns" / name, repeats=1)) == len(ROWS[name])
    assert len(rows_of(check_home(name, here))) == len(ROWS[name])


def test_a_study_of_the_protocol_compares_runs_of_one_seed() -> None:
    (study_,) = tables.load("digits_released_protocol")
    found = {row["model"]: row["accuracy"] for row in study_["rows"] if row["key"] == "pixels/true/0.0156863"}
    lines = tables.print_table("digits_released_protocol").splitlines()
    (line,) = [line for line in lines if line.startswith("| 4 | `rpc_seed1` |")]
    difference = 100 * (found["rpc_seed1"] - found["softmax_seed1"])
    assert line.split("|")[3].strip().startswith(f"{100 * found['rpc_seed1']:.1f}, {difference:+.1f} (")


@pytest.mark.long
def test_everything_at_once_begins_from_the_softmax_run_of_another_campaign(here: Path) -> None:
    assert go("attention_digits", here, ("softmax",)) == 0
    assert go("together_digits", here, ROWS["together_digits"]) == 0
    collected.collect(here / "runs" / "campaigns" / "together_digits", here / "results")  # its table pairs 360 images
    for run in ROWS["together_digits"]:
        kept = json.loads((here / "results" / "together_digits" / f"{run}.json").read_text())
        assert kept["status"] == "finished"


@pytest.mark.long
def test_a_campaign_goes_on_at_home_where_it_stopped_elsewhere(here: Path) -> None:
    """Finished runs are not trained again, unfinished ones are kept; weights come along if they are asked for."""
    assert go("structured", here, ("timm",)) == 0
    place = here / "runs" / "campaigns" / "structured"
    (place / "half").mkdir()
    (place / "half" / "metrics.jsonl").write_text('{"epoch": 0, "seconds": 1.0}\n')
    (place / "half" / "config.yaml").write_text((place / "timm" / "config.yaml").read_text())
    before = load_tensors(place / "timm" / "best.safetensors")[0]
    said = packs.pack(place, here / "out", weights=["timm"], piece=1)
    assert all(float(line.split()[-2]) <= 1 for line in said)
    place.rename(here / "runs" / "gone")
    packs.unpack(here / "out" / "structured.tar.gz.00", here / "runs" / "campaigns")
    after = load_tensors(place / "timm" / "best.safetensors")[0]
    assert all(np.array_equal(before[key], after[key]) for key in before)
    lines = collected.collect(place, here / "results")
    assert any("half.json stopped after epoch 1 of 2" in line for line in lines)
    metrics = (place / "timm" / "metrics.jsonl").read_bytes()
    assert go("structured", here, ROWS["structured"]) == 0
    assert (place / "timm" / "metrics.jsonl").read_bytes() == metrics
    notes = json.loads((place / "sweep.json").read_text())
    assert {name: note["status"] for name, note in notes.items()} == dict.fromkeys(ROWS["structured"], "finished")
