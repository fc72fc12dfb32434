"""The verbs and flags that people have in their scripts, and the help of each, which is its docstring."""

from __future__ import annotations

import inspect
import re

import pytest

from vitruvius.cli import VERBS, main, make_app

RUN = "--images --out --trust-plugins"
FLAGS = {
    "analyse": f"TARGET WHAT --attack --seed {RUN}",
    "attack": f"TARGET OVERRIDES --threat --what {RUN}",
    "bench": "WHAT",
    "completion": "SHELL",
    "compress": f"TARGET OVERRIDES --sparsity --rank --rule --budget --epochs --threat {RUN}",
    "convert": "CHECKPOINT SETTINGS --from --model --ema --lenient --out",
    "corrupt": "DATA OVERRIDES --out --corruptions --severities --size --format --seed --scale --textures --images "
    "--workers",
    "cycles": "TARGET OVERRIDES --head-dim --threshold --trust-plugins",
    "demo": "--out",
    "evaluate": f"TARGET OVERRIDES --threat --shift --baseline --calibrate --sanity --fresh --slurm {RUN}",
    "export": "TARGET OVERRIDES --masks --format --sparse --out --trust-plugins",
    "list": "KIND SECTION",
    "look": "TARGET PICTURES --data --threat --attention --beside --masks --sparsity --class --png --serve --port "
    f"--open {RUN}",
    "maps": f"TARGET OVERRIDES --augment --figure {RUN}",
    "masks": "MAPS --rule --sparsity --budget --protect --threshold --of --out --figure --tiles --trust-plugins",
    "report": f"RUNS --threat --title {RUN}",
    "schema": "--pieces",
    "study": f"NAME WORDS {RUN}",
    "sweep": "SWEEP OVERRIDES --dry-run --minutes --jobs --only --run --slurm --status",
    "train": "RECIPE OVERRIDES --quiet --dry-run --slurm",
}
APP = make_app()


def test_the_verbs_are_these() -> None:
    assert sorted(names[0] for names in VERBS) == sorted(FLAGS)
    assert [names[1:] for names in VERBS if len(names) > 1] == [("analyze",), ("eval",)]


@pytest.mark.parametrize("verb", FLAGS)
def test_a_verb_has_these_flags(verb: str) -> None:
    arguments = APP[verb].assemble_argument_collection()
    assert sorted(argument.name for argument in arguments) == sorted(FLAGS[verb].split())


@pytest.mark.parametrize("verb", FLAGS)
def test_the_help_of_a_verb_is_its_docstring(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "--help"]) == 0
    shown = plain(capsys.readouterr().out)
    text = inspect.getdoc(APP[verb].default_command) or ""
    about, _, arguments = text.partition("Args:")
    assert plain(about) in shown
    explained = dict(re.findall(r"^    (\w+): ((?:.|\n        )+)", arguments, flags=re.MULTILINE))
    assert len(explained) == len(FLAGS[verb].split())
    assert all(plain(help) in shown for help in explained.values())


def plain(text: str) -> str:
    """Without the frame, and however it is broken into lines."""
    return " ".join(re.sub(r"[╭─╮│╰╯]|--?[a-z-]+ \(-h\)", " ", text).split())
