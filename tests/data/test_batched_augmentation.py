"""Augmentation of whole batches: timm's policies and their statistics, an image alike in any batch, end to end."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pictures import write_image
from PIL import Image
from test_batched_operations import compare, photographs, to_batch
from timm.data import auto_augment
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision import transforms

from vitruvius._errors import ConfigError, DataError
from vitruvius._random import image_keys, uniform
from vitruvius.cli import main
from vitruvius.data import DataConfig, train_loader
from vitruvius.data.augmentation import pipeline, policies
from vitruvius.data.loader import ImageLoader, TensorLoader, batches_in_chunk
from vitruvius.data.preprocessing import resolve

SIZE = (3, 16, 16)
POLICIES = [
    "rand-m9-mstd0.5-inc1", "rand-m7-n3-p0.8", "rand-m9-mstd101", "rand-m14-mmax20-inc1", "rand-m6-mstd1-tweights",
    "rand-m8-t3a-inc1", "v0", "v0r-mstd0.5", "original", "originalr", "3a", "augmix-m5-w4-d2", "augmix-m3", "augmix-b1",
]  # fmt: skip
EVERY = {
    "crop": {"scale": (0.3, 1.0)},
    "padded crop": {"rand_crop": True, "pad": 2, "hflip": 0.5, "vflip": 0.5},
    "pad, then resized crop": {"pad": 3, "ratio": (0.5, 2.0)},
    "jitter": {"color_jitter": (0.4, 0.4, 0.4, 0.1), "color_jitter_prob": 0.7},
    "policy": {"aa": "rand-m9-mstd0.5-inc1", "reprob": 0.5},
    "the rest": {"rotation": 20.0, "grayscale_prob": 0.3, "gaussian_blur_prob": 0.5},
    "repeated": {"aa": "3a", "aug_repeats": 3},
    "splits": {"aa": "augmix-m5-w4-d2", "aug_splits": 3},
}


def keys_of(count: int, epoch: int = 0) -> torch.Tensor:
    return image_keys(torch.arange(count), torch.zeros(count, dtype=torch.int64), seed=0, epoch=epoch)


def timm_policy(name: str, size: int = 32) -> object:
    """As timm's factory makes it for images of this size."""
    settings = {"translate_const": int(size * 0.45), "img_mean": (124, 116, 104)}
    if name.startswith("rand"):
        return auto_augment.rand_augment_transform(name, settings)
    if name.startswith("augmix"):
        return auto_augment.augment_and_mix_transform(name, {**settings, "translate_pct": 0.3})
    return auto_augment.auto_augment_transform(name, settings)


@pytest.mark.parametrize("name", sorted(policies.RULES))
def test_an_operation_has_timms_strength_at_every_level(name: str) -> None:
    """One image for each level; which sign and which filter is drawn, is asked of our numbers and told to Pillow."""
    images = photographs()[:6]
    for level in (0, 2.5, 5, 7.3, 10):
        settings = {"translate_const": 14, "img_mean": (124, 116, 104), "interpolation": Image.Resampling.BILINEAR}
        step = auto_augment.AugmentOp(name, prob=1.0, magnitude=level, hparams=settings)
        table = policies.Operations([step], (32, 32))
        keys = keys_of(6, epoch=int(level))
        ours = table.apply(to_batch(images), torch.zeros(6, dtype=torch.int64), keys, 7)
        negative, radius = uniform(keys, 7, 5)[:, 2] > 0.5, uniform(keys, 7, 5)[:, 4].tolist()
        expected = [
            timm_with(step, image, minus, u) for image, minus, u in zip(images, negative.tolist(), radius, strict=True)
        ]
        compare(ours, expected, most=2, share=0.08)  # Pillow cuts, and halves fall to either side


def timm_with(step: auto_augment.AugmentOp, image: Image.Image, negative: bool, u: float) -> Image.Image:
    """timm's operation when it draws this sign and this radius."""
    if step.name.startswith("Posterize") and step.level_fn(step.magnitude, step.hparams)[0] <= 0:
        return Image.new(image.mode, image.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "random", lambda: 0.9 if negative else 0.1)
        patch.setattr(random, "uniform", lambda low, high: low + (high - low) * u)
        return step(image)


