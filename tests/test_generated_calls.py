"""Generated bad calls of every public function: each argument wrong in each way. Refused with words, nothing touched.

A refusal is an error of ours, a ValueError or a TypeError that says what came, never an AttributeError from inside.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import vitruvius
from small_run import RECIPE, SMALL, small_run
from vitruvius._errors import VitruviusError
from vitruvius._yaml import read_yaml

RUN = "RUN"  # stands for the run of the fixture
NO_TEXT = [3, None, 1.5, ["a"], {}]
NO_MODEL = [3, None, "vit", [], {}]
NO_NAME = ["nope", "", "\0", *NO_TEXT]
NO_SPEC = ["nope", "", ":", "nope:a=1", 3, {"use": "nope"}, {"use": 3}, {"iterations": 1}, object()]
NO_SEED = ["x", 1.5, None, [1]]
NO_WHERE = ["nothing.*", 3, [3], object()]


class Call(NamedTuple):
    """One call with one wrong argument; `place` is its position or name."""

    name: str
    place: int | str
    bad: Any

    def __str__(self) -> str:
        shown = str(self.bad)[:24]
        if " at 0x" in str(self.bad):  # an address differs from process to process, and a test's name must not
            shown = "any"
        return f"{self.name}-{self.place}-{type(self.bad).__name__}-{shown}"


def batch(**other: Any) -> list[tuple[Tensor, Tensor]]:
    """Four digits; images or labels may be others."""
    x = other.get("x", torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    return [(x, other.get("y", torch.arange(4)))]


BAD_BATCHES = {
    "none": [],
    "a number": 3,
    "nothing": None,
    "NaN": batch(x=torch.full((4, 3, 8, 8), torch.nan)),
    "255": batch(x=torch.full((4, 3, 8, 8), 255.0)),
    "bytes": batch(x=torch.zeros(4, 3, 8, 8, dtype=torch.uint8)),
    "one axis": batch(x=torch.rand(4)),
    "float labels": batch(y=torch.arange(4) + 0.5),
    "negative labels": batch(y=torch.arange(4) - 2),
    "labels beyond": batch(y=torch.arange(4) + 10),
    "too few labels": batch(y=torch.arange(3)),
    "no pair": [(torch.rand(4, 3, 8, 8),)],
    "text": ["images"],
}
LABELS = (
    "float labels",
    "negative labels",
    "labels beyond",
    "too few labels",
    "no pair",
)  # maps and analyses need none


class Batches:
    """Bad batches with a name that pytest can show."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


def batches(*, labels: bool) -> list[Batches]:
    return [Batches(name) for name in BAD_BATCHES if labels or name not in LABELS]


BAD: dict[str, dict[int | str, list[Any]]] = {  # function → argument → what it cannot be
    "create_model": {
        0: NO_NAME,
        "attention": ["nope", 3, [3], [{"use": "nope"}], [{"use": "rpc", "iterations": 0}], [{"use": "rpc", "x": 1}]],
        "init": NO_SPEC,
        "seed": NO_SEED,
        "depth": ["x", -1],
        "nope": [1],
    },
    "load_model": {0: ["nowhere", "", "\0", __file__, *NO_TEXT]},
    "rewire": {0: NO_MODEL, 1: NO_SPEC, "where": NO_WHERE},
    "restore": {0: NO_MODEL, "where": [3, [3], object()]},
    "survey": {0: NO_MODEL},
    "record": {0: NO_MODEL, "where": NO_WHERE},
    "initialise": {0: NO_MODEL, 1: NO_SPEC, "where": NO_WHERE, "generator": [3, "x", object()]},
    "train": {
        0: ["nope", "", 3, None, [], {}, {"model": 3}, {"nope": 1}, object()],
        1: [["nope=1"], ["train.lr=x"], ["train.lr"], [3], 3],
    },
    "evaluate": {
        0: NO_MODEL,
        1: batches(labels=True),
        2: ["nope", "pgd:eps=-1", "pgd:eps=8", 3, [3], [None], {"use": "pgd", "eps": "x"}, [{"use": 3}]],
    },
    "average_maps": {0: NO_MODEL, 1: batches(labels=False), "where": NO_WHERE},
    "analyse": {
        0: NO_MODEL,
        1: batches(labels=False),
        2: ["nope", "norms:nope=1", 3, None, {"use": "nope"}],
        "images": [0, -3, "x", 1.5],
        "seed": ["x", None],
    },
    "look": {
        0: ["nope", "", "\0", 3, None, [], {}],
        1: ["nowhere.png", "", "\0", __file__, 3, None, [], {}, torch.zeros(2), torch.full((3, 8, 8), torch.nan)],
        "threat": ["nope", "pgd:eps=8", 3, [None]],
        "attention": ["nope", 3, [3]],
        "masks": ["nowhere.safetensors", __file__, 3],
        "sparsity": [2, -1, "x"],
        "beside": ["nope", 3],
        "of_class": ["nope", 10, -1, [1]],
    },
}
CALLS = [Call(name, place, bad) for name, places in BAD.items() for place, every in places.items() for bad in every]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_run(tmp_path_factory.mktemp("runs") / "run", "train.epochs=1")


