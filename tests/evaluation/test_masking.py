"""AutoAttack that knows when not to be believed: every masked model gets its finding, honest models get none."""

from __future__ import annotations

import copy
import cProfile
import json
import re
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.attacks.base import ROBUST, Outcome, StageResult
from vitruvius.attacks.norms import NORMS
from vitruvius.attacks.pgd import PGD
from vitruvius.attacks.square import Square
from vitruvius.data import DataConfig, eval_loader
from vitruvius.evaluation import Report, evaluate
from vitruvius.evaluation._evaluate import Pool
from vitruvius.evaluation.base import DRAWS_RIGHT
from vitruvius.evaluation.ledger import Ledger
from vitruvius.evaluation.masking import DRAWS, MaskingChecks, calls_autograd, look, stage_findings
from vitruvius.evaluation.robustbench import benchmark
from vitruvius.models import create_model
from vitruvius.report import write_page

EPS = 0.09
QUICK = AutoAttack(eps=EPS, version="custom", attacks=({"use": "apgd", "steps": 3},))
APGD_DLR = {"use": "apgd", "steps": 10, "loss": "dlr"}
WITH_SQUARE = AutoAttack(
    eps=EPS, version="custom", attacks=({"use": "apgd", "steps": 10}, APGD_DLR, {"use": "square", "queries": 100})
)
LONGER = AutoAttack(
    eps=EPS,
    version="custom",
    attacks=({"use": "apgd", "steps": 40}, {**APGD_DLR, "steps": 40}, {"use": "fab", "steps": 10}),
)
Answer = Callable[[Tensor], Tensor]


def digits(count: int = 360) -> tuple[Tensor, Tensor]:
    loader = eval_loader(DataConfig(val_num_samples=None, batch_size=360), input_size=(3, 8, 8))
    x, y = next(iter(loader))[:2]
    return x[:count], y[:count]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 32),
        nn.GELU(),
        nn.Linear(32, 10),
    )


@cache
def train(make: Callable[[], nn.Module], *, eps: float = 0.0, epochs: int = 20) -> nn.Module:
    """A few epochs on digits, under attack where there is an eps."""
    x, y = digits()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make().eval()
        optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).split(60):
                seen = x[rows]
                if eps:
                    seen = PGD(eps=eps, steps=2)(net, seen, y[rows])
                optimizer.zero_grad()
                F.cross_entropy(net(seen), y[rows]).backward()
                optimizer.step()
    return net


@pytest.fixture(scope="session")
def honest() -> dict[str, nn.Module]:
    return {"mlp": train(mlp), "cnn": train(cnn), "cnn under attack": train(cnn, eps=0.1)}


@pytest.fixture(scope="session")
def truth(honest: dict[str, nn.Module]) -> Callable[[nn.Module], int]:
    """Of 40 images, on how many a model that nobody has asked before is right at x' of the honest one."""
    x, y = (torch.cat(column) for column in zip(*batches(40, size=20), strict=True))
    moved = QUICK(honest["cnn"], x, y)
    return lambda model: int((model(moved).argmax(1) == y).sum())


@pytest.fixture(scope="session")
def honest_vit() -> nn.Module:
    return train(vit, epochs=12)


