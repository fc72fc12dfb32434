"""No secret is written: passwords and tokens are planted, every verb is run, and every file is searched for them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from small_run import RECIPE, SMALL
from vitruvius._errors import RunError
from vitruvius._files import read_bytes
from vitruvius._secrets import redact
from vitruvius.attacks import attacks
from vitruvius.attention import attentions
from vitruvius.cli import main
from vitruvius.corruptions import corruptions
from vitruvius.data import base
from vitruvius.init import inits
from vitruvius.training.sweep import name_of

URL = "https://me:pla/nted-1@host/data?token=planted-2"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://planted@host/x", "https://***@host/x"),
        ("https://me:planted@host:80/x", "https://***@host:80/x"),
        ("https://me:pla/nted@host/x", "https://***@host/x"),
        ("https://me:pla@/ted@host/x", "https://***@host/x"),
        ("https://me:pla@n/ted@host/x", "https://***@host/x"),
        ("https://me:pla'n(ted@host/x", "https://***@host/x"),
        ("s3://planted:planted@bucket/a", "s3://***@bucket/a"),
        ("https:/me:pla/nted@host/x", "https:/***@host/x"),  # as a Path merges its slashes
        ("s3:/planted@bucket/a", "s3:/***@bucket/a"),
        ("scp me:planted@host.org:a", "scp ***@host.org:a"),
        ("https://host/x?a=1&token=planted&b=2", "https://host/x?a=1&token=***&b=2"),
        ("https://host/x?X-Amz-Signature=planted", "https://host/x?X-Amz-Signature=***"),
        ("https://host/#access_token=planted", "https://host/#access_token=***"),
        ("aws_secret_access_key=planted next", "aws_secret_access_key=*** next"),
        ("data.aws_session_token: planted", "data.aws_session_token: ***"),
        ('{"password": "pla,nt ed", "n": 1}', '{"password": "***", "n": 1}'),
        (r'"{\"api_key\": \"planted\"}"', r'"{\"api_key\": \"***\"}"'),
        (r'{"password": "pla\"nted"}', '{"password": "***"}'),
        ("{key: a, token: planted}", "{key: a, token: ***}"),
        ("storage:\n  token: planted\n", "storage:\n  token: ***\n"),
        ("https://host/x?a=1&pat=planted&b=2", "https://host/x?a=1&pat=***&b=2"),
        ("https://host/x;jwt=eyJplanted.planted.planted", "https://host/x;jwt=***"),
        ("GITHUB_PAT=planted next", "GITHUB_PAT=*** next"),
        ("DEPLOY_KEY: planted", "DEPLOY_KEY: ***"),
        ("ACME_TOKEN='planted'", "ACME_TOKEN='***'"),
        ("jwt: planted", "jwt: ***"),
        ("{'X-Auth-Pin': 'planted', 'n': 1}", "{'X-Auth-Pin': '***', 'n': 1}"),
        ("X-Auth-Pin: planted", "X-Auth-Pin: ***"),
        ("Authorization: Bearer planted.planted", "Authorization: Bearer ***"),
        ("curl -H 'authorization: planted0planted'", "curl -H 'authorization: ***'"),
        ("push ghp_planted0planted1 done", "push *** done"),
        ("gho_planted0planted1", "***"),
        ("github_pat_planted0planted1", "***"),
        ("login(hf_PlantedPlanted)", "login(***)"),
        ("bare sk-planted-0planted1 here", "bare *** here"),
        ("AKIAPLANTED0PLANTED1", "***"),
        ("xoxb-planted-planted", "***"),
        ("eyJplanted0.planted_planted.planted", "***"),
    ],
)
def test_the_usual_forms_are_hidden_wherever_they_stand(text: str, shown: str) -> None:
    assert redact(text) == shown
    assert redact(shown) == shown
    assert "planted" not in redact(json.dumps({"x": text})).lower()


@pytest.mark.parametrize(
    "text",
    [
        "https://host/path/@somebody",
        "s3://bucket/me@home/run",
        "pgd:eps=4/255,steps=10",
        "num_tokens=197 token_norms class_token: true",
        "password: null",
        "the class token: it attends to all",
        "write to me@host.org",
        "a/b:c@d",
        "C:/me@home/run",
        "imagenet-c:/data/me@home",
    ],
)
def test_other_words_stay(text: str) -> None:
    assert redact(text) == text


def test_names_of_models_hashes_paths_and_settings_stay() -> None:
    """What reports, ledgers and recipes are full of: no figure may lose its name."""
    import timm

    names = [*timm.list_models(pretrained=True), *attacks, *attentions, *corruptions, *inits]
    hashes = [make(str(number).encode()).hexdigest() for make in (hashlib.md5, hashlib.sha256) for number in range(30)]
    paths = [
        "/home/me/.ssh/known_hosts", "~/data/sketch/sk-learn/mask-rcnn", "/imagenet/val/n01440764/ILSVRC2012_1.JPEG",
        "runs/remote/s3/bucket/token-pruning/seed=3", "C:\\Users\\me\\keys\\a.yaml", "s3://bucket/hf_models/skresnet50",
        "/tmp/pytest-of-root/pytest-18/popen-gw0/run", "hf-hub:timm/vit_small_patch16_224.augreg_in21k_ft_in1k",
        "gs://bucket/patterns/pinned/key=frames", "/data/tokens/class_token.npy", "runs/eyJ", "hf_transformers",
    ]  # fmt: skip
    settings = [
        "token_keep=0.7, class_token=true, num_tokens: 197, reg_tokens=4, pool: token", "pin_memory: true",
        "key: blocks.0.attn", '{"key": "accuracy", "keys": 3, "path": "/a", "pattern": "*", "spin": 3, "mask_key": 1}',
        "prune --key=value; keys=3", "author: me", "mean patience=3; pattern=2:4", "dim=384;depth=12", "bear=1",
    ]  # fmt: skip
    assert len(names) + len(hashes) + len(paths) > 200
    for text in (*names, *hashes, *paths, *settings):
        assert redact(text) == text
        assert redact({"name": text, "sha256": text, "path": [text]}) == {"name": text, "sha256": text, "path": [text]}
        assert redact(json.dumps({"x": text, "key": text})) == json.dumps({"x": text, "key": text})
    everything = "\n".join((*names, *hashes, *paths))
    assert redact(everything) == everything


def test_the_code_of_the_page_stays() -> None:
    for name in ("page.js", "viewer.js", "style.css", "templates/page.html.j2"):
        text = (files("vitruvius.report") / name).read_text("utf-8")
        assert redact(text) == text


def test_values_of_keys_with_a_secret_name_are_hidden_and_others_keep_their_type() -> None:
    plain = {"secret": 12345678, "storage": {"token": "planted", "aws_secret_access_key": "planted"}, "lr": 0.1}
    assert redact(plain) == {"secret": "***", "storage": {"token": "***", "aws_secret_access_key": "***"}, "lr": 0.1}
    kept = {"class_token": True, "num_tokens": 3, "key": "blocks.0", "key_dim": 8, "password": None}
    assert redact(kept) == kept


def test_variables_of_the_environment_are_hidden_in_every_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = 'planted"&<ü>/8'
    monkeypatch.setenv("SOME_API_KEY", secret)
    for text in (secret, json.dumps(secret), "x planted&quot;&amp;&lt;ü&gt;/8", "planted%22%26%3C%C3%BC%3E%2F8"):
        assert "planted" not in redact(text)


@pytest.mark.parametrize("name", ["MY_PAT", "TOKEN", "THE_SECRET", "DB_PASSWORD", "SIGNING_KEY", "JWT", "LOGIN_PIN"])
def test_variables_are_known_by_their_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "planted")
    assert redact("a planted secret") == "a *** secret"


@pytest.mark.parametrize(
    ("name", "text"), [("LOGIN_PIN", "4711"), ("KEY_FILE", __file__), ("TOKENIZERS_PARALLELISM", "disabled")]
)
def test_figures_paths_and_words_of_the_environment_stay(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    assert redact(f"{text} images") == f"{text} images"


def test_errors_of_files_hide_them() -> None:
    with pytest.raises(RunError) as error:
        read_bytes("memory://me:planted@host/none")
    assert "planted" not in str(error.value)


def test_names_of_the_runs_of_a_sweep_hide_them_and_differ() -> None:
    one, other = (name_of({"data.root": f"https://me:planted-{number}@host/x", "seed": 1}) for number in (1, 2))
    assert one != other
    assert "planted" not in one
    assert name_of({"train.lr": 0.1, "seed": 0}) == "train.lr=0.1,seed=0"


VERBS = {
    "evaluate": ["evaluate", "run", f"data.root={URL}", "--images", "8", "--threat", "fgsm:eps=8/255"],
    "evaluate by name": [
        *("evaluate", "vitruvius/vit_digits", "data.dataset=digits", f"data.root={URL}"),
        *("--images", "8", "--out", "named"),
    ],
    "attack": [
        *("attack", "run", f"data.root={URL}", "--images", "8"),
        *("--threat", "fgsm:eps=1/255", "--out", "a.safetensors"),
    ],
    "analyse": ["analyse", "run", f"data.root={URL}", "entropy", "--images", "8"],
    "study": ["study", "eps-sweep", "run", f"data.root={URL}", "steps=1", "--images", "8", "--out", "study"],
    "maps": ["maps", "run", f"data.root={URL}", "--images", "8"],
    "export": ["export", "run", "--format", "safetensors"],
    "corrupt": [
        *("corrupt", "digits", f"data.root={URL}", "--corruptions", "contrast"),
        *("--images", "8", "--workers", "1", "--out", "copy"),
    ],
    "report": ["report", "run", "--out", "page.html"],
}  # fmt: skip
RESUMED = ("evaluate", "study", "corrupt")  # called again, they must recognise what they have written


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a run that was trained on planted settings; the same folder for all verbs."""
    folder = tmp_path_factory.mktemp("planted_once")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("SOME_API_KEY", "planted-in-the-environment")
        let_digits_have_a_root(patch)
        train_planted()
        yield folder


