"""Pieces that need more than settings, built and run with generated ones: refused in words before anything runs, or
they run and answer with finite numbers.

Settings are of the right type and of any size: what has another type is refused by the binding (test_fuzz.py).
"""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import vitruvius
from small_run import small_run
from vitruvius._config import hints_of
from vitruvius._errors import VitruviusError
from vitruvius._registry import Registry
from vitruvius.analysis import analyse, analyses, explanations
from vitruvius.attention import attentions
from vitruvius.init import inits
from vitruvius.init.filters import filters
from vitruvius.models import PixelModel
from vitruvius.studies._base import Subject, bind_study, studies
from vitruvius.tasks import tasks

NUMBERS = [-1.0, 0.0, 1e-30, 0.1, 0.5, 1.0, 2.0, 1e6, math.inf, -math.inf, math.nan]
COUNTS = [-1, 0, 1, 2, 3, 10**30]
WORDS = {  # settings whose texts are names or specs: some that are right, some that are wrong
    "norm": ["linf", "l2", "l1", "l7"],
    "attack": ["pgd", "fgsm", "pgd:steps=2", "square:queries=2", "nope", "pgd:steps=0", "pgd:eps=1"],
    "schedule": ["constant", "linear", "linear:until=0", "nope", {"use": "linear", "until": -1}],
    "teacher": ["vitruvius/vit_digits", "nope"],
    "teacher_weights": [None, "/nowhere"],
    "threat": [None, "fgsm", "pgd:steps=1", "nope", "pgd:steps=0", "fgsm:eps=1"],
    "analyses": [["norms"], ["nope"], [], ["norms:variant=nope"]],
    "shipped": [None, "/nowhere"],
    "file": [None, "/nowhere", "/"],
    "keep": [None, "all", "none"],
    "spaces": [["pixels"], ["normalised", "pixels"], [], ["nope"]],
    "labels": [["true"], ["predicted"], [], ["nope"]],
    "statistics": [["clean"], ["clean", "adversarial"], [], ["nope"]],
}
FEW = {"steps": [-1, 0, 1, 2], "replays": [-1, 0, 1, 2], "iterations": [-1, 0, 1, 3], "points": [-1, 0, 1, 2]}
RIGHT: dict[str, Any] = {"eps": 0.1, "taps": 2, "variance": 1.0, "steps": 1, "replays": 2, "iterations": 2, "points": 2}
RIGHT["analyses"] = ["norms"]
ALWAYS = {*FEW, "analyses"}  # said in every example, since what is said by default takes long
EXAMPLES = 300 if os.environ.get("EVERY_MISTAKE") else 15  # of each piece


def values(name: str, hint: Any) -> st.SearchStrategy[Any]:
    """Values of a setting: of its type, inside and outside what makes sense."""
    if name in WORDS and hint != (float | None):
        return st.sampled_from(WORDS[name])
    kinds = get_args(hint) if get_origin(hint) not in (Literal, tuple, None) else (hint,)
    return st.one_of([_of_type(name, kind) for kind in kinds])


def _of_type(name: str, kind: Any) -> st.SearchStrategy[Any]:
    if get_origin(kind) is Literal:
        return st.sampled_from([*get_args(kind), "nope"])
    if get_origin(kind) is tuple:
        return st.lists(_of_type(name, get_args(kind)[0]), max_size=2)
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.sampled_from(FEW.get(name, COUNTS))
    if kind is float:
        return st.sampled_from(NUMBERS)
    return st.none()