class Masked(nn.Module):
    """A model whose answers are those of another one, made hard to attack in some way."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(x)


def gradient_step(net: nn.Module) -> Answer:
    def answer(x: Tensor) -> Tensor:
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(net(start).logsumexp(1).sum(), start)
        return net((x + 0.1 * grad.sign()).clamp(0, 1))

    return answer


def hashed(net: nn.Module) -> Answer:
    def answer(x: Tensor) -> Tensor:
        seeds = (x.detach().flatten(1).double() * torch.arange(1, 193) ** 2).sum(1).mul(1e6).long() % (1 << 40)
        noise = [torch.randn(x[0].shape, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds]
        return net(x + 0.2 * torch.stack(noise))

    return answer


def remember(net: nn.Module, seen: list[Tensor], x: Tensor, share: float = 0.15) -> Tensor:
    """What is remembered of the nearest image, and a little of the difference; `share` is how much."""
    nearest = []
    for image in x.detach():
        distances = [float((other - image).abs().max()) for other in seen]
        if min(distances, default=1.0) > 0.35:
            seen.append(image)
            distances.append(0.0)
        nearest.append(seen[distances.index(min(distances))])
    known = torch.stack(nearest)
    return net(known + share * (x - known))  # type: ignore[no-any-return]


class Remembering(nn.Module):
    """Remembers images in an attribute."""

    def __init__(self, net: nn.Module, share: float = 0.15) -> None:
        super().__init__()
        self.net, self.share = net, share
        self.seen: list[Tensor] = []
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return remember(self.net, self.seen, x, self.share)


SEEN: list[Tensor] = []


def in_a_closure(net: nn.Module) -> Answer:
    seen: list[Tensor] = []
    return lambda x: remember(net, seen, x)


def in_a_global(net: nn.Module) -> Answer:
    SEEN.clear()
    return lambda x: remember(net, SEEN, x)


def in_a_class(net: nn.Module) -> nn.Module:
    class Remembers(Masked):
        seen: ClassVar[list[Tensor]] = []

        def forward(self, x: Tensor) -> Tensor:
            return remember(self.answer, self.seen, x)  # type: ignore[arg-type]

    return Remembers(net)


def in_a_default(net: nn.Module) -> Answer:
    def answer(x: Tensor, seen: list[Tensor] = []) -> Tensor:  # noqa: B006
        return remember(net, seen, x)

    return answer


def in_a_captured_model(net: nn.Module) -> Answer:
    memory = Remembering(net)
    return lambda x: memory(x)


def counted_in_a_closure(net: nn.Module) -> Answer:
    passes, later = 0, train(cnn, eps=0.1)

    def answer(x: Tensor) -> Tensor:
        nonlocal passes
        passes += 1
        return (net if passes <= 6 else later)(x)  # type: ignore[no-any-return]

    return answer


class Counting(nn.Module):
    """Another model after six passes."""

    def __init__(self, net: nn.Module, later: nn.Module) -> None:
        super().__init__()
        self.net, self.later, self.passes = net, later, 0
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return (self.net if self.passes <= 6 else self.later)(x)


class Watching(nn.Module):
    """Another model where a gradient is asked for."""

    def __init__(self, net: nn.Module, watched: nn.Module) -> None:
        super().__init__()
        self.net, self.watched = net, watched
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return (self.watched if x.requires_grad else self.net)(x)


Mask = Callable[[nn.Module], Answer]
MASKS: dict[str, tuple[Mask, str]] = {  # by name: what is made of an honest model, and what is to be found
    "one-hot": (lambda net: lambda x: F.one_hot(net(x).argmax(1), 10).float() + 0 * x.sum(), "vanishing gradients"),
    "probabilities": (lambda net: lambda x: net(x).softmax(1), "probabilities"),
    "sharp softmax": (lambda net: lambda x: (30 * net(x)).softmax(1), "vanishing gradients"),
    "tanh": (lambda net: lambda x: (20 * net(x)).tanh(), "vanishing gradients"),
    "huge logits": (lambda net: lambda x: 1e4 * net(x), "saturation"),
    "quantised": (lambda net: lambda x: net((3 * x).round() / 3), "vanishing gradients"),
    "noise": (lambda net: lambda x: net(x + 0.1 * torch.randn_like(x)), "randomness"),
    "gradient step": (gradient_step, "gradient in the forward pass"),
    "sine": (lambda net: lambda x: net(x + 0.03 * torch.sin(300 * x)), "shattered gradients"),
    "detached": (lambda net: lambda x: net(x).detach() + 0 * x.sum(), "vanishing gradients"),
    "hashed": (hashed, "jumps"),
    "adapting": (lambda net: lambda x: net(x - 0.9 * x.mean(0, keepdim=True) + 0.3), "depends on the batch"),
    "remembering": (Remembering, "memory"),
    "cached": (lambda net: Remembering(net, share=0.0), "vanishing gradients"),
    "counting": (lambda net: Counting(net, train(cnn, eps=0.1)), "memory"),
    "in a closure": (in_a_closure, "memory"),
    "in a global": (in_a_global, "memory"),
    "in a class": (in_a_class, "memory"),
    "in a default": (in_a_default, "memory"),
    "in a captured model": (in_a_captured_model, "memory"),
    "counted in a closure": (counted_in_a_closure, "memory"),
    "watching": (lambda net: Watching(net, train(cnn, eps=0.1)), "other answers with gradients"),
}
CORRECTED = ("probabilities", "tanh", "remembering", *(name for name in MASKS if name.startswith("in a ")))


def masked(name: str, net: nn.Module) -> nn.Module:
    return Masked(MASKS[name][0](net))


def batches(count: int = 40, size: int = 20) -> list[tuple[Tensor, Tensor]]:
    x, y = digits(count)
    return list(zip(x.split(size), y.split(size), strict=True))


def judge(model: nn.Module, threat: AutoAttack = QUICK, folder: Path | None = None) -> Report:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return evaluate(model, batches(), [threat], folder=folder)


@pytest.mark.parametrize("mask", MASKS)
def test_no_masked_model_is_reported_without_its_finding(
    mask: str, honest: dict[str, nn.Module], truth: Callable[[nn.Module], int]
) -> None:
    expected = truth(masked(mask, honest["cnn"]))
    report = judge(masked(mask, honest["cnn"]))
    finding = MASKS[mask][1]
    score = report.threats[-1]
    assert finding in score.doubts
    assert finding in report.worst_case.doubts
    assert set(report.threats[0].doubts) <= {"memory", "depends on the batch"}  # else it needs no gradient
    assert any(remark.startswith(f"doubtful figure of {score.spec}: {finding}: ") for remark in report.remarks)
    line = next(line for line in str(report).splitlines() if line.startswith(score.spec[:20]))
    assert finding in line.partition("doubtful: ")[2]
    assert report.to_dict()["threats"][-1]["doubts"] == score.doubts
    if mask in CORRECTED:  # what the copy says; of others the finding is all that can be said
        assert abs(score.correct - expected) <= 2


@pytest.mark.parametrize("liar", ["remembering", "counting", "in a closure", "counted in a closure"])
def test_the_figure_of_a_model_that_remembers_is_that_of_a_copy_that_does_not(
    liar: str, honest: dict[str, nn.Module]
) -> None:
    report = judge(masked(liar, honest["cnn"]))
    figure, rows = report.threats[-1], report.ledger.rows(report.threats[-1].spec)
    assert "memory" in figure.doubts
    assert bool(report["clean"].doubts) == bool(rows["clean_again"].any())
    assert (rows["again"] == 1).sum() > 2
    assert int(rows["correct"].sum()) == figure.correct < 40 * figure.stages["apgd"]


def test_a_model_that_cannot_be_copied_is_asked_again_and_the_report_says_so(honest: dict[str, nn.Module]) -> None:
    net = Masked(honest["cnn"])
    net.kept = torch.ones(1, requires_grad=True) * 2  # type: ignore[assignment]
    report = judge(net)
    assert [remark.partition(" (")[0] for remark in report.remarks] == ["the model could not be copied"]
    assert report.threats[-1].doubts == []


def test_what_a_model_holds_outside_is_as_it_was_after_the_second_question(honest: dict[str, nn.Module]) -> None:
    maps: list[Tensor] = []
    lock, net = threading.Lock(), copy.deepcopy(honest["cnn"])
    net[0].register_forward_hook(lambda module, inputs, output: maps.append(output))  # type: ignore[operator]

    def answer(x: Tensor) -> Tensor:
        with lock:
            return net(x)  # type: ignore[no-any-return]

    report = judge(Masked(answer))
    assert report.threats[-1].doubts == []
    assert [remark.partition(": ")[0] for remark in report.remarks] == [
        "functions of the model hold what could not be copied (lock)"
    ]
    asked = len(maps)
    answer(batches()[0][0])
    assert len(maps) == asked + 1


@pytest.mark.parametrize("name", ["mlp", "cnn", "cnn under attack"])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_an_honestly_trained_model_gets_no_finding(name: str, norm: str, honest: dict[str, nn.Module]) -> None:
    x, y = digits(128)
    for eps in (1 / 255, 8 / 255, 0.09, 0.3):
        assert look(honest[name], x, y, eps=eps, norm=AutoAttack(eps=eps, norm=norm).norm) == []  # type: ignore[arg-type]


def vit() -> nn.Module:
    return create_model("vitruvius/vit_digits", depth=2, embed_dim=48)


@pytest.mark.parametrize(("norm", "eps"), [("linf", 0.0314), ("linf", 0.3), ("l2", 0.9)])
@pytest.mark.parametrize("name", ["cnn under attack", "vit"])
def test_a_shattered_input_is_told_from_an_honest_one_in_each_ball(
    name: str, norm: str, eps: float, honest: dict[str, nn.Module], honest_vit: nn.Module
) -> None:
    x, y = digits(64)
    net = {**honest, "vit": honest_vit}[name]
    ball = {"eps": eps, "norm": NORMS[norm]}
    assert "shattered gradients" not in [finding.name for finding in look(net, x, y, **ball)]  # type: ignore[arg-type]
    assert "shattered gradients" in [finding.name for finding in look(masked("sine", net), x, y, **ball)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("share", "found"), [(0.25, False), (0.75, True)])
def test_gradients_are_shattered_where_they_mislead_half_of_the_images(
    share: float, found: bool, honest: dict[str, nn.Module]
) -> None:
    x, y = digits(64)
    net, limit = honest["cnn"], x.mean((1, 2, 3)).quantile(share)

    def answer(x: Tensor) -> Tensor:
        return torch.where((x.mean((1, 2, 3)) < limit)[:, None], masked("sine", net)(x), net(x))

    assert ("shattered gradients" in [finding.name for finding in look(Masked(answer), x, y, eps=EPS)]) == found


def test_the_reports_of_honest_models_have_no_remark(honest: dict[str, nn.Module], honest_vit: nn.Module) -> None:
    net = honest["cnn"]
    models = {
        **honest,
        "vit": honest_vit,
        "float64": copy.deepcopy(net).double(),
        "bfloat16": copy.deepcopy(net).bfloat16(),
        "colder": Masked(lambda x: net(x) / 3),
        "mirrored too": Masked(lambda x: (net(x) + net(x.flip(-1))) / 2),
        "two together": Masked(lambda x: net(x) + honest["mlp"](x)),
    }
    for name, model in models.items():
        report = judge(model, WITH_SQUARE)
        assert abs(report.threats[-1].correct - judge(model, LONGER).threats[-1].correct) <= 2, name
        assert report.remarks == [], name
        assert "doubtful" not in str(report)
        assert report["clean"].doubts == []
        rows = report.ledger.rows(report.threats[-1].spec)
        assert not rows["again"].any()
        assert not rows["clean_again"].any()


def test_square_breaking_what_gradients_left_is_a_finding(honest: dict[str, nn.Module]) -> None:
    attacks = ({"use": "apgd", "steps": 3}, {"use": "square", "queries": 200})
    square = AutoAttack(eps=0.3, version="custom", attacks=attacks)
    score = judge(masked("quantised", honest["cnn"]), square).threats[-1]
    assert score.stages["square"] < score.stages["apgd"] - 0.05
    assert "black box" in score.doubts


def test_square_before_any_gradient_is_no_finding() -> None:
    robust = torch.zeros(50, dtype=torch.bool)
    rows = {"id": torch.arange(50), "standing after clean": ~robust, "standing after square": robust}
    assert stage_findings(rows) == []
    rows = {"id": torch.arange(50), "standing after clean": ~robust, "standing after apgd-ce": ~robust}
    assert [finding.name for finding in stage_findings({**rows, "standing after square": robust})] == ["black box"]


def test_a_random_model_is_judged_over_draws_and_never_above_its_stages(
    honest: dict[str, nn.Module], tmp_path: Path
) -> None:
    score = (report := judge(masked("noise", honest["cnn under attack"]), folder=tmp_path)).threats[-1]
    rows = report.ledger.rows(score.spec)
    assert score.accuracy <= list(score.stages.values())[-1]
    assert score.accuracy <= float(rows["draws_right"].mean())
    assert score.doubts == ["randomness"]  # and no memory, though it answers otherwise each time
    assert torch.equal(rows["correct"] & (rows["draws_right"] < 1), torch.zeros_like(rows["correct"]))
    remarks = " ".join(report.remarks)
    assert "version=rand" in remarks
    assert f"over {DRAWS} draws" in remarks
    assert f"worst {100 * score.accuracy:.2f} %" in remarks
    assert f"mean {100 * float(rows['draws_right'].double().mean()):.2f} %" in remarks


def test_what_a_stage_has_broken_stays_broken_in_whatever_draw() -> None:
    right = torch.ones(2, dtype=torch.bool)
    stages = tuple(StageResult(name, "exact", 2, 0, 0.0) for name in ("clean", "apgd"))
    outcome = Outcome(torch.rand(2, 3, 8, 8), torch.tensor([1, ROBUST]), stages, plan=("clean", "apgd"))
    images = (torch.rand(2, 3, 8, 8), torch.tensor([3, 4]), torch.tensor([7, 8]))
    ledger = Ledger()
    pool = Pool(ledger, "aa", images, lambda images, moved: {"correct": right, DRAWS_RIGHT: right.float()})
    pool.finish(outcome)
    assert ledger.rows("aa")["correct"].tolist() == ledger.rows("aa")["standing after apgd"].tolist() == [False, True]


def test_a_random_model_under_version_rand_is_not_told_to_use_it(honest: dict[str, nn.Module]) -> None:
    checks = MaskingChecks({name: AutoAttack(eps=EPS, version=name) for name in ("standard", "rand")})
    checks.collect(*digits(6))
    checks.look(masked("noise", honest["cnn"]))
    advice = {name: findings[0].sentence for name, findings in checks.found.items()}
    assert "version=rand" in advice["standard"]
    assert "version=rand" not in advice["rand"]
    assert [checks.draws(name) for name in ("standard", "rand", "clean")] == [DRAWS, DRAWS, 1]


def test_findings_stay_with_a_figure_that_is_reported_again(honest: dict[str, nn.Module], tmp_path: Path) -> None:
    model = masked("huge logits", honest["cnn"])
    judge(model, folder=tmp_path)
    later = evaluate(model, batches(), [], folder=tmp_path)
    assert "saturation" in later.threats[-1].doubts
    saved = json.loads((tmp_path / "report.json").read_text())
    assert any("saturation" in remark for remark in saved["remarks"])


def test_a_robustbench_entry_says_what_speaks_against_its_figure(
    honest: dict[str, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AutoAttack, "stages", lambda self: [("square", Square(eps=self.eps, queries=2))])
    facts = {"dataset": "digits", "name": "masked", "eps": EPS}
    _, entry = benchmark(masked("probabilities", honest["cnn"]), batches(), **facts)  # type: ignore[arg-type]
    assert "probabilities instead of logits" in entry.remarks
    entry.save(tmp_path / "entry.json")
    assert json.loads((tmp_path / "entry.json").read_text())["remarks"] == entry.remarks
    _, entry = benchmark(honest["cnn"], batches(), **facts)  # type: ignore[arg-type]
    assert entry.remarks == ""


def test_the_page_shows_no_masked_model_without_its_finding(honest: dict[str, nn.Module], tmp_path: Path) -> None:
    judge(masked("huge logits", honest["cnn"]), folder=tmp_path / "evaluation")
    (tmp_path / "config.yaml").write_text("model: {name: masked}\n")
    text = write_page([tmp_path], tmp_path / "page.html").read_text()
    figure = re.search(r"doubtful: [^<]*", text)
    assert figure is not None
    assert "saturation" in figure[0]
    assert "saturation: " in text  # the remark


def test_findings_are_told_before_the_attack_begins(
    honest: dict[str, nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG", "vitruvius.evaluation"):
        evaluate(masked("probabilities", honest["cnn"]), batches(), [QUICK])
    news = [record.getMessage() for record in caplog.records]
    told = next(place for place, line in enumerate(news) if line.startswith("doubtful: probabilities"))
    attacked = next(place for place, line in enumerate(news) if line.startswith("autoattack"))
    assert told < attacked
    assert news[attacked].endswith("still robust")
    assert "doubtful: probabilities" in news[-1]  # the figure, never alone


def test_images_of_several_small_batches_are_looked_at_in_passes_of_their_size(honest: dict[str, nn.Module]) -> None:
    x, y = digits(24)
    y = y.clone()
    y[:4] = (y[:4] + 1) % 10  # the first ones are wrong, so their gradients say nothing
    sizes: list[int] = []

    def answer(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return honest["cnn"]((3 * x).round() / 3)

    small = list(zip(x.split(2), y.split(2), strict=True))
    report = evaluate(Masked(answer), small, [QUICK])
    assert "vanishing gradients" in report.threats[-1].doubts
    in_checks = MaskingChecks({"quick": QUICK})
    for batch in small:
        in_checks.collect(*batch)
    sizes.clear()
    in_checks.look(Masked(answer))
    assert max(sizes) == 2


def test_one_stream_of_images_is_checked_before_it_is_attacked(honest: dict[str, nn.Module]) -> None:
    report = evaluate(masked("noise", honest["cnn"]), iter(batches()), [QUICK])
    assert "randomness" in report.threats[-1].doubts
    assert "draws_right" in report.ledger.rows(report.threats[-1].spec)


def test_an_evaluation_that_goes_on_does_not_look_again(honest: dict[str, nn.Module], tmp_path: Path) -> None:
    calls: list[int] = []

    def answer(x: Tensor) -> Tensor:
        calls.append(len(x))
        return 1e4 * honest["cnn"](x)

    judge(Masked(answer), folder=tmp_path)
    calls.clear()
    again = judge(Masked(answer), folder=tmp_path)
    assert calls == []
    assert "saturation" in again.threats[-1].doubts


def test_classes_written_as_whole_numbers_are_doubted_and_not_an_error(honest: dict[str, nn.Module]) -> None:
    x, y = digits(6)
    findings = look(Masked(lambda x: F.one_hot(honest["cnn"](x).argmax(1), 10)), x, y, eps=EPS)
    assert {"probabilities", "vanishing gradients"} <= {finding.name for finding in findings}


def test_findings_of_several_processes_are_joined_and_kept(tmp_path: Path) -> None:
    def finding(name: str) -> dict[str, object]:
        return {"name": name, "passed": False, "sentence": "seen", "numbers": {}}

    (tmp_path / "findings.json").write_text(json.dumps({"aa": [finding("ties")]}))
    (tmp_path / "findings.1.json").write_text(json.dumps({"aa": [finding("ties"), finding("saturation")]}))
    second = MaskingChecks({}, tmp_path, rank=1)
    assert [one.name for one in second.found["aa"]] == ["ties", "saturation"]


def test_checks_draw_nothing_from_the_global_stream(honest: dict[str, nn.Module]) -> None:
    x, y = digits(8)
    before = torch.get_rng_state()
    look(masked("noise", honest["cnn"]), x, y, eps=EPS)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_gradient_is_noticed_however_the_forward_pass_came_by_it(honest: dict[str, nn.Module]) -> None:
    from torch.autograd import grad

    net = honest["cnn"]
    x = digits(2)[0]

    def backward(x: Tensor) -> Tensor:
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            net(start).sum().backward()
        return net(x)

    def by_name(x: Tensor) -> Tensor:
        with torch.enable_grad():
            start = x.detach().requires_grad_()
            grad(net(start).sum(), start)
        return net(x)

    def functional(x: Tensor) -> Tensor:
        torch.func.grad(lambda start: net(start).sum())(x)
        return net(x)

    for answer in (backward, by_name, functional):
        assert calls_autograd(Masked(answer), x), answer.__name__
    net.zero_grad()
    assert not calls_autograd(net, x)


def test_an_evaluation_may_be_profiled(honest: dict[str, nn.Module]) -> None:
    profile = cProfile.Profile()
    report = profile.runcall(judge, honest["cnn"])
    assert report.remarks == []
    assert "judge" in {entry.code.co_name for entry in profile.getstats() if not isinstance(entry.code, str)}


def test_a_model_without_any_gradient_can_still_be_searched_by_square(honest: dict[str, nn.Module]) -> None:
    square = AutoAttack(eps=EPS, version="custom", attacks=({"use": "square", "queries": 5},))
    net = honest["cnn"]
    score = judge(Masked(lambda x: net(x).detach()), square).threats[-1]
    assert "vanishing gradients" in score.doubts