def test_magnitudes_vary_as_timms_do() -> None:
    for words, mean, std in (("mstd0.5", 8.93, 0.42), ("mstd101", 4.5, 2.6), ("mmax20", 9, 0)):
        policy = policies.BatchedRandAugment(timm_policy(f"rand-m9-{words}"), (32, 32))
        rotate = [one.name for one in timm_policy("rand-m9").ops].index("Rotate")
        u = uniform(keys_of(4000), 1, 3).double()
        degrees = policy.operations.strengths(torch.full((4000,), rotate), *u.unbind(1)).abs() / 3
        assert degrees.mean() == pytest.approx(mean, abs=0.15)
        assert degrees.std() == pytest.approx(std, abs=0.15)
        assert degrees.max() <= (20 if words == "mmax20" else 10)


def test_operations_are_chosen_as_often_as_timm_chooses_them() -> None:
    for name in ("rand-m9-n2", "rand-m9-n2-tweights"):
        timms = timm_policy(name)
        ours = policies.BatchedRandAugment(timms, (32, 32)).choose(keys_of(6000))
        generator = np.random.default_rng(0)
        places = range(len(timms.ops))
        with_replacement = timms.choice_weights is None
        theirs = Counter(
            int(one)
            for _ in range(6000)
            for one in generator.choice(places, 2, replace=with_replacement, p=timms.choice_weights)
        )
        counts = torch.bincount(ours.flatten(), minlength=len(places))
        for place in places:
            assert counts[place] / 12000 == pytest.approx(theirs[place] / 12000, abs=0.015)
        assert with_replacement or (ours[:, 0] != ours[:, 1]).all()


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_changes_images_as_much_as_timms(name: str) -> None:
    """Mean, deviation and change against the image, over many draws."""
    images = photographs()[:6] * 80
    x = to_batch(images)
    ours = policies.make_policy(timm_policy(name), (32, 32))(x.clone(), keys_of(len(x)))
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    step = timm_policy(name)
    repair(step)
    theirs = to_batch([step(image) for image in images])
    assert ((ours >= 0) & (ours <= 255) & (ours == ours.round())).all()
    for moment in (lambda y: y.mean(), lambda y: y.std((1, 2, 3)).mean(), lambda y: (y - x).abs().mean()):
        assert moment(ours) == pytest.approx(float(moment(theirs)), rel=0.15, abs=1.5)
    untouched = [(y == x).flatten(1).all(1).float().mean() for y in (ours, theirs)]
    assert untouched[0] == pytest.approx(float(untouched[1]), abs=0.08)


def repair(step: object) -> None:
    """Pillow 13 refuses timm's posterising to 0 bits, which older ones took for black."""
    ops = getattr(step, "ops", None) or [one for sub in step.policy for one in sub]  # type: ignore[attr-defined]
    for one in ops:
        if one.name.startswith("Posterize"):
            one.aug_fn = lambda image, bits, **kw: (
                auto_augment.posterize(image, bits) if bits > 0 else Image.new(image.mode, image.size)
            )


@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
@pytest.mark.parametrize(
    ("scale", "ratio"), [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.5, 1.0), (1.0, 1.0)), ((1, 1), (2, 3))]
)
def test_boxes_are_distributed_like_timms(size: tuple[int, int], scale: tuple, ratio: tuple) -> None:
    crop = RandomResizedCropAndInterpolation(16, scale=scale, ratio=ratio)
    ours = pipeline.boxes(keys_of(4000), size, scale, ratio).float()
    random.seed(0)
    image = Image.new("RGB", size[::-1])
    theirs = torch.tensor([crop.get_params(image, scale, ratio) for _ in range(4000)]).float()
    torch.testing.assert_close(ours.mean(0), theirs.mean(0), atol=0.35, rtol=0)
    torch.testing.assert_close(ours.std(0), theirs.std(0), atol=0.35, rtol=0)
    assert (ours[:, 0] + ours[:, 2] <= size[0]).all()
    assert (ours[:, 1] + ours[:, 3] <= size[1]).all()


