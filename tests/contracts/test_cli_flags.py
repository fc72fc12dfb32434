"""The verbs and flags that people have in their scripts; taking one away is a breaking change."""

from __future__ import annotations

from typing import Any

from vitruvius.cli import make_parser

COMMON = ["--help", "--verbose", "-h", "-v"]
FLAGS = {
    "analyse": [
        "target",
        "what",
        "--attack",
        "--images",
        "--seed",
        "--out",
        "--trust-plugins",
    ],
    "attack": ["target", "overrides", "--threat", "--what", "--images", "--out", "--trust-plugins"],
    "completion": ["shell"],
    "convert": ["checkpoint", "settings", "--from", "--model", "--ema", "--lenient", "--out"],
    "corrupt": [
        "data",
        "overrides",
        "--out",
        "--corruptions",
        "--severities",
        "--size",
        "--format",
        "--seed",
        "--scale",
        "--textures",
        "--images",
        "--workers",
    ],
    "compress": [
        "run",
        "overrides",
        "--sparsity",
        "--rank",
        "--rule",
        "--epochs",
        "--threat",
        "--images",
        "--out",
        "--trust-plugins",
    ],
    "cycles": ["target", "overrides", "--head-dim", "--threshold", "--trust-plugins"],
    "demo": ["--out"],
    "evaluate": [
        "target",
        "overrides",
        "--threat",
        "--shift",
        "--baseline",
        "--calibrate",
        "--sanity",
        "--images",
        "--out",
        "--fresh",
        "--trust-plugins",
    ],
    "bench": ["what"],
    "export": ["run", "--format", "--sparse", "--out", "--trust-plugins"],
    "list": ["kind", "section"],
    "maps": ["target", "overrides", "--augment", "--images", "--out", "--figure", "--trust-plugins"],
    "masks": [
        "maps",
        "--rule",
        "--sparsity",
        "--budget",
        "--protect",
        "--threshold",
        "--of",
        "--out",
        "--figure",
        "--tiles",
        "--trust-plugins",
    ],
    "report": ["runs", "--images", "--threat", "--out", "--title", "--trust-plugins"],
    "study": ["name", "words", "--images", "--out", "--trust-plugins"],
    "sweep": ["sweep", "overrides", "--dry-run", "--minutes", "--jobs", "--only", "--run"],
    "train": ["recipe", "overrides", "--quiet", "--dry-run", "--slurm"],
}


ALIASES = {"analyze": "analyse", "eval": "evaluate"}


def words(parser: Any) -> list[str]:
    return sorted(word for action in parser._actions for word in (action.option_strings or [action.dest]))


def test_the_verbs_and_their_flags_are_these() -> None:
    verbs: Any = make_parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert {verb: words(parser) for verb, parser in verbs.items()} == {
        verb: sorted([*COMMON, *FLAGS[ALIASES.get(verb, verb)]]) for verb in [*FLAGS, *ALIASES]
    }


def test_the_program_itself_knows_help_and_version() -> None:
    assert {"--help", "--version", "--verbose"} <= set(words(make_parser()))
