"""Subsets of classes in folders: the packaged ImageNet-100, lists of the user's, and their mistakes."""

from __future__ import annotations

import pytest
from pictures import write_image

from vitruvius._errors import ConfigError, DataError
from vitruvius._imagenet import imagenet_classes
from vitruvius.data import DataConfig, eval_loader, train_loader
from vitruvius.data.classes import class_names

SIZE = (3, 16, 16)


def config(folder, **settings):
    return DataConfig(dataset="folder", root=str(folder), workers=0, **{"batch_size": 5, **settings})


def test_imagenet_100_is_a_hundred_wordnet_ids_in_order():
    names = class_names("imagenet-100")
    assert len(names) == 100
    assert names == sorted(set(names))
    assert (names[0], names[1], names[-1]) == ("n01484850", "n01532829", "n07860988")  # classes 2, 12 and 961


def test_imagenet_100_leaves_the_other_folders_out(tmp_path):
    for number, name in enumerate([*class_names("imagenet-100"), "n01440764", "n99999999"]):
        write_image(tmp_path / "val" / name / "a.png", number)
    loader = eval_loader(config(tmp_path, classes="imagenet-100", batch_size=100), input_size=SIZE)
    ((_, labels),) = loader
    assert labels.tolist() == list(range(100))
    assert (loader.num_images, loader.num_classes) == (100, 100)


def test_the_order_of_a_list_is_the_numbering(folder, tmp_path):
    (tmp_path / "list.txt").write_text("# two of three\ncat\n\nant\n")
    data = config(folder, classes=str(tmp_path / "list.txt"))
    labels = [label for _, batch in eval_loader(data, input_size=SIZE) for label in batch.tolist()]
    assert labels == [1, 1, 1, 0, 0, 0]
    train = train_loader(data, input_size=SIZE, seed=0)
    assert (train.num_images, train.num_classes) == (10, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ant\ndog\n", "among them dog"),
        ("ant\nant\n", "1 of them different"),
        ("", "lists 0 classes"),
        (None, "neither imagenet-100 nor"),
    ],
)
def test_a_wrong_list_is_explained(folder, tmp_path, text, message):
    if text is not None:
        (tmp_path / "list.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        eval_loader(config(folder, classes=str(tmp_path / "list.txt")), input_size=SIZE)


def test_classes_need_names_and_no_second_list():
    with pytest.raises(DataError, match="by name"):
        eval_loader(DataConfig(classes="imagenet-100"), input_size=SIZE)
    with pytest.raises(ConfigError, match="keep one"):
        DataConfig(classes="imagenet-100", class_map="map.txt")


def test_imagenet_1k_gives_each_folder_its_number_whichever_are_there(tmp_path):
    everyone = imagenet_classes()
    for number in (999, 0, 217):
        write_image(tmp_path / "val" / everyone[number] / "a.png", number % 50)
    write_image(tmp_path / "val" / "n99999999" / "a.png", 0)
    write_image(tmp_path / "train" / everyone[5] / "a.png", 0)  # numbers are not those of the training folder
    loader = eval_loader(config(tmp_path, class_map="imagenet-1k"), input_size=SIZE)
    ((_, labels),) = loader
    assert labels.tolist() == [0, 217, 999]
    assert (loader.num_images, loader.num_classes) == (3, 1000)


def test_imagenet_1k_is_for_folders_named_by_wordnet_ids(folder):
    with pytest.raises(DataError, match="names none"):
        eval_loader(config(folder, class_map="imagenet-1k"), input_size=SIZE)
    with pytest.raises(DataError, match="cannot number the classes of digits"):
        eval_loader(DataConfig(class_map="imagenet-1k"), input_size=SIZE)
