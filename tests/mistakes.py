"""Commands with one mistake each, generated: every verb, every word of it, every kind of nonsense for such a word."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from small_run import RECIPE, SMALL

RUN, MISSING, TEXT, EMPTY, DAMAGED = (f"{{place}}/{name}" for name in ("run", "nowhere", "text.txt", "empty", "bad"))
OUT, SWEEP = "{place}/out", "{place}/sweep.yaml"
MAPS, MASKS, NEW_FILE = (f"{{place}}/{name}.safetensors" for name in ("maps", "masks", "new"))
NO_MODEL = ["nope_model", "", "\0", "vitruvius/nope", "light/nope"]
NO_RUN = [MISSING, TEXT, EMPTY, DAMAGED, "nothing://bucket/run", "memory://no-bucket/no-run", *NO_MODEL]
HUGE = "9" * 26  # more than 64 bits hold
NO_COUNT = ["0", "-3", "x", "1.5", "", ".nan", "1e99", HUGE]
NO_FOLDER = [f"{TEXT}/inside", "s3://bucket/out", "{place}/" + 300 * "x", "\0"]
NO_FILE = [f"{TEXT}/inside.safetensors", "s3://bucket/a.safetensors", "{place}/" + 300 * "x" + ".safetensors"]
NO_NUMBER = ["x", "", ".nan", "[1]"]

BAD: dict[str, Sequence[str]] = {  # kind of word → what it cannot be
    "run": NO_RUN,
    "any run": NO_RUN,
    "count": NO_COUNT,
    "epochs": NO_COUNT[1:],  # none is a number of epochs
    "folder": NO_FOLDER,
    "file": NO_FILE,
    "data settings": [
        "nope.key=1", "data.nope=1", "data.batch_size=-1", "data.batch_size=x", "data.batch_size={a: 1}", "data=3",
        "data.dataset=nope", "=1", "data.interpolation=nope", "data.crop_pct=.nan",
        "data.crop_pct=-1", "model.name=x", "train.lr=1", "seed=3", "data.batch_size=[", "data..x=1", "data.workers=-1",
    ],
    "recipe settings": [
        "nope.key=1", "train.nope=1", "train.lr=.inf", "train.lr=-1", "train.lr=x", "train.epochs=0",
        "train.epochs=1.5", "train.opt=nope", "train.sched=nope", "train.holdout=2", "model.name=nope", "model.name=3",
        "model.kwargs=3",
        "model.kwargs={depht: 1}", "data.dataset=nope", "data.batch_size=0", "attention=[{parts: [rcp]}]",
        "attention=3",
        "attention=[{parts: [softmax], where: nope.*}]", "task=nope", "task=adversarial:eps=-1", "task={use: 3}",
        "init=nope", "seed=x", "tracking=[nope]", "plugins=[nope_nope]", "train.device=nope",
        "train.precision=nope", "analyses=[nope]", "model.weights={place}/nowhere.pth",
        "model.weights={place}/text.txt",
        "train.save_every=-1", "data.mixup=-1", "data.aa=nope", "train.clip_grad=-1", "train.model_ema_decay=2",
    ],
    "threat": [
        "nope", "", ":", "pgd:eps", "pgd:eps=x", "pgd:eps=-1", "pgd:eps=8", "pgd:eps=.nan", "pgd:eps=0.1,steps=0",
        "pgd:eps=0.1,nope=1", "pgd:eps=0.1,norm=l7", "fog:severity=9", "corruptions:group=nope", "pgd:eps=0.1,steps=x",
        "autoattack:eps=0.1,version=nope", "fgsm:eps=1/0", "clean:nope=1",
    ],
    "recipe": [
        MISSING, TEXT, EMPTY, "nope/nope", "", "\0", "{place}/bad.yaml", "{place}/bomb.yaml", "{place}/empty.yaml",
    ],
    "sweep": [MISSING, TEXT, EMPTY, "\0", "{place}/bad.yaml", "{place}/bomb.yaml", "{place}/no_sweep.yaml"],
    "maps": [MISSING, TEXT, EMPTY, RUN, "", "\0", "{place}/damaged.safetensors", "{place}/damaged.npy",
             "{place}/empty.npy", "/dev/null"],
    "masks": [MISSING, TEXT, EMPTY, MAPS, "", "\0", "{place}/damaged.npy"],
    "checkpoint": [MISSING, TEXT, EMPTY, RUN, "", "\0", "{place}/hostile.pth", "{place}/empty.pth"],
    "layout": ["nope", "", "deit "],
    "rule": ["nope", "", "information:mass=2", "information:nope=1", "information:mass=x", ],
    "share": ["2", "-1", "1", *NO_NUMBER],
    "images": [MISSING, TEXT, EMPTY, "", "\0", "digitz", "{place}/broken_images"],
    "corruptions": ["nope", "", "fog,nope", "benchmark,"],
    "severities": ["0", "9", "x", "1,1", ""],
    "analyses": ["nope", "norms:nope=1", "gammas:variant=nope", "", ":"],
    "study": ["nope", "", "eps_sweep_"],
    "study settings": ["nope=1", "steps=0", "steps=x", "eps=nope", "data.dataset=nope", "batch_size=0"],
    "eps": ["-1", "0", "x", ".nan", "2", ""],
    "shift": ["nope:{place}", "imagenet-c:{place}/nowhere", "imagenet-c", "cifar-10-c:{place}/empty", ""],
    "split": ["nope", ""],
    "tokens": ["999", "-1", "x"],
    "size": ["3", "x", "-1", ""],
    "kind": ["nope", "attnetions", "\0"],
    "choice": ["nope"],
    "page": [EMPTY, f"{TEXT}/page.html", "s3://bucket/page.html", "\0"],
    "picture": [MISSING, TEXT, EMPTY, "", "\0", "{place}/broken_images", "https://example.org/dog.jpg", "data.nope=1"],
    "part": ["nope", "", "rpc:iterations=0", "rpc:nope=1", "mask"],
    "port": ["-1", "70000", "x", HUGE],
    "slurm": ["nope=1", "nodes=0", "x"],
    "threshold": ["-1", "x", "1.5", HUGE],
    "seed": ["x", "1.5", HUGE],
    "rank": ["0", "-1", "x", "1000", HUGE],
}  # fmt: skip


class Word(NamedTuple):
    """One word of a command: what it is, a value that is right, and the flag before it."""

    kind: str
    good: str = ""  # left out of a right command where empty
    flag: str = ""


@dataclass(frozen=True)
class Mistake:
    """A command in which one word is wrong."""

    words: tuple[str, ...]
    verb: str
    what: str

    def __str__(self) -> str:
        return f"{self.verb}-{self.what}"


TARGET, DATA, RECIPE_SETTINGS = Word("any run", RUN), Word("data settings"), Word("recipe settings")
COMMANDS: dict[str, list[Word]] = {
    "train": [Word("recipe", str(RECIPE)), RECIPE_SETTINGS, Word("slurm", flag="--slurm")],
    "sweep": [
        Word("sweep", SWEEP), RECIPE_SETTINGS, Word("choice", flag="--minutes"),
    ],
    "evaluate": [
        TARGET, DATA, Word("threat", flag="--threat"), Word("shift", flag="--shift"),
        Word("run", flag="--baseline"), Word("split", flag="--calibrate"), Word("eps", flag="--sanity"),
        Word("count", "4", "--images"), Word("folder", OUT, "--out"),
    ],
    "attack": [
        TARGET, DATA, Word("threat", "fgsm:eps=0.1", "--threat"), Word("choice", flag="--what"),
        Word("count", "4", "--images"), Word("folder", OUT, "--out"), Word("file", flag="--out"),
    ],
    "analyse": [
        TARGET, Word("analyses", "norms"), DATA, Word("count", "4", "--images"), Word("folder", OUT, "--out"),
        Word("seed", flag="--seed"), Word("count", flag="--max-length"),
    ],
    "study": [
        Word("study", "eps-sweep"), TARGET, Word("study settings"), Word("count", "4", "--images"),
        Word("folder", OUT, "--out"),
    ],
    "report": [Word("run", RUN), Word("page", "{place}/page.html", "--out"), Word("threat", flag="--threat")],
    "maps": [TARGET, DATA, Word("count", "4", "--images"), Word("file", NEW_FILE, "--out")],
    "masks": [
        Word("maps", MAPS), Word("rule", flag="--rule"), Word("share", flag="--sparsity"),
        Word("choice", flag="--budget"), Word("tokens", flag="--protect"),
        Word("threshold", flag="--threshold"), Word("run", flag="--of"), Word("count", flag="--tiles"),
        Word("file", NEW_FILE, "--out"),
    ],
    "cycles": [Word("masks", MASKS), Word("count", flag="--head-dim"), Word("threshold", flag="--threshold")],
    "export": [Word("any run", RUN), Word("choice", "safetensors", "--format"), Word("file", NEW_FILE, "--out")],
    "compress": [
        Word("run", RUN), RECIPE_SETTINGS, Word("share", flag="--sparsity"), Word("rank", flag="--rank"),
        Word("rule", flag="--rule"), Word("epochs", flag="--epochs"), Word("threat", flag="--threat"),
        Word("folder", OUT, "--out"),
    ],
    "convert": [
        Word("checkpoint", "{place}/weights.pth"), Word("layout", "deit", "--from"), Word("choice", flag="--model"),
        Word("folder", OUT, "--out"),
    ],
    "corrupt": [
        Word("images", "digits"), DATA, Word("corruptions", "contrast", "--corruptions"),
        Word("severities", flag="--severities"), Word("choice", flag="--format"),
        Word("choice", flag="--scale"), Word("count", "4", "--images"), Word("count", "1", "--workers"),
        Word("folder", OUT, "--out"),
    ],
    "look": [
        TARGET, Word("picture", "{place}/dog.png"), Word("threat", flag="--threat"), Word("part", flag="--attention"),
        Word("any run", flag="--beside"), Word("masks", flag="--masks"), Word("share", flag="--sparsity"),
        Word("choice", flag="--class"), Word("count", flag="--images"), Word("page", "{place}/page.html", "--out"),
        Word("folder", flag="--png"), Word("port", flag="--port"),
    ],
    "schema": [Word("kind")],
    "demo": [Word("folder", flag="--out")],
    "list": [Word("kind")],
    "completion": [Word("choice")],
    "bench": [Word("choice")],
}  # fmt: skip
ALSO = {  # words of every command of a verb; a sweep notes runs that fail and goes on, its dry run says them at once
    "train": [*SMALL, f"out={OUT}", "--quiet"],
    "sweep": [*SMALL, "--dry-run"],
}


def bomb(levels: int = 9, wide: int = 9) -> str:
    """A few hundred bytes of YAML that stand for 9⁹ values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, levels):
        lines.append(f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * wide)}]")
    return "\n".join(lines)


