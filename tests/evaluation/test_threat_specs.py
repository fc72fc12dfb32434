import pytest

from vitruvius._errors import UnknownName
from vitruvius.attacks.apgd import APGD
from vitruvius.attacks.pgd import PGD
from vitruvius.evaluation import make_threat


def test_norms_and_losses_are_words_on_the_command_line():
    assert make_threat("pgd:eps=0.5,steps=4,norm=l2,loss=margin") == PGD(eps=0.5, steps=4, norm="l2", loss="margin")
    assert make_threat("apgd:eps=4/255,loss=dlr") == APGD(eps=4 / 255, loss="dlr")


@pytest.mark.parametrize(("text", "words"), [("pgd:eps=1,norm=l3", "did you mean 'l2'"), ("pgd:eps=1,loss=cee", "ce")])
def test_an_unknown_word_is_answered_with_the_known_ones(text, words):
    with pytest.raises(UnknownName, match=words):
        make_threat(text)