def test_jitter_is_torchvisions_in_the_order_and_by_the_amounts_that_were_drawn() -> None:
    images = photographs()
    jitter = transforms.ColorJitter(0.4, 0.3, 0.5, 0.1)
    ours = pipeline.jitter(to_batch(images), keys_of(8), step=jitter, probability=1.0)
    u = uniform(keys_of(8), pipeline._JITTER, 9)
    ranges = torch.tensor([jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue])
    amounts = ranges[:, 0] + (ranges[:, 1] - ranges[:, 0]) * u[:, 4:8]
    one = transforms.functional
    functions = (one.adjust_brightness, one.adjust_contrast, one.adjust_saturation, one.adjust_hue)
    expected = []
    for image, order, amount in zip(images, u[:, :4].argsort(1).tolist(), amounts.tolist(), strict=True):
        for place in order:
            image = functions[place](image, amount[place])
        expected.append(image)
    compare(ours, expected, most=6, share=0.02)


def stripes(folder: Path, number: int = 24, size: tuple[int, int] = (20, 16)) -> Path:
    for i in range(number):
        write_image(folder / "train" / "ab"[i % 2] / f"{i}.png", i, size)
    return folder


def config_of(folder: Path, **settings: object) -> DataConfig:
    given = {"dataset": "folder", "root": str(folder), "batch_size": 8, "workers": 0, "cache": "memory", **settings}
    return DataConfig(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", EVERY.values(), ids=EVERY)
def test_an_image_is_augmented_the_same_in_every_batch(settings: dict, tmp_path: Path) -> None:
    folder = stripes(tmp_path)
    seen = []
    for size in (8, 6):
        loader = train_loader(config_of(folder, **settings, batch_size=size), input_size=SIZE, seed=3)
        assert isinstance(loader, TensorLoader)
        loader.set_epoch(2)
        splits = int(settings.get("aug_splits", 1))
        images: dict[int, list[torch.Tensor]] = {}
        for x, y, ids in loader.with_ids():
            assert x.shape == (splits * size, *SIZE)
            assert len(y) == len(ids) == len(x)
            assert 0 <= x.min() <= x.max() <= 1
            for one, number in zip(x, ids.tolist(), strict=True):
                images.setdefault(number, []).append(one)
        seen.append(images)
    assert set(seen[0]) == set(seen[1])
    for number, views in seen[0].items():
        if "aug_repeats" not in settings:
            torch.testing.assert_close(torch.stack(views), torch.stack(seen[1][number]), atol=1.01 / 255, rtol=0)


def test_another_epoch_augments_otherwise_and_the_same_one_again_alike(tmp_path: Path) -> None:
    loader = train_loader(config_of(stripes(tmp_path), aa="rand-m9", scale=(0.3, 1.0)), input_size=SIZE, seed=3)
    epochs = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        batches = list(loader.with_ids())
        order = torch.cat([ids for _, _, ids in batches]).argsort()
        epochs.append(torch.cat([x for x, _, _ in batches])[order])
    assert torch.equal(epochs[0], epochs[2])
    assert not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize("start", [0, 1, 4])
def test_batches_augmented_together_are_those_of_a_chunk_wherever_a_run_begins(
    start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stripes(tmp_path)
    single = train_loader(config_of(folder, aa="rand-m9", batch_size=4), input_size=SIZE, seed=3)
    expected = list(single.with_ids())
    monkeypatch.setattr("vitruvius.data.loader.batches_in_chunk", lambda device, size: 3)
    together = train_loader(config_of(folder, aa="rand-m9", batch_size=4), input_size=SIZE, seed=3)
    whole = list(together.with_ids())
    together.start_batch = start
    found = list(together.with_ids())
    assert len(whole) == len(expected) > 4
    assert len(found) == len(expected) - start
    for (x, y, ids), (whole_x, _, _), (other, labels, names) in zip(
        found, whole[start:], expected[start:], strict=True
    ):
        assert torch.equal(ids, names)
        assert torch.equal(y, labels)
        assert torch.equal(x, whole_x)  # to the bit, wherever the run was taken up
        torch.testing.assert_close(x, other, atol=1.01 / 255, rtol=0)


def test_a_chunk_has_as_many_batches_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batches_in_chunk(torch.device("cpu"), 1) == 1
    properties = SimpleNamespace(total_memory=64 * 100)
    module = SimpleNamespace(stream=None, get_device_properties=lambda device: properties)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    sizes = [batches_in_chunk(torch.device("meta"), size) for size in (1000, 60, 30, 1)]
    assert sizes == [1, 1, 3, 16]


def test_auto_does_in_batches_what_workers_do_one_by_one(tmp_path: Path) -> None:
    folder = stripes(tmp_path, 64)
    settings = {"aa": "rand-m9-mstd0.5-inc1", "batch_size": 64, "reprob": 0.25}
    moments = []
    for cache, kind in (("none", ImageLoader), ("auto", TensorLoader)):
        loader = train_loader(config_of(folder, **settings, cache=cache), input_size=SIZE, seed=0)
        assert isinstance(loader, kind)
        images = []
        for epoch in range(8):
            loader.set_epoch(epoch)
            images.append(next(iter(loader))[0])
        x = torch.cat(images)
        moments.append(torch.stack([x.mean(), x.std(), x.std((2, 3)).mean(), x.diff(dim=-1).abs().mean()]))
    torch.testing.assert_close(moments[0], moments[1], atol=0.02, rtol=0.06)


def test_auto_leaves_alone_what_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = stripes(tmp_path)
    assert isinstance(train_loader(config_of(folder, cache="auto"), input_size=SIZE, seed=0), TensorLoader)
    for settings in ({"train_crop_mode": "rkrc"}, {"no_aug": True}):
        loader = train_loader(config_of(folder, cache="auto", **settings), input_size=SIZE, seed=0)
        assert isinstance(loader, ImageLoader)
    monkeypatch.setattr("vitruvius.data.cache.LIMIT", 1000)
    assert isinstance(train_loader(config_of(folder, cache="auto"), input_size=SIZE, seed=0), ImageLoader)
    monkeypatch.undo()
    write_image(folder / "train" / "a" / "wide.png", 99, size=(40, 16))
    assert isinstance(train_loader(config_of(folder, cache="auto"), input_size=SIZE, seed=0), ImageLoader)
    with pytest.raises(DataError, match="have several sizes"):
        train_loader(config_of(folder, aa="rand-m9"), input_size=SIZE, seed=0)


def test_memory_does_only_what_is_asked_for(tmp_path: Path) -> None:
    folder = stripes(tmp_path, size=(16, 16))
    loader = train_loader(config_of(folder, grayscale_prob=1.0, hflip=0.0), input_size=SIZE, seed=0)
    for x, _, ids in loader.with_ids():
        for image, number in zip(x, ids.tolist(), strict=True):
            stored = Image.fromarray(loader.images[number].movedim(0, -1).numpy()).convert("L")
            assert torch.equal((image[0] * 255).round(), torch.from_numpy(np.array(stored)).float())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train_crop_mode": "rkrc"}, "ResizeKeepRatio cannot be done on whole batches"),
        ({"aa": "augmix-m5-a2"}, "mixes with alpha = 1"),
        ({"aa": "rand-m9", "train_interpolation": "lanczos"}, r"data\.train_interpolation = nearest, bilinear"),
        ({"aa": "rant-m9"}, r"see data\.aa"),
        ({"no_aug": True}, r"data\.no_aug forbids"),
        ({"gaussian_blur_prob": 0.5, "image_size": 11}, "needs images of at least 12 pixels"),
    ],
)
def test_what_cannot_be_done_in_batches_is_refused_before_images_are_read(settings: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pipeline.BatchAugmentation(DataConfig(**settings), resolve(DataConfig(**settings), SIZE))


def test_grey_data_become_colour_for_a_model_that_wants_it_and_colour_grey() -> None:
    for channels in (1, 3):
        config = DataConfig(dataset="digits", batch_size=16, cache="memory", aa="rand-m9", rotation=10.0)
        x, _ = next(iter(train_loader(config, input_size=(channels, 8, 8), seed=0)))
        assert x.shape == (16, channels, 8, 8)


def test_a_recipe_trains_on_batches_that_are_augmented_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = stripes(tmp_path / "data", 16)
    (folder / "train").rename(folder / "every")
    recipe = f"""
    seed: 0
    model: {{name: vitruvius/vit_digits, kwargs: {{num_classes: 2, depth: 1}}}}
    data:
      {{dataset: folder, root: {folder}, train_split: every, val_split: every, batch_size: 8, cache: auto, workers: 0,
       aa: rand-m9-mstd0.5-inc1, reprob: 0.25, mixup: 0.8, cutmix: 1.0}}
    train: {{epochs: 1, warmup_epochs: 0, lr: 1e-3}}
    """
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert main(["train", "recipe.yaml", "--quiet", "out=run"]) == 0, capsys.readouterr().err
    assert (tmp_path / "run" / "best.safetensors").exists()