def specs(registry: Registry[Any], name: str) -> st.SearchStrategy[dict[str, Any]]:
    """A piece with right values for what it needs, and any value for one or two of its settings."""
    piece = registry[name]
    hints = hints_of(piece)
    known = [p for p in inspect.signature(piece).parameters.values() if p.kind is p.KEYWORD_ONLY]
    wanted = {p.name: values(p.name, hints.get(p.name)) for p in known if p.name != "generator"}
    right = {p.name: RIGHT[p.name] for p in known if p.name in RIGHT and (p.default is p.empty or p.name in ALWAYS)}

    def with_some(keys: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        odd = st.fixed_dictionaries({key: wanted[key] for key in keys})
        return odd.map(lambda found: {"use": name, **right, **found})

    if not wanted:
        return st.just({"use": name})
    return st.lists(st.sampled_from(sorted(wanted)), min_size=1, max_size=2, unique=True).flatmap(with_some)


@pytest.fixture(scope="module", autouse=True)
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small run; teachers are runs, and a study needs a model that is right about some images."""
    run = small_run(tmp_path_factory.mktemp("runs") / "run", "train.epochs=4", "train.lr=0.01", "train.holdout=0")
    WORDS["teacher"] = [str(run), "nope"]
    RIGHT["teacher"] = str(run)
    _places[:] = [run.parent]
    _known["model"] = vitruvius.load_model(run).eval()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitruvius.studies.kpca.save_figures", lambda *_: None)  # as no setting changes them
        yield run


_known: dict[str, PixelModel] = {}
_places: list[Path] = []


def model() -> PixelModel:
    return copy.deepcopy(_known["model"])


def images() -> tuple[Tensor, Tensor]:
    """Six pictures and what the model says of them, so that it is right about all."""
    size = _known["model"].data_config["input_size"]
    x = torch.rand(6, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return x, _known["model"](x).argmax(1)


Result = Tensor | None  # finite numbers are expected


def attention(spec: dict[str, Any]) -> Callable[[], Result]:
    rewired = vitruvius.rewire(model(), spec)
    return lambda: rewired(images()[0])


def task(spec: dict[str, Any]) -> Callable[[], Result]:
    made = tasks.make(spec, model().train(), where="task")

    def step() -> Tensor:
        loss: Tensor = made(*images())["loss"]
        loss.backward()
        return loss.detach()

    return step


def init(spec: dict[str, Any]) -> Callable[[], Result]:
    started = vitruvius.initialise(model(), spec, generator=torch.Generator().manual_seed(0))
    return lambda: started(images()[0])


def filter_(spec: dict[str, Any]) -> Callable[[], Result]:
    made = filters.bind(spec, where="filter")(3, 5, generator=torch.Generator().manual_seed(0))
    return lambda: made


def explanation(spec: dict[str, Any]) -> Callable[[], Result]:
    x, y = images()
    found = explanations.bind(spec, where="analysis")(model(), x[:2], y[:2])
    return lambda: found


def analysis(spec: dict[str, Any]) -> Callable[[], Result]:
    table = analyse(model(), [images()], spec, nulls=False)
    return lambda: torch.tensor([row.mean for row in table.rows])


def study(spec: dict[str, Any]) -> Callable[[], Result]:
    x, y = images()
    subject = Subject(name="m", model=model(), loader=[(x[:2], y[:2])], batch_size=2, folder=_places[0])
    rows = bind_study(spec)(subject, set())
    first = next(rows, None)
    assert first is not None, "a study without a row"
    return lambda: torch.tensor([float(value) for value in first.values() if isinstance(value, int | float)])


KINDS: dict[str, tuple[Registry[Any], Callable[[dict[str, Any]], Callable[[], Result]]]] = {
    "analyses": (analyses, analysis),
    "attentions": (attentions, attention),
    "explanations": (explanations, explanation),
    "filters": (filters, filter_),
    "inits": (inits, init),
    "studies": (studies, study),
    "tasks": (tasks, task),
}
SLOW = {"kpca": 4}  # examples of what takes long
EVERY = [(kind, name) for kind, (registry, _) in KINDS.items() for name in registry]


def check_piece(kind: str, spec: dict[str, Any], ran: list[object]) -> None:
    """Refused in words while it is built, or it runs and its numbers are finite."""
    try:
        run = KINDS[kind][1](dict(spec))
    except VitruviusError as error:
        if not str(error).strip():
            pytest.fail(f"{type(error).__name__} without a word")
        return
    found = run()
    assert found is None or bool(found.isfinite().all()), spec
    ran.append(spec)


@pytest.mark.filterwarnings("ignore::UserWarning")  # what a piece says of settings that it takes
@pytest.mark.parametrize(("kind", "name"), EVERY, ids=str)
def test_a_piece_is_refused_in_words_before_it_runs_or_answers_with_finite_numbers(kind: str, name: str) -> None:
    if name == "integrated_gradients":
        pytest.importorskip("captum")
    registry = KINDS[kind][0]
    ran: list[object] = []

    @settings(
        max_examples=SLOW.get(name, EXAMPLES), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(specs(registry, name))
    def check(spec: dict[str, Any]) -> None:
        check_piece(kind, spec, ran)

    check()
    assert ran  # a piece that is always refused was not tried
