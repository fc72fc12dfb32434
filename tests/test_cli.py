"""The command line: verbs that work, help that a newcomer understands, mistakes answered in one line."""

from __future__ import annotations

import gc
import itertools
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image
from torch import Tensor

from small_run import RECIPE, SMALL, small_run
from vitruvius import __version__
from vitruvius.attacks.pgd import PGD
from vitruvius.cli import main, make_app, run_and_exit


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    code = main(words)
    return code, *capsys.readouterr()


def mistake(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that answers a mistake; what was found before it may be told before it."""
    code, out, err = answer(capsys, *words)
    assert code == 1
    assert out == ""
    *news, last = err.splitlines()
    assert all(line.startswith(("data ", "model ", "first batch")) for line in news), news
    assert last.startswith("vitruvius: ")
    assert "Traceback" not in err
    return last


LIGHT = [  # commands that need no PyTorch, and a word of their answers
    (["--version"], __version__),
    (["--help"], "vitruvius train digits/rpc train.epochs=20"),
    (["train", "--help"], "a YAML file"),
    (["list"], "attacks"),
    (["list", "keys"], "epochs"),
    (["list", "recipes"], "digits/softmax"),
    (["schema"], "properties"),
    (["trian"], "train"),
    (["train", "digits/sofmax"], "digits/softmax"),
    (["train", "digits/softmax", "train.epoch=3"], "epochs"),
    (["sweep", "nowhere.yaml"], "no recipe at nowhere.yaml"),
    (["study", "eps-sweeep", "zoo/vit_digits_adversarial"], "did you mean 'eps-sweep'? Known: attack-"),
]
TORCH = [  # and those that may import it, but neither timm nor torchvision
    (["train", "digits/softmax", "data.dataset=folder", "data.root=/nowhere"], "/nowhere"),
    (["evaluate", "runs/none"], "run folder"),
    (["convert", "nowhere", "--from", "deit", "--out", "run"], "no checkpoint at nowhere"),
    (["masks", "nowhere.safetensors"], "no such file"),
    (["export", "runs/none"], "run folder"),
    (["cycles", "runs/none"], "run folder"),
    (["study", "eps-sweep", "runs/none"], "run folder"),
    (["study", "eps-sweep"], "needs at least one run folder"),
    (["report"], "needs at least one run folder"),
    (["look", "vit_tiny_patch16_224", "no.jpg"], "no picture at no.jpg"),
    (["export", "zoo/none"], "no checkpoint named 'none'"),
    (["train", "digits/softmax", "task.use=freee"], "did you mean 'free'?"),
    (["train", "digits/adversarial", "task.attack=pdg"], "did you mean 'pgd'?"),
    (["compress", "nowhere"], "is not a run folder"),
    (["evaluate", "vit_tiny_patch16_224", "data.dataset=folder", "data.root=/nowhere"], "/nowhere"),
]


@pytest.mark.parametrize(("commands", "imported"), [(LIGHT, set()), (TORCH, {"torch"})], ids=["light", "torch"])
def test_an_answer_that_needs_no_model_comes_quickly(commands: list[tuple[list[str], str]], imported: set[str]) -> None:
    """Nothing that takes seconds is imported: all of a kind in one process, which would show what any of them needs."""
    code = (
        "import json, sys, vitruvius.cli as c\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    c.main(words)\n"
        "    found = {'torch', 'timm', 'torchvision', 'sklearn', 'scipy', 'matplotlib'} & set(sys.modules)\n"
        "    print(f'\\nimported: {found}', flush=True)"
    )
    lists = json.dumps([words for words, _ in commands])
    done = subprocess.run(
        [sys.executable, "-c", code, lists], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    *answers, end = re.split(r"^imported: (.*)\n", done.stdout, flags=re.M)
    for (words, word), said, found in zip(commands, answers[::2], answers[1::2], strict=True):
        assert word in said, words
        assert found in (str(imported), "set()"), words
    assert found == str(imported)
    assert end == ""


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("data.subset=nope", "data.subset"),
        ("data.root=/nope", "is not read"),
        ("data.class_map=/nope", "data.class_map"),
        ("out=", "out=null"),
        ("data.scale=[1,0]", "the smaller first"),
        ("data.ratio=[0,0]", "the smaller first"),
        ("data.crop_pct=50", "at most 1"),
        ("data.image_size=7", "7 × 7"),
    ],
)
def test_settings_that_say_nothing_or_nothing_possible_are_refused(
    setting: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert word in mistake(capsys, "train", str(RECIPE), *SMALL, f"out={tmp_path / 'run'}", setting)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [["-v", "list", "tracer"], ["list", "tracer", "-v"], ["list", "-v", "tracer"]])
def test_verbose_is_accepted_before_and_after_the_verb(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said  # shown whole, and as one line
    assert said.splitlines()[-1].startswith("vitruvius: nothing called 'tracer' to list")


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ([], "say one of these verbs"),
        (["trian"], 'Did you mean "train"?'),
        (["train"], "RECIPE"),
        (["evaluate", "x", "--treat", "y"], "Did you mean --threat?"),
        (["evaluate", "x", "--attack", "y"], "Did you mean --threat?"),
        (["evaluate", "x", "--device", "cuda"], "write device=cuda."),
        (["evaluate", "x", "--eval-batch-size=8"], "write data.eval_batch_size=8."),
        (["train", "x", "--epochs", "3"], "write train.epochs=3."),
        (["train", "x", "--seed"], "write seed=…."),
        (["list", "--quiet"], "--quiet"),
        (["demo", "x=1"], "x=1"),
        (["evaluate", "x", "--images", "1.5"], "not a whole number"),
        (["evaluate", "x", "--images", "9" * 26], "not a whole number"),
        (["evaluate", "x", "--out", "s3://bucket/out"], "is a URL"),
        (["evaluate", "a\0b"], "null byte"),
        (["masks", "x", "--sparsity", "nan"], "finite"),
        (["masks", "x", "--budget", "heads"], "Choose from"),
    ],
)
def test_what_is_no_command_is_one_line_that_names_the_right_word(
    words: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = answer(capsys, *words)
    assert code == 2
    assert err.startswith("vitruvius: ")
    assert err.count("\n") == 1
    assert word in err


def test_settings_names_and_values_may_come_anywhere() -> None:
    def read(*words: str) -> dict[str, Any]:
        _, bound, _ = make_app().parse_args(words)
        return dict(bound.arguments)

    threats = ["pgd:eps=4/255,steps=[1,2]", "fgsm:eps=1"]
    words = ["evaluate", "a", "--threat", threats[0], "data.root=/x", "--threat", threats[1], "--images=8", "seed=1"]
    given = read(*words)
    assert (given["overrides"], given["threat"], given["images"]) == (("data.root=/x", "seed=1"), threats, 8)
    assert read("analyse", "runs/rpc", "norms", "--images", "8", "entropy")["what"] == ("norms", "entropy")
    assert read("report", "a", "--out", "page.html", "b")["runs"] == ("a", "b")
    assert read("masks", "maps", "--protect", "0", "1", "--tiles", "16")["protect"] == [0, 1]
    assert make_app()["eval"].default_command is make_app()["evaluate"].default_command


def test_a_recipe_is_trained_judged_and_judged_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    code, out, err = answer(capsys, "train", "digits/softmax", *SMALL, f"out={run}")
    assert (code, out) == (0, f"{run}\n")
    assert err.count("epoch") == 2
    assert answer(capsys, "train", str(RECIPE), *SMALL, f"out={run}", "--quiet")[1:] == (f"{run}\n", "")
    code, first, err = answer(capsys, "evaluate", str(run), "--threat", "pgd:eps=8/255,steps=1")
    assert code == 0
    assert [line.split(" ")[0] for line in err.splitlines()] == ["clean", "pgd(eps=8/255,"]  # as soon as they are known
    assert [line.split("  ")[0] for line in first.splitlines()[2:]] == [
        "clean",
        "pgd(eps=8/255, steps=1)",
        "worst case of all",
    ]
    code, second, _ = answer(capsys, "evaluate", str(run), "--threat", "fgsm:eps=4/255", "data.eval_batch_size=5")
    assert code == 0
    assert [line.split("  ")[0] for line in second.splitlines()[2:]] == [
        "clean",
        "pgd(eps=8/255, steps=1)",
        "fgsm(eps=4/255)",
        "worst case of all",
    ]
    assert first.splitlines()[2:4] == second.splitlines()[2:4]
    report = json.loads((run / "evaluation" / "report.json").read_text())
    assert [threat["n"] for threat in report["threats"]] == [24, 24, 24]
    assert "crop_pct" in mistake(capsys, "evaluate", str(run), "data.crop_pct=0.5")
    code, _, _ = answer(capsys, "evaluate", str(run), "data.crop_pct=0.5", "--out", str(tmp_path / "cropped"))
    assert code == 0
    assert (tmp_path / "cropped" / "ledger.safetensors").exists()


def test_a_run_trained_further_is_not_taken_for_the_one_that_was_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_run(tmp_path / "run", "train.epochs=1")
    assert answer(capsys, "evaluate", str(run))[0] == 0
    other = small_run(tmp_path / "other", "train.epochs=1", "seed=1")
    for name in ("best", "last"):
        (run / f"{name}.safetensors").write_bytes((other / f"{name}.safetensors").read_bytes())
    letter = mistake(capsys, "evaluate", str(run))
    assert "holds the ledger of another evaluation: weights was" in letter
    assert "--out" in letter
    assert "--fresh" in letter


def test_a_model_by_name_is_judged_on_the_images_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", "vitruvius/vit_digits", "data.dataset=digits", "data.val_num_samples=20", "device=cpu"]
    code, out, _ = answer(capsys, *words)
    assert code == 0
    assert " 20" in out.splitlines()[2]
    assert (tmp_path / "runs" / "vitruvius-vit_digits" / "evaluation" / "report.json").exists()


def test_broken_images_are_one_line_or_skipped_if_the_user_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, label, number in itertools.product(("train", "val"), ("cat", "dog"), range(4)):
        file = tmp_path / "pictures" / split / label / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (40 * number, 90, 10)).save(file)
    (tmp_path / "pictures" / "train" / "cat" / "2.png").write_bytes(b"no picture")
    words = ["data.dataset=folder", "data.batch_size=2", "data.workers=0", "data.train_num_samples=null"]
    words = [*SMALL, *words, f"data.root={tmp_path / 'pictures'}", f"out={tmp_path / 'run'}", "train.epochs=1"]
    assert "2.png" in mistake(capsys, "train", str(RECIPE), *words)
    assert not (tmp_path / "run").exists()
    assert answer(capsys, "train", str(RECIPE), *words, "data.broken=skip", "--quiet")[0] == 0


def test_mistakes_of_an_evaluation_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = small_run(tmp_path / "run", "train.epochs=1")
    assert "no attack named 'pdg'; did you mean 'pgd'?" in mistake(
        capsys, "evaluate", str(run), "--threat", "pdg:eps=4/255"
    )
    assert "pgd.eps is missing" in mistake(capsys, "evaluate", str(run), "--threat", "pgd")
    assert "is not of the form key=value" in mistake(capsys, "evaluate", str(run), "--threat", "pgd:8")
    assert "its model is what was trained" in mistake(capsys, "evaluate", str(run), "model.name=resnet18")
    assert "has no config.yaml" in mistake(capsys, "evaluate", str(tmp_path))
    assert "say which images: data.dataset=" in mistake(capsys, "evaluate", "resnet18")
    assert "'resnet81' is neither a run folder nor a model" in mistake(
        capsys, "evaluate", "resnet81", "data.dataset=digits"
    )
    assert not (run / "evaluation").exists()


def test_an_interruption_says_what_stays(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import vitruvius.listing

    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(vitruvius.listing, "listing", interrupted)
    code, _, err = answer(capsys, "list")
    assert code == 130
    assert err == "vitruvius: interrupted; files that were already finished stay.\n"


def test_of_many_processes_one_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert answer(capsys, "list", "tasks") == (0, "", "")


def test_a_warning_is_one_line_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(attack: PGD, model: object, x: Tensor, y: Tensor, dice: object) -> Tensor:
        warnings.warn("this attack is strange.", stacklevel=2)
        return x

    monkeypatch.setattr(PGD, "search", warn)
    data = ["data.dataset=digits", "data.val_num_samples=8", "data.eval_batch_size=4"]
    words = ["vitruvius/vit_digits", *data, "--threat", "pgd:eps=8/255,steps=1", f"--out={tmp_path}"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, _, err = answer(capsys, "evaluate", *words)
    assert code == 0
    assert [line for line in err.splitlines() if "strange" in line] == ["vitruvius: warning: this attack is strange."]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_learns_verbs_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, script, _ = answer(capsys, "completion", shell)
    assert code == 0
    assert "evaluate" in script
    assert "threat" in script


@pytest.mark.parametrize(("code", "at_once"), [(75, True), (130, True), (1, False), (0, False)])
def test_an_interrupted_command_does_not_wait_for_the_interpreter_to_be_torn_down(
    code: int, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[int] = []
    monkeypatch.setattr("vitruvius.cli.main", lambda: code)
    monkeypatch.setattr("vitruvius.cli.LEAK_CHECKERS", set())
    monkeypatch.setattr("os._exit", left.append)
    with pytest.raises(SystemExit) as end:  # where os._exit does not end the process
        run_and_exit()
    assert gc.get_freeze_count()  # what is left is not searched for garbage
    gc.unfreeze()
    assert end.value.code == code
    assert left == [code] * at_once


def test_nothing_is_reported_as_leaked_where_triton_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitruvius.cli.main", lambda: 0)
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", ModuleType("libtriton"))
    with pytest.raises(SystemExit):
        run_and_exit()
    assert not gc.get_freeze_count()
