"""A loader of images that somebody else reads: the same pixels as from a recipe, each image once over the processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from vitruvius._errors import DataError
from vitruvius.data import DataConfig, TensorSet, eval_loader, images_loader
from vitruvius.data import loader as loader_module

SIZE = {"input_size": (3, 12, 12), "crop_pct": 0.8, "interpolation": "bilinear"}


class Mine:
    """A reader that knows nothing of the package."""

    name, num_classes = "mine", 3

    def __init__(self, folder: Path) -> None:
        self.files = sorted((folder / "val").glob("*/*.png"))

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int) -> tuple[Image.Image, int]:
        return Image.open(self.files[index]), index // 3

    def describe(self, index: int) -> str:
        return str(self.files[index])


def test_images_of_any_reader_are_prepared_like_those_of_a_recipe(folder: Path) -> None:
    config = DataConfig(dataset="folder", root=str(folder), batch_size=4, workers=0)
    mine, theirs = images_loader(Mine(folder), config, input_size=SIZE), eval_loader(config, input_size=SIZE)
    assert (mine.name, mine.num_images, mine.num_classes, len(mine)) == ("mine", 9, 3, 3)
    for ours, expected in zip(mine.with_ids(), theirs.with_ids(), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


def test_processes_share_the_images_that_are_asked_for(folder: Path) -> None:
    config, only = DataConfig(batch_size=2, eval_batch_size=1, workers=0), torch.tensor([1, 4, 7])
    seen = [
        ids.tolist()
        for rank in range(2)
        for _, _, ids in images_loader(
            Mine(folder), config, input_size=SIZE, rank=rank, world_size=2, only=only
        ).with_ids()
    ]
    assert seen == [[1], [7], [4]]
    with pytest.raises(DataError, match="mine has 9 images; ids must lie between 0 and 8"):
        images_loader(Mine(folder), config, input_size=SIZE, only=torch.tensor([9]))


def test_tensors_stay_in_memory() -> None:
    pixels = torch.randint(256, (5, 3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    held = TensorSet(name="held", images=pixels, labels=torch.arange(5), num_classes=5)
    (x, y, ids), (last, _, _) = images_loader(held, DataConfig(batch_size=3), input_size=(3, 12, 12)).with_ids()
    torch.testing.assert_close(torch.cat([x, last]), pixels / 255)
    assert y.tolist() == ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("batch_size", "workers", "number"), [(9, 1, 0), (5, 3, 1), (1, 20, 1), (1, 0, 0)])
def test_there_are_never_more_workers_than_batches_or_cores_and_none_for_one(
    batch_size: int, workers: int, number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "usable_cores", lambda: 1)
    loader: Any = images_loader(Mine(folder), DataConfig(batch_size=batch_size, workers=workers), input_size=SIZE)
    assert (loader._loader.num_workers, loader._loader.persistent_workers) == (number, number > 0)


def test_a_single_batch_is_the_same_whoever_decodes_it(folder: Path) -> None:
    alone, shared = (images_loader(Mine(folder), DataConfig(batch_size=n, workers=1), input_size=SIZE) for n in (9, 5))
    (x, y, ids), pieces = next(iter(alone.with_ids())), list(shared.with_ids())
    assert len(pieces) == 2
    for ours, theirs in zip((x, y, ids), zip(*pieces, strict=True), strict=True):
        assert torch.equal(ours, torch.cat(theirs))
