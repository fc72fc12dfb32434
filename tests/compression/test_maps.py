"""Average maps are plain means of the maps the softmax makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import vitruvius
from families import FAMILIES
from two_processes import in_two_processes
from vitruvius._errors import DataError, RunError
from vitruvius._files import load_tensors, save_tensors
from vitruvius._processes import process_group
from vitruvius.attention import part
from vitruvius.compression import average_maps
from vitruvius.data import DataConfig, TensorSet, eval_loader, images_loader
from vitruvius.data.loader import Loader


def small(**kwargs: object) -> torch.nn.Module:
    return vitruvius.create_model("vitruvius/vit_digits", depth=2, **kwargs)  # type: ignore[arg-type]


def test_the_mean_map_equals_a_slow_loop_over_images() -> None:
    model = small()
    x = torch.rand(7, 3, 8, 8)
    batches = [(x[:4], torch.zeros(4, dtype=torch.long)), (x[4:], torch.zeros(3, dtype=torch.long))]
    expected = torch.zeros(3, 16, 16, dtype=torch.float64)
    for image in x:
        with vitruvius.record(model) as seen, torch.no_grad():
            model(image[None])
        q, k = seen["blocks.1.attn"].q[0].double(), seen["blocks.1.attn"].k[0].double()
        for head in range(3):
            for query in range(16):
                logits = torch.stack([(q[head, query] * k[head, key]).sum() / 16**0.5 for key in range(16)])
                expected[head, query] += logits.softmax(0) / len(x)
    maps = average_maps(model, batches)
    assert set(maps) == {"blocks.0.attn", "blocks.1.attn"}
    torch.testing.assert_close(maps["blocks.1.attn"].double(), expected, atol=1e-6, rtol=1e-5)


def test_rows_sum_to_one_and_stages_are_seen() -> None:
    keep = torch.ones(3, 16, 16, dtype=torch.bool)
    keep[:, :, 5] = False
    model = small(attention=[part("mask", keep=keep)])
    maps = average_maps(model, [(torch.rand(3, 3, 8, 8), torch.zeros(3, dtype=torch.long))])
    for map_ in maps.values():
        torch.testing.assert_close(map_.sum(-1), torch.ones(3, 16))
        assert (map_[:, :, 5] == 0).all()


def test_no_images_is_an_error() -> None:
    with pytest.raises(DataError, match="no images"):
        average_maps(small(), [])


def digit_loader(**shares: object) -> Loader:
    config = DataConfig(dataset="digits", batch_size=40, val_num_samples=100)
    return eval_loader(config, input_size=small().data_config, **shares)  # type: ignore[attr-defined, arg-type]


class Stopped(Exception):
    """Somebody pulled the plug."""


def stop(images: int, total: int | None, /, words: str = "") -> None:
    raise Stopped


@pytest.fixture
def saved_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitruvius.compression.maps.SAVE_EVERY", 0.0)


@pytest.mark.usefixtures("saved_often")
def test_an_interrupted_average_goes_on_where_it_stopped(tmp_path: Path) -> None:
    model, partial = small(), tmp_path / "maps.partial"
    whole = average_maps(model, digit_loader())
    seen: list[int] = []

    def stop_after_two(images: int, total: int | None, /, words: str = "") -> None:
        seen.append(images)
        if len(seen) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        average_maps(model, digit_loader(), partial=partial, progress=stop_after_two)
    assert [file.name for file in tmp_path.iterdir()] == ["maps.partial.0-of-1"]
    again = average_maps(
        model, digit_loader(), partial=partial, progress=lambda images, total, words="": seen.append(images)
    )
    assert seen == [40, 80, 100]
    assert list(tmp_path.iterdir()) == []
    for name, map_ in whole.items():
        torch.testing.assert_close(again[name], map_)


@pytest.mark.usefixtures("saved_often")
def test_sums_of_another_model_are_not_taken_up(tmp_path: Path) -> None:

    with pytest.raises(Stopped):
        average_maps(small(), digit_loader(), partial=tmp_path / "p", progress=stop)
    with pytest.raises(RunError, match="sums of another model"):
        average_maps(small(seed=1), digit_loader(), partial=tmp_path / "p")


@pytest.mark.usefixtures("saved_often")
def test_sums_of_other_images_are_not_taken_up(tmp_path: Path) -> None:
    images = torch.rand(12, 3, 8, 8)

    def loader() -> Loader:
        shown = TensorSet(name="shown", images=images, labels=torch.arange(12) % 10, num_classes=10)
        return images_loader(shown, DataConfig(batch_size=4), input_size=(3, 8, 8))

    with pytest.raises(Stopped):
        average_maps(small(), loader(), partial=tmp_path / "p", progress=stop)
    images[11] = 1 - images[11]
    with pytest.raises(RunError, match="sums of another content of the images"):
        average_maps(small(), loader(), partial=tmp_path / "p")


def _average(rank: int, folder: str) -> None:
    with process_group("cpu") as process:
        maps = average_maps(small(), digit_loader(rank=rank, world_size=2), process=process)
    save_tensors(Path(folder) / f"{rank}.safetensors", maps)


def test_two_processes_average_what_one_does(tmp_path: Path) -> None:
    in_two_processes(_average, str(tmp_path))
    alone = average_maps(small(), digit_loader())
    for rank in (0, 1):
        maps, _ = load_tensors(tmp_path / f"{rank}.safetensors")
        for name, map_ in alone.items():
            torch.testing.assert_close(maps[name], map_)


@pytest.mark.parametrize("name", ["swin", "levit", "cait", "eva"])
def test_windows_stages_and_class_attention_have_maps_of_their_own_sizes(name: str) -> None:
    family = next(family for family in FAMILIES if family.name == name)
    model, x = family.randomised()
    maps = average_maps(model, [(x.sigmoid(), torch.zeros(2, dtype=torch.long))])
    for site in vitruvius.survey(model).values():
        assert maps[site.name].shape == (site.num_heads, site.num_queries, site.num_keys)
        torch.testing.assert_close(maps[site.name].sum(-1), torch.ones(site.num_heads, site.num_queries))