def let_digits_have_a_root(patch: pytest.MonkeyPatch) -> None:
    """So that addresses can be planted where nothing has to be fetched."""
    _, traits = base.find_source("digits")
    patch.setitem(base._TRAITS, "digits", replace(traits, root=""))


def train_planted() -> None:
    common = [*SMALL, "train.epochs=1", f"data.root={URL}", "data.train_split=planted-in-the-environment"]
    assert main(["train", str(RECIPE), *common, "out=run", "tracking=[csv]", "--quiet"]) == 0


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_writes_or_prints_a_secret(verb: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(1 + (verb in RESUMED)):
        code = main(VERBS[verb])
        said = capfd.readouterr()
        assert code == 0, said.err
        assert "nted-" not in said.out + said.err
    assert_nothing_leaked(folder)


def test_a_page_hides_what_an_older_run_has_written(folder: Path, tmp_path: Path) -> None:
    old = tmp_path / "run"
    old.mkdir()
    config = (folder / "run" / "config.yaml").read_text()
    (old / "config.yaml").write_text(f"{config}extra: {{aws_secret_access_key: planted, root: '{URL}'}}\n")
    assert main(["report", str(old), "--out", str(tmp_path / "page.html")]) == 0
    assert not is_leaky(tmp_path / "page.html")


def test_no_sweep_writes_a_secret_not_even_in_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    let_digits_have_a_root(monkeypatch)
    file = tmp_path.parent / f"{tmp_path.name}.yaml"  # the user's own, and not written by us
    roots = ["https://planted-4@host/a", "s3://me:pla/nted-5@host/b"]
    common = dict(setting.split("=", 1) for setting in (*SMALL, "train.epochs=1"))
    file.write_text(json.dumps({"recipe": str(RECIPE), "grid": {"data.root": roots}, "out": "sweep"}))
    words = [f"{key}={value}" for key, value in common.items()]
    assert main(["sweep", str(file), *words]) == 0
    assert main(["sweep", str(file), *words, "--dry-run"]) == 0
    said = capfd.readouterr()
    assert said.out.count("finished") >= 2
    assert "nted-" not in said.out + said.err
    assert_nothing_leaked(tmp_path)


def test_errors_and_logs_hide_them(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", str(RECIPE), f"data.root={URL}", f"model.weights={URL}", f"out={tmp_path / 'run'}"]) == 1
    logging.getLogger("vitruvius").warning("fetched from %s", URL)
    said = capfd.readouterr()
    assert "nted-" not in said.out + said.err
    assert_nothing_leaked(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        [URL],
        ["evaluate", "run", f"--nope={URL}"],
        ["evaluate", "run", "--images", URL],
        ["completion", URL],
        ["bench", URL],
        ["masks", URL],
        ["sweep", URL],
        ["evaluate", "run", "--shift", f"imagenet-c:{URL}"],
        ["list", URL],
        ["study", URL, "run"],
        ["convert", URL, "--from", "deit"],
        ["cycles", URL],
        ["compress", URL],
    ],
    ids=lambda words: words[0],
)
def test_no_refusal_shows_a_secret_not_even_one_of_the_words_of_a_command(
    words: list[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(words)
    except SystemExit as end:  # what argparse itself refuses
        code = int(end.code or 0)
    assert code != 0
    said = capfd.readouterr()
    assert "nted-" not in said.out + said.err


def assert_nothing_leaked(folder: Path) -> None:
    """Neither the names nor the bytes of any file hold what was planted."""
    found = [path for path in folder.rglob("*") if "nted-" in path.name or (path.is_file() and is_leaky(path))]
    assert not found, found


def is_leaky(path: Path) -> bool:
    data = path.read_bytes()
    return any(secret in data for secret in (b"planted", b"nted-1", b"nted-5"))