@pytest.fixture(scope="module")
def model(run: Path) -> nn.Module:
    return vitruvius.load_model(run).eval()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working folder is empty, and stays so."""
    monkeypatch.chdir(tmp_path)
    yield
    assert list(tmp_path.iterdir()) == []


def right_arguments(name: str, model: nn.Module, run: Path) -> tuple[list[Any], dict[str, Any]]:
    """What the function takes when nothing is wrong."""
    recipe = read_yaml(RECIPE)
    dice = torch.Generator().manual_seed(0)
    known: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "create_model": (["vitruvius/vit_digits"], {"depth": 1}),
        "load_model": ([run], {}),
        "rewire": ([model, "softmax"], {}),
        "restore": ([model], {}),
        "survey": ([model], {}),
        "record": ([model], {}),
        "initialise": ([model, "trunc_normal"], {"generator": dice}),
        "train": ([recipe, list(SMALL)], {"quiet": True}),
        "evaluate": ([model, batch(), "fgsm:eps=0.1"], {}),
        "average_maps": ([model, batch()], {}),
        "analyse": ([model, batch(), "norms"], {}),
        "look": ([model, batch()[0][0][0]], {}),
    }
    return known[name]


def call(name: str, arguments: list[Any], settings: dict[str, Any]) -> Any:
    """Call the function; a context is entered."""
    function: Callable[..., Any] = getattr(vitruvius, name)
    made = function(*arguments, **settings)
    if hasattr(made, "__enter__"):
        with made:
            pass
    return made


@pytest.mark.parametrize("name", [name for name in BAD if name != "train"])
def test_without_a_mistake_the_call_works(name: str, model: nn.Module, run: Path) -> None:
    arguments, settings = right_arguments(name, copy.deepcopy(model), run)
    call(name, arguments, settings)


@pytest.mark.parametrize("wrong", CALLS, ids=str)
def test_a_bad_argument_is_refused_with_words(wrong: Call, model: nn.Module, run: Path) -> None:
    own = copy.deepcopy(model)
    before = {key: value.clone() for key, value in own.state_dict().items()}
    arguments, settings = right_arguments(wrong.name, own, run)
    bad = wrong.bad
    if isinstance(bad, Batches):
        bad = BAD_BATCHES[bad.name]
    if isinstance(wrong.place, int):
        arguments[wrong.place] = bad
    else:
        settings[wrong.place] = bad
    with pytest.raises((VitruviusError, ValueError, TypeError)) as refusal:
        call(wrong.name, arguments, settings)
    said = str(refusal.value)
    assert len(said) > 15
    assert "object has no attribute" not in said
    assert "must be str, not" not in said
    assert own.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in own.state_dict().items())


def test_every_public_function_is_called() -> None:
    assert set(BAD) == {name for name in vitruvius.__all__ if name != "__version__"}
    assert len(CALLS) > 100
