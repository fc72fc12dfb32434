"""Readers of published layouts: right labels, what is missing named, what is wrong refused."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shift_layouts import CLASSES, write_arrays, write_corrupted, write_pictures
from vitruvius import corrupted_copies
from vitruvius._errors import ConfigError, DataError, UnknownName
from vitruvius._imagenet import imagenet_classes, subset_columns
from vitruvius.corruptions.base import BENCHMARK, IMAGENET_C
from vitruvius.corruptions.fog import Fog
from vitruvius.data.identity import identify
from vitruvius.shifts import open_shift, shifts
from vitruvius.shifts.base import Remark, say_once
from vitruvius.shifts.layouts import ArrayImages, Pictures
from vitruvius.shifts.published import INSIDE


def labels_of(images: Pictures | ArrayImages) -> list[int]:
    return [images.read(index)[1] for index in range(len(images))]


def test_every_reader_says_in_one_line_what_it_reads() -> None:
    assert list(shifts) == [
        *("cifar-10-c", "cifar-100-c", "folder-c", "imagenet-a", "imagenet-c", "imagenet-c-bar"),
        *("imagenet-o", "imagenet-r", "imagenet-sketch", "imagenet-v2"),
    ]
    assert all(line.endswith(".") and "<" in line for _, _, line in shifts.describe())


@pytest.mark.parametrize(
    ("subset", "number", "digest"),  # of the published lists, one id a line
    [
        ("", 1000, "385e0240499426c0"),
        ("a", 200, "f6aa4b23244554d9"),
        ("o", 200, "39f8e64e8f89efad"),
        ("r", 200, "e19a59d84e3746fa"),
    ],
)
def test_the_class_lists_are_the_published_ones(subset: str, number: int, digest: str) -> None:
    classes = imagenet_classes(subset)
    assert len(set(classes)) == number
    assert hashlib.sha256("\n".join(classes).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("nested", [False, True])
def test_imagenet_c_is_found_flat_and_in_its_archives(tmp_path: Path, nested: bool) -> None:
    wnids = [CLASSES[999], CLASSES[3], CLASSES[20]]
    write_corrupted(tmp_path / "weather" if nested else tmp_path, ["fog", "snow"], [1, 3], wnids)
    shift = open_shift(f"imagenet-c:{tmp_path}")
    assert [part.name for part in shift.parts] == ["snow 1", "snow 3", "fog 1", "fog 3"]
    assert [(part.group, part.severity) for part in shift.parts[2:]] == [("fog", 1), ("fog", 3)]
    assert shift.benchmark == BENCHMARK
    assert {"fog 2", "fog 4", "fog 5", "contrast", "saturate"} < set(shift.missing)
    assert len(shift.missing) == 17 + 6
    images = shift.parts[0].open()
    assert labels_of(images) == [3, 20, 999]
    assert [str(remark) for remark in images.remarks] == [
        "imagenet-c/snow 1: classes without pictures: n01440764, n01443537, n01484850 and 994 more."
    ]
    assert torch.equal(images.keys, shift.parts[3].open().keys)  # the same file is the same image everywhere


def test_keys_do_not_depend_on_what_lies_beside(tmp_path: Path) -> None:
    write_pictures(tmp_path, CLASSES[4:6], each=2)
    before = {images.files[i][0]: int(images.keys[i]) for images in [_sketch(tmp_path)] for i in range(4)}
    write_pictures(tmp_path, CLASSES[:3])
    after = _sketch(tmp_path)
    found = {file: int(key) for (file, _), key in zip(after.files, after.keys, strict=True)}
    assert len(found) == 7
    assert before.items() < found.items()


def _sketch(root: Path) -> Pictures:
    images = open_shift(f"imagenet-sketch:{root}").parts[0].open()
    assert isinstance(images, Pictures)
    return images


@pytest.mark.parametrize("letter", ["a", "r", "o"])
def test_subsets_have_labels_among_their_classes_and_name_their_logits(tmp_path: Path, letter: str) -> None:
    classes = imagenet_classes(letter)
    write_pictures(tmp_path / f"imagenet-{letter}", [classes[7], classes[0]])
    (tmp_path / f"imagenet-{letter}" / "README.txt").write_text("words")
    shift = open_shift(f"imagenet-{letter}:{tmp_path}")
    assert shift.columns == subset_columns(letter)
    assert [CLASSES[column] for column in shift.columns] == list(classes)
    assert shift.num_classes == 1000
    assert labels_of(shift.parts[0].open()) == [0, 7]
    assert shift.parts[0].outside == (letter == "o")


def test_imagenet_o_is_told_from_validation_pictures_of_its_classes(tmp_path: Path) -> None:
    classes = imagenet_classes("o")
    write_pictures(tmp_path / "o", classes[:2])
    write_pictures(tmp_path / "val", [*CLASSES[:3], classes[5]])
    assert "add validation=" in open_shift(f"imagenet-o:{tmp_path / 'o'}").missing[0]
    shift = open_shift(f"imagenet-o:{tmp_path / 'o'},validation={tmp_path / 'val'}")
    assert not shift.missing
    assert [(part.name, part.outside) for part in shift.parts] == [("imagenet-o", True), (INSIDE, False)]
    inside = shift.parts[1].open()
    assert labels_of(inside) == [0, 5]  # of the first three classes one is among the 200
    assert not [remark for remark in inside.remarks if "not a class of it" in str(remark)]
    with pytest.raises(DataError, match="not a folder"):
        open_shift(f"imagenet-o:{tmp_path / 'o'},validation=nowhere")
    with pytest.raises(DataError, match="no folder of a class"):
        open_shift(f"imagenet-o:{tmp_path / 'o'},validation={tmp_path}")


def test_the_folders_of_imagenet_v2_are_numbers_and_not_words(tmp_path: Path) -> None:
    write_pictures(tmp_path / "imagenetv2-matched-frequency-format-val", ["0", "2", "10", "999"])
    write_pictures(tmp_path / "imagenetv2-top-images-format-val", [CLASSES[5]])
    shift = open_shift(f"imagenet-v2:{tmp_path}")
    assert [part.name for part in shift.parts] == ["matched-frequency", "top-images"]
    assert shift.missing == ("threshold-0.7",)
    images = shift.parts[0].open()
    assert labels_of(images) == [0, 2, 10, 999]
    assert labels_of(shift.parts[1].open()) == [5]  # a copy with WordNet ids
    one = open_shift(f"imagenet-v2:{tmp_path / 'imagenetv2-matched-frequency-format-val'}")
    assert [part.name for part in one.parts] == ["matched-frequency"]


def test_imagenet_c_bar_and_folders_of_any_data_have_corruptions_too(tmp_path: Path) -> None:
    write_corrupted(tmp_path / "bar", ["sparkles"], [5], CLASSES[:2])
    assert [part.name for part in open_shift(f"imagenet-c-bar:{tmp_path / 'bar'}").parts] == ["sparkles 5"]
    write_corrupted(tmp_path / "own", ["fog"], [1], ["class10", "class9"])
    write_corrupted(tmp_path / "own", ["snow"], [1], ["class11"])
    shift = open_shift(f"folder-c:{tmp_path / 'own'}")
    assert shift.num_classes == 3
    assert {part.name: labels_of(part.open()) for part in shift.parts} == {"snow 1": [2], "fog 1": [0, 1]}


@pytest.mark.parametrize(("name", "classes"), [("cifar-10-c", 10), ("cifar-100-c", 100)])
def test_cifar_c_has_five_severities_one_after_the_other(tmp_path: Path, name: str, classes: int) -> None:
    write_arrays(tmp_path / name.upper(), ["fog", "saturate"], images=4)
    shift = open_shift(f"{name}:{tmp_path}")
    assert [part.name for part in shift.parts] == [f"{one} {s}" for one in ("fog", "saturate") for s in range(1, 6)]
    assert set(shift.missing) == set(IMAGENET_C) - {"fog", "saturate"}
    assert shift.num_classes == classes
    whole = np.load(tmp_path / name.upper() / "fog.npy")
    for severity in range(5):
        images = shift.parts[severity].open()
        assert isinstance(images, ArrayImages)
        assert images.keys.tolist() == [0, 1, 2, 3]
        assert labels_of(images) == [0, 1, 2, 3]
        np.testing.assert_array_equal(images.images.movedim(1, -1), whole[4 * severity : 4 * severity + 4])
        np.testing.assert_array_equal(np.asarray(images.read(2)[0]), whole[4 * severity + 2])
    assert "4 images per severity; as published there are 10,000" in shift.remarks[0]


@pytest.mark.parametrize("size", [8, None])
def test_folders_that_corrupt_writes_are_read_with_their_labels(tmp_path: Path, size: int | None) -> None:
    write_pictures(tmp_path / "clean", ["1", "2", "10"], each=2)
    settings: dict[str, Any] = {"out": tmp_path / "copy", "size": size, "format": "png", "workers": 1}
    corrupted_copies.write_corrupted(str(tmp_path / "clean"), names=["fog"], severities=[2, 4], **settings)
    shift = open_shift(f"folder-c:{tmp_path / 'copy'}")
    assert [part.name for part in shift.parts] == ["fog 2", "fog 4"]
    assert shift.cropped == (size is not None)
    assert not shift.remarks
    images = shift.parts[1].open()
    assert labels_of(images) == [0, 0, 1, 1, 2, 2]


def test_arrays_that_corrupt_writes_are_read_with_their_labels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "clean.npz", image=pixels, label=np.array([3, 1, 4, 1]))
    settings: dict[str, Any] = {"out": tmp_path / "copy", "names": ["fog"], "workers": 1}
    corrupted_copies.write_corrupted("npz", [f"data.root={tmp_path / 'clean.npz'}"], **settings)
    shift = open_shift(f"cifar-10-c:{tmp_path / 'copy'}")
    images = shift.parts[2].open()
    assert isinstance(images, ArrayImages)
    assert labels_of(images) == [3, 1, 4, 1]
    x = torch.from_numpy(pixels).movedim(-1, 1) / 255
    fly = Fog(severity=3)(None, x, None, ids=images.keys)  # the same image on the fly
    assert torch.equal((fly * 255).round().byte(), images.images)


def test_strange_files_and_folders_are_left_out_and_named(tmp_path: Path) -> None:
    write_corrupted(tmp_path, ["fog"], [1], CLASSES[:2])
    (tmp_path / "fog" / "1" / CLASSES[0] / "notes.txt").write_text("words")
    write_pictures(tmp_path / "fog" / "1", ["n00000000"])
    (tmp_path / "fig").mkdir()
    (tmp_path / "fog" / "6").mkdir()
    (tmp_path / "fog" / "1" / "loose.PNG").write_bytes(b"")
    shift = open_shift(f"imagenet-c:{tmp_path}")
    assert shift.remarks == (
        "imagenet-c: left out, not a corruption of it: fig.",
        "imagenet-c: left out, not a severity from 1 to 5: fog/6.",
    )
    images = shift.parts[0].open()
    assert len(images) == 2
    assert [str(remark) for remark in images.remarks[:3]] == [
        "imagenet-c/fog 1: left out, not a class of it: n00000000.",
        "imagenet-c/fog 1: left out, in no class folder: loose.PNG.",
        f"imagenet-c/fog 1: left out, not pictures: {CLASSES[0]}/notes.txt.",
    ]


def test_an_empty_folder_is_missing_and_wrong_classes_are_refused_before_anything_is_judged(tmp_path: Path) -> None:
    write_corrupted(tmp_path, ["fog"], [1, 2], CLASSES[:2])
    (tmp_path / "fog" / "3").mkdir()
    (tmp_path / "snow" / "1").mkdir(parents=True)
    shift = open_shift(f"imagenet-c:{tmp_path}")
    assert [part.name for part in shift.parts] == ["fog 1", "fog 2"]
    assert {"fog 3", "snow"} < set(shift.missing)
    write_pictures(tmp_path / "snow" / "1", ["tench"])
    with pytest.raises(DataError, match="found tench"):
        open_shift(f"imagenet-c:{tmp_path}")


def test_a_damaged_record_of_a_copy_is_one_clear_error(tmp_path: Path) -> None:
    write_corrupted(tmp_path, ["fog"], [1], ["cat"])
    for damage in ("{", "[]"):
        (tmp_path / "corrupt.json").write_text(damage)
        with pytest.raises(DataError, match="is damaged"):
            open_shift(f"folder-c:{tmp_path}")


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    write_pictures(tmp_path / "v2", ["0", "1", "2", "3"])
    with pytest.raises(DataError, match=r"no folder of a class of .*n01440764, found 0, 1, 2 and 1 more"):
        open_shift(f"imagenet-sketch:{tmp_path / 'v2'}")
    for name in ("imagenet-a", "imagenet-o", "imagenet-r"):
        with pytest.raises(DataError, match=f"no folder of a class of {name}"):  # at once, not at its turn
            open_shift(f"{name}:{tmp_path / 'v2'}")
    with pytest.raises(DataError, match="no corruption of imagenet-c"):
        open_shift(f"imagenet-c:{tmp_path / 'v2'}")
    with pytest.raises(DataError, match="no variant of imagenet-v2"):
        open_shift(f"imagenet-v2:{tmp_path}")
    with pytest.raises(DataError, match=r"found 0, 1, 2, 3\."):
        open_shift(f"folder-c:{tmp_path / 'v2'}")
    (tmp_path / "words" / "fog" / "one").mkdir(parents=True)
    with pytest.raises(DataError, match=r"found fog/one\."):
        open_shift(f"folder-c:{tmp_path / 'words'}")
    with pytest.raises(DataError, match="have no severities"):
        open_shift(f"imagenet-c:{tmp_path / 'words'}")
    (tmp_path / "empty" / CLASSES[0]).mkdir(parents=True)
    with pytest.raises(DataError, match="hold no pictures"):
        _sketch(tmp_path / "empty")


@pytest.mark.parametrize(
    ("spec", "error", "word"),
    [
        ("imagenet-c", ConfigError, "where the images are"),
        ("imagenet-c:,x", ConfigError, "where the images are"),
        ("imagenet-c:nowhere", DataError, "does not exist"),
        (f"imagenet-c:{__file__}", DataError, "is a file"),
        ("imagenet-z:.", UnknownName, "no shift named 'imagenet-z'"),
        ("imagenet-c:.,validation=x", ConfigError, "validation"),
    ],
)
def test_wrong_words_are_refused(spec: str, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        open_shift(spec)


@pytest.mark.parametrize(
    ("file", "damaged", "word"),
    [
        ("snow.npy", lambda data: data[:-100], "may be truncated"),
        ("snow.npy", lambda data: data[:20], "cannot be read"),
        ("snow.npy", lambda _: b"", "cannot be read"),
        ("snow.npy", np.zeros((30, 8, 8, 3), np.float32), "holds float32"),
        ("snow.npy", np.zeros((25, 8, 8, 3), np.uint8), "an image for each label"),
        ("snow.npy", np.zeros((30, 3, 8, 8), np.uint8), "with 1 or 3 channels"),
        ("labels.npy", np.full(30, 10), "holds int64 from 10 to 10"),
        ("labels.npy", np.zeros(31, int), r"shape \(31,\)"),
    ],
)
def test_damaged_arrays_are_refused_at_once(tmp_path: Path, file: str, damaged: Any, word: str) -> None:
    root = write_arrays(tmp_path, ["fog", "snow"])
    if callable(damaged):
        (root / file).write_bytes(damaged((root / file).read_bytes()))
    else:
        np.save(root / file, damaged)
    with pytest.raises(DataError, match=word):
        open_shift(f"cifar-10-c:{root}")


def test_arrays_that_are_not_there_are_named(tmp_path: Path) -> None:
    root = write_arrays(tmp_path, ["fog", "snow"])
    (root / "snow.npy").rename(root / "snowfall.npy")
    assert open_shift(f"cifar-10-c:{root}").remarks[0].endswith("not a corruption of it: snowfall.npy.")
    (root / "labels.npy").rename(root / "classes.npy")
    with pytest.raises(DataError, match=r"has no labels.npy; .*; found classes.npy, fog.npy, snowfall.npy\."):
        open_shift(f"cifar-10-c:{root}")
    (root / "classes.npy").rename(root / "labels.npy")
    (root / "fog.npy").unlink()
    with pytest.raises(DataError, match="none of the files of cifar-10-c"):
        open_shift(f"cifar-10-c:{root}")


def test_pictures_say_where_they_are_and_broken_ones_raise(tmp_path: Path) -> None:
    write_pictures(tmp_path, CLASSES[:1], each=2)
    images = _sketch(tmp_path)
    assert {"names", "sizes", "labels", "contents"} < set(identify(images))
    assert images.describe(1) == str(tmp_path / CLASSES[0] / "001.png")
    (tmp_path / CLASSES[0] / "001.png").write_bytes(b"no picture")
    assert images.read(0)[0].size == (8, 8)
    with pytest.raises(Image.UnidentifiedImageError):
        images.read(1)


def test_what_many_parts_have_in_common_is_said_once() -> None:
    def remark(part: str, *names: str) -> Remark:
        return Remark(f"c/{part}", "gone" if len(names) > 1 else "out", names)

    every = [remark(part, "a", "b") for part in ("fog 1", "fog 2", "snow 1")]
    assert say_once("c", 3, [*every, *every]) == ["c: gone: a, b."]  # as two processes say it
    assert say_once("c", 4, every) == ["c, 3 of 4 parts: gone: a, b."]
    assert say_once("c", 3, every[1:2]) == ["c/fog 2: gone: a, b."]
    mixed = [remark("fog 1", "a", "b"), "fog 1 is odd.", remark("fog 2", "a", "b", "c", "d"), remark("fog 1", "x")]
    assert say_once("c", 2, mixed) == ["c: gone: a, b, c and 1 more.", "c/fog 1: out: x.", "fog 1 is odd."]