def every_mistake() -> list[Mistake]:
    """Each word of each verb, wrong in each way."""
    found = []
    for verb, words in COMMANDS.items():
        for place, word in enumerate(words):
            for bad in BAD[word.kind]:
                found.append(_mistake(verb, words, place, bad))
        found.append(Mistake((verb, *_right(words, -1), "--nope"), verb, "unknown flag"))
    return found


def some_mistakes(count: int, seed: int = 0) -> list[Mistake]:
    """So many of them, chosen by a seed, with every word of every verb among them."""
    every = every_mistake()
    dice = random.Random(seed)
    dice.shuffle(every)
    covered: dict[tuple[str, str], Mistake] = {}
    for mistake in every:
        covered.setdefault((mistake.verb, mistake.what.partition("=")[0]), mistake)
    first = list(covered.values())
    rest = [mistake for mistake in every if mistake not in first]
    return [*first, *rest[: max(0, count - len(first))]]


def _mistake(verb: str, words: Sequence[Word], place: int, bad: str) -> Mistake:
    word = words[place]
    spoken = list(_right(words, place, bad))
    name = word.flag or word.kind
    if word.kind == "recipe settings":  # the last setting of a key counts
        return Mistake((verb, *_right(words, -1), *ALSO.get(verb, []), bad), verb, f"{name}={bad[:40]!r}")
    return Mistake((verb, *spoken, *ALSO.get(verb, [])), verb, f"{name}={bad[:40]!r}")


def _right(words: Sequence[Word], place: int, bad: str = "") -> list[str]:
    """The words of a command; that at `place` is wrong."""
    spoken: list[str] = []
    flags = {word.flag for number, word in enumerate(words) if number == place and word.flag}
    for number, word in enumerate(words):
        if number == place:
            spoken += [f"{word.flag}={bad}"] if word.flag else [bad]
        elif word.good and word.flag not in flags:
            spoken += [word.flag, word.good] if word.flag else [word.good]
    return spoken
