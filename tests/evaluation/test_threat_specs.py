"""Threats by their descriptions: the same three ways to write one everywhere, and the same answer to a mistake."""

from __future__ import annotations

from typing import Any

import pytest
from judging import loader, model

from vitruvius._errors import ConfigError, UnknownName
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.pgd import PGD
from vitruvius.cli import main
from vitruvius.evaluation import evaluate, make_threat


def test_norms_and_losses_are_words_on_the_command_line() -> None:
    assert make_threat("pgd:eps=0.5,steps=4,norm=l2,loss=margin") == PGD(eps=0.5, steps=4, norm="l2", loss="margin")
    assert make_threat("apgd:eps=4/255,loss=dlr") == APGD(eps=4 / 255, loss="dlr")


@pytest.mark.parametrize(("text", "words"), [("pgd:eps=1,norm=l3", "did you mean 'l2'"), ("pgd:eps=1,loss=cee", "ce")])
def test_an_unknown_word_is_answered_with_the_known_ones(text: str, words: str) -> None:
    with pytest.raises(UnknownName, match=words):
        make_threat(text)


def test_evaluate_takes_a_threat_as_text_as_a_mapping_and_as_an_object() -> None:
    object_itself = PGD(eps=8 / 255, steps=1)
    expected = evaluate(model(), loader(), [object_itself]).to_dict()
    for spec in ("pgd:eps=8/255,steps=1", {"use": "pgd", "eps": 8 / 255, "steps": 1}):
        for threats in ([spec], spec):
            found = evaluate(model(), loader(), threats).to_dict()  # type: ignore[arg-type]
            for report in (found, expected):
                for threat in report["threats"]:
                    threat.pop("seconds", None)
            assert found == expected


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("pdg:eps=8/255", UnknownName, "no attack named 'pdg'; did you mean 'pgd'"),
        ("pgd:epsilon=8/255", ConfigError, "epsilon"),
        ({"use": "pdg"}, UnknownName, "no attack named 'pdg'; did you mean 'pgd'"),
        (3, ConfigError, r"3 is not a attack|3 is not an attack"),
        (None, ConfigError, "None is not a"),
    ],
)
def test_a_wrong_threat_gets_the_same_answer_from_every_door(
    spec: Any, error: type[Exception], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error, match=words):
        evaluate(model(), loader(), [spec])
    with pytest.raises(error, match=words):
        make_threat(spec)
    if isinstance(spec, str):
        assert main(["evaluate", "nowhere", "data.dataset=digits", "--threat", spec]) == 1
        assert capsys.readouterr().err.startswith("vitruvius: --threat: ")
