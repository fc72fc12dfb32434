"""The tables of docs/results: each a function of the runs that experiments/results holds of one campaign.

A run is what `python -m experiments collect` has kept of it. Runs that were not judged are left out; a cell is empty
where nothing was measured.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
Run = dict[str, Any]


def load(campaign: str, results: Path = RESULTS) -> list[Run]:
    """All runs of a campaign."""
    return [json.loads(path.read_text()) for path in sorted((results / campaign).glob("*.json"))]


def is_judged(run: Run) -> bool:
    return bool(run.get("threats"))


def with_tables(page: str, results: Path = RESULTS) -> str:
    """The page with every block between `<!-- table NAME -->` and `<!-- end -->` made anew."""
    parts = page.split("<!-- table ")
    made = [parts[0]]
    for part in parts[1:]:
        name, _, rest = part.partition(" -->")
        _, _, after = rest.partition("<!-- end -->")
        made.append(f"{name} -->\n{print_table(name, results)}\n<!-- end -->{after}")
    return "<!-- table ".join(made)


def print_table(campaign: str, results: Path = RESULTS) -> str:
    """The table of a campaign, in markdown."""
    if campaign not in TABLES:
        raise SystemExit(f"no table for {campaign}; there are {', '.join(TABLES)}.")
    runs = load(campaign, results)
    if campaign not in STUDIES:
        runs = [run for run in runs if is_judged(run)]
    if not runs:
        raise SystemExit(f"{results / campaign} holds no judged run.")
    return TABLES[campaign](runs)


# ---------------------------------------------------------------- tables


def attention_natural(runs: list[Run]) -> str:
    """Clean, PGD, AutoAttack and corruptions of naturally trained models; each against softmax, on the same images."""
    columns = {
        "clean": lambda run: percent(find(run, "evaluation/clean")),
        "PGD-20 0.5/255": lambda run: percent(find(run, "pgd", "0.5/255")),
        "PGD-20 1/255": lambda run: percent(find(run, "pgd", "(eps=1/255")),
        "AutoAttack 1/255": lambda run: with_interval(find(run, "autoattack")),
        "against softmax (p)": lambda run: against(run, named(runs, "softmax"), "autoattack"),
        "corruptions": lambda run: f"{100 * corrupted(run):.1f}",
        **in_passing(runs),
    }
    return table("attention", by_threat(runs, "autoattack"), columns)


def attention_pgd(runs: list[Run]) -> str:
    """Clean, PGD and AutoAttack of adversarially trained models; each against softmax, on the same images."""
    columns = {
        "clean": lambda run: percent(find(run, "evaluation/clean")),
        "PGD-20 8/255": lambda run: percent(find(run, "pgd")),
        "AutoAttack 8/255": lambda run: with_interval(find(run, "autoattack")),
        "against softmax (p)": lambda run: against(run, named(runs, "softmax"), "autoattack"),
        "corruptions": lambda run: f"{100 * corrupted(run):.1f}",
        **in_passing(runs),
    }
    return table("attention", by_threat(runs, "autoattack"), columns)


def attention_compact(runs: list[Run]) -> str:
    """A compact ViT under AutoAttack: differences to softmax of the same seed, with Holm's correction over the table."""
    main, *weaker = sorted({spec for run in runs for spec in run["threats"] if "autoattack" in spec}, key=size_of_eps)[::-1]
    corrections = holm({run["name"]: paired(*both)[1] for run in runs if (both := with_softmax(runs, run, main))})
    pgd = next(spec for spec in runs[0]["threats"] if "pgd" in spec)
    columns: dict[str, Callable[[Run], str]] = {
        "seed": lambda run: str(run["seed"]),
        "clean, 10,000": lambda run: percent(find(run, "all_images/clean")),
        label(pgd).replace("pgd", "PGD-20"): lambda run: percent(run["threats"][pgd]),
        **{named_by_eps(spec): lambda run, spec=spec: percent(run["threats"][spec]) for spec in weaker},
        named_by_eps(main): lambda run: with_interval(run["threats"][main]),
        "against softmax": lambda run: difference_text(with_softmax(runs, run, main)),
        "p, Holm": lambda run: f"{corrections[run['name']]:.2g}" if run["name"] in corrections else "",
        "corruptions": corrupted_with_interval,
        "ECE": calibration,
    }
    widths = [100 * half_width(*both) for run in runs if (both := with_softmax(runs, run, main))]
    seen = f"Half-widths of the 95 % intervals of the differences: {min(widths):.1f} to {max(widths):.1f} points."
    return f"{table('attention', sorted(runs, key=lambda run: -run['threats'][main]['accuracy']), columns)}\n\n{seen}"


def size_of_eps(spec: str) -> float:
    """The eps of `autoattack(eps=0.5/255, …)`, times 255."""
    return float(spec.partition("eps=")[2].partition("/")[0])


def named_by_eps(spec: str) -> str:
    return f"AutoAttack {size_of_eps(spec):g}/255"


def with_softmax(runs: Sequence[Run], run: Run, spec: str) -> tuple[Run, Run] | None:
    """What a run and softmax of its seed did under a threat; nothing for softmax itself."""
    reference = of_same_seed(runs, run, "softmax")
    if run["name"].startswith("softmax_seed") or run is reference:
        return None
    return run["threats"][spec], reference["threats"][spec]


def holm(values: dict[str, float]) -> dict[str, float]:
    """p values corrected for their number, step down (Holm 1979)."""
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(values, key=lambda name: values[name])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[name]))
        corrected[name] = largest
    return corrected


def difference_text(both: tuple[Run, Run] | None) -> str:
    """Difference on the same images in points, with its 95 % interval."""
    if both is None:
        return ""
    difference, width = 100 * paired(*both)[0], 100 * half_width(*both)
    return f"{difference:+.1f} [{difference - width:+.1f}, {difference + width:+.1f}]"


def half_width(one: Run, other: Run) -> float:
    """Of the 95 % interval of the difference of accuracies on the same images (normal approximation)."""
    steps = answers(one).astype(float) - answers(other)
    return float(1.96 * steps.std(ddof=1) / math.sqrt(len(steps)))


def corrupted_with_interval(run: Run) -> str:
    """Mean accuracy over the corruptions, with the 95 % interval over images."""
    per_image = np.mean([answers(threat) for threat in run["threats"].values() if threat["severity"] is not None], axis=0)
    width = 196 * per_image.std(ddof=1) / math.sqrt(len(per_image))
    return f"{100 * per_image.mean():.1f} ± {width:.1f}"


def in_passing(runs: list[Run]) -> dict[str, Callable[[Run], str]]:
    """Calibration, checks and speed, where a run has any of them."""
    columns: dict[str, Callable[[Run], str]] = {}
    if any(calibration(run) for run in runs):
        columns["ECE"] = calibration
    if any(worst_twin(run) for run in runs):
        columns["worst case of the checks"] = worst_twin
    if any(speed(run) for run in runs):
        columns["images/s, bf16"] = lambda run: f"{speed(run):,.0f}" if speed(run) else ""
    return columns


def structured(runs: list[Run]) -> str:
    """Accuracy after every start; each against timm's start with the same seed, on the same images."""
    thirds = [round(len(runs[0]["epochs"]) * share) for share in (1 / 3, 2 / 3)]
    columns = {
        "seed": lambda run: str(run["seed"]),
        f"epoch {thirds[0]}": lambda run: held_out(run, thirds[0]),
        f"epoch {thirds[1]}": lambda run: held_out(run, thirds[1]),
        "test accuracy": lambda run: with_interval(find(run, "clean")),
        "against timm (p)": lambda run: against(run, of_same_seed(runs, run, "timm"), "clean"),
    }
    return table("start", by_threat(runs, "clean"), columns)


def light(runs: list[Run]) -> str:
    """One step, many steps and AutoAttack of models trained with one step; each against the light recipe."""
    columns = {
        "clean": lambda run: percent(find(run, "clean")),
        "one step": lambda run: percent(find(run, "pgd", "steps=1,")),
        "PGD-20": lambda run: percent(find(run, "pgd", "steps=20")),
        "AutoAttack 8/255": lambda run: with_interval(find(run, "autoattack")),
        "against `light` (p)": lambda run: against(run, named(runs, "light"), "autoattack"),
        "alarms": lambda run: str(max(row.get("alarms", 0) for row in run["epochs"])),
    }
    return table("recipe", by_threat(runs, "autoattack"), columns)


def imagenette(runs: list[Run]) -> str:
    """Clean, PGD and AutoAttack of DeiT-Tiny; each against plain attention with the same seed, on the same images."""
    columns = {
        "seed": lambda run: str(run["seed"]),
        "clean": lambda run: with_interval(find(run, "evaluation/clean")),
        "against plain (p)": lambda run: against(run, of_same_seed(runs, run, "plain"), "evaluation/clean"),
        "PGD-20 0.25/255": lambda run: percent(find(run, "pgd", "0.25/255")),
        "PGD-20 1/255": lambda run: percent(find(run, "pgd", "(eps=1/255")),
        "AutoAttack 0.5/255": lambda run: with_interval(find(run, "autoattack")),
        "against plain, attacked (p)": lambda run: against(run, of_same_seed(runs, run, "plain"), "autoattack"),
        **in_passing(runs),
    }
    return table("attention", by_threat(runs, "autoattack"), columns)


def released_protocol(runs: list[Run]) -> str:
    """What each choice of the released protocol does: accuracy by model, strength, space and labels."""
    rows = runs[0]["rows"]
    ways = list(dict.fromkeys((row["space"], row["labels"]) for row in rows))
    head = ["ε × 255", "model", *(f"{space}, {labels} labels" for space, labels in ways)]
    lines = [cells(*head), "|---|---|" + "---:|" * len(ways)]
    for eps in sorted({row["eps"] for row in rows}):
        for model in dict.fromkeys(row["model"] for row in rows):
            answers = [protocol_cell(rows, eps, model, way) for way in ways]
            lines.append(cells(f"{255 * eps:.3g}", f"`{model}`", *answers))
    return "\n".join(lines)


def protocol_cell(rows: Sequence[Run], eps: float, model: str, way: tuple[str, str]) -> str:
    """Accuracy, and its difference to plain attention, trained with the same seed, under the same attack."""
    found = {row["model"]: row for row in rows if row["eps"] == eps and (row["space"], row["labels"]) == way}
    if model not in found:
        return ""
    text = percent(found[model])
    _, mark, seed = model.partition("_seed")
    for plain in (f"softmax{mark}{seed}", "plain"):
        if plain in found and plain != model:
            return f"{text}, {compare(found[model], found[plain])}"
    return text


def vitcod(runs: list[Run]) -> str:
    """Masks and low rank before and after the same fine-tuning; each against chance at the same sparsity."""
    dense = named(runs, "dense")
    columns = {
        "seed": lambda run: str(run["seed"]),
        "begins with": lambda run: percent(find(run, "start/")),
        "after fine-tuning": lambda run: with_interval(find(run, "evaluation/clean", at="evaluation")),
        "against random (p)": lambda run: against_random(runs, run),
        "against dense (p)": lambda run: against(run, dense, "clean", at="evaluation"),
    }
    if speed(dense):
        columns["inference, of dense"] = lambda run: ratio(speed(run), speed(dense))
    columns["cycles, of dense"] = cycle_share
    return table("model", by_threat(runs, "clean", at="evaluation"), columns)


def speedruns(runs: list[Run]) -> str:
    """Accuracy on all images, and seconds told three ways."""
    columns = {
        "clean, all images": lambda run: with_interval(find(run, "evaluation/clean")),
        "APGD-CE + APGD-T 8/255, all": lambda run: optional(run, "apgd/autoattack"),
        "AutoAttack 8/255": lambda run: optional(run, "autoattack/autoattack"),
        "seconds of the epochs": lambda run: f"{without_compiling(run):.0f}",
        "with compiling": lambda run: f"{run['seconds']['train']:.0f}",
        "with data and held-out images": lambda run: f"{run['seconds'].get('wall_train', math.nan):.0f}",
    }
    return table("run", sorted(runs, key=lambda run: run["name"]), columns)


def attention_digits(runs: list[Run]) -> str:
    """Clean and attacked digits of adversarially trained models; each against softmax, on the same images."""
    columns = {
        "seed": lambda run: str(run["seed"]),
        "clean": lambda run: percent(find(run, "evaluation/clean")),
        "PGD-20 0.1": lambda run: percent(find(run, "pgd")),
        "APGD-CE, APGD-T, Square 0.1": lambda run: with_interval(find(run, "autoattack")),
        "against softmax (p)": lambda run: against(run, of_same_seed(runs, run, "softmax"), "autoattack"),
        "ECE": calibration,
    }
    return table("attention", by_threat(runs, "autoattack"), columns)


def light_digits(runs: list[Run]) -> str:
    """One step, many steps and three stages of AutoAttack; each against the light recipe at its eps, and the alarm."""
    columns = {
        "seed": lambda run: str(run["seed"]),
        "ε": lambda run: str(run["config"]["task"]["eps"]),
        "clean": lambda run: percent(find(run, "evaluation/clean")),
        "FGSM": lambda run: percent(find(run, "fgsm")),
        "PGD-20": lambda run: percent(find(run, "pgd", "steps=20")),
        "APGD-CE, APGD-T, Square": lambda run: with_interval(find(run, "autoattack")),
        "against `light` (p)": lambda run: against_light(runs, run),
        "alarms, ε growing": lambda run: alarms(run, at_full_eps=False),
        "alarms, ε full": lambda run: alarms(run, at_full_eps=True),
    }
    return table("recipe", sorted(by_threat(runs, "autoattack"), key=is_constant), columns)


def against_light(runs: Sequence[Run], run: Run) -> str:
    """Against the light recipe; nothing for a model that gives one answer to all images, which no attack can change."""
    if is_constant(run):
        return "learned nothing"
    return against(run, light_of(runs, run), "autoattack")


def is_constant(run: Run) -> bool:
    """Whether no attack changes anything: clean images are as often right as attacked ones."""
    return bool(find(run, "evaluation/clean")["accuracy"] == find(run, "autoattack")["accuracy"])


def light_of(runs: Sequence[Run], run: Run) -> Run:
    """The light recipe at the eps of a run, and with its seed."""
    if run["name"].startswith("eps01_"):
        return named(runs, "eps01_light")
    return of_same_seed(runs, run, "light")


def together_digits(runs: list[Run]) -> str:
    """Clean and attacked digits of everything at once and alone; each against softmax from scratch and fine-tuned."""
    others = [run for run in load("attention_digits") if run["name"].startswith(("softmax", "rpc_all_n2_released"))]
    known = [*runs, *(run for run in others if run["seed"] < 2)]
    columns = {
        "seed": lambda run: str(run["seed"]),
        "clean": lambda run: percent(find(run, "evaluation/clean")),
        "PGD-20 0.1": lambda run: percent(find(run, "pgd")),
        "APGD-CE, APGD-T, Square 0.1": lambda run: with_interval(find(run, "autoattack")),
        "against `softmax` (p)": lambda run: against(run, of_same_seed(known, run, "softmax"), "autoattack"),
        "against `dense` (p)": lambda run: against_dense(known, run),
        "ECE": calibration,
    }
    return table("model", by_threat(known, "autoattack"), columns)


def against_dense(runs: Sequence[Run], run: Run) -> str:
    """Against softmax that was fine-tuned as long; nothing for a run that was not."""
    if not run["config"]["model"]["weights"]:
        return ""
    return against(run, of_same_seed(runs, run, "dense"), "autoattack")


KPCA = {  # analysis, statistic: what is claimed about it, in a reader's words
    ("value_vectors", "matched_cosine"): "cosine of v and its prediction, tokens matched",
    ("value_vectors", "linear_cka_debiased"): "linear CKA of the two, debiased",
    ("value_vectors", "kernel_cka"): "kernel CKA, biased as published",
    ("value_vectors", "kernel_cka_debiased"): "kernel CKA, debiased",
    ("value_vectors", "subspace_overlap"): "overlap of their subspaces",
    ("gammas", "relative"): "relative difference of gammas (equal gammas: 0)",
    ("norms", "log10_ratio"): "log₁₀(‖φ(q)‖² / ‖h‖²) (equal norms: 0)",
    ("eigenvalues", "max"): "largest eigenvalue",
}


def kpca(runs: list[Run]) -> str:
    """What a study of kernel PCA found of every model, beside chance of three kinds."""
    head = ("model", "statistic", "mean over heads", "lowest, highest head", "chance: gaussian", "spectrum", "permuted")
    lines = [cells(*head, "heads beyond chance"), "|---|---|" + "---:|" * 6]
    for row in (row for run in runs for row in run["rows"]):
        if (words := KPCA.get((row["analysis"], row["statistic"]))) is None:
            continue
        chance = [short(row[f"chance_{null}"]) for null in ("gaussian", "spectrum", "permuted")]
        beyond = f"{row['heads_beyond_chance']} of {row['heads_judged']}"
        spread = f"{short(row['min'])}, {short(row['max'])}"
        lines.append(cells(f"`{row['model']}`", words, f"**{short(row['mean'])}**", spread, *chance, beyond))
    return "\n".join(lines)


def short(value: float | None) -> str:
    """Two digits, or three where the number is large."""
    if value is None:
        return ""
    if abs(value) >= 10:
        return f"{value:.3g}"
    return f"{value:.2g}"


def table(first: str, runs: Sequence[Run], columns: dict[str, Callable[[Run], str]]) -> str:
    """One line per run."""
    lines = [cells(first, *columns), "|---|" + "---:|" * len(columns)]
    for run in runs:
        start, _, _ = run["name"].partition("_seed")
        lines.append(cells(f"`{start}`", *(column(run) for column in columns.values())))
    return "\n".join(lines)


def cells(*texts: str) -> str:
    return "| " + " | ".join(texts) + " |"


# ---------------------------------------------------------------- what a cell says


def measured(run: Run) -> str:
    """What a recipe's head says of a run of it: clean images, and every attack."""
    shown = {spec: threat for spec, threat in run["threats"].items() if threat["severity"] is None}
    texts = list(
        dict.fromkeys(f"{label(spec)} {percent(threat)} %{of_images(threat)}" for spec, threat in shown.items())
    )
    numbers = {of_images(threat) for threat in shown.values()}
    said = "; ".join(texts)
    if len(numbers) == 1:
        said = f"{said.replace(next(iter(numbers)), '')}{numbers.pop()}"
    torch = run["versions"].get("torch", "unknown").partition("+")[0]
    return f"{said}; seed {run['seed']}, torch {torch}, {run['started'][:10]}."


def of_images(threat: Run) -> str:
    return f" of {threat['n']:,} images"


def label(spec: str) -> str:
    """`evaluation/pgd(eps=1/255, steps=20, …)` → `pgd 1/255`."""
    name = spec.rpartition("/clean")[1][1:] or spec.partition("(")[0].rpartition("/")[2]
    eps = spec.partition("eps=")[2].partition(",")[0].rstrip(")")
    return f"{name} {eps}".strip()


def with_interval(threat: Run) -> str:
    return f"**{percent(threat)}** [{100 * threat['low']:.1f}, {100 * threat['high']:.1f}]"


def percent(threat: Run) -> str:
    return f"{100 * threat['accuracy']:.1f}"


def optional(run: Run, spec: str) -> str:
    """The cell of a threat that only some runs meet."""
    if any(spec in known for known in run["threats"]):
        threat = find(run, spec)
        return f"{with_interval(threat)}, {threat['n']:,} images"
    return ""


def held_out(run: Run, epoch: int) -> str:
    """Accuracy on the held-out images after an epoch, counted from 1."""
    for row in run["epochs"]:
        if row["epoch"] + 1 == epoch and "val_accuracy" in row:
            return f"{100 * row['val_accuracy']:.1f}"
    return ""


def calibration(run: Run) -> str:
    """Expected calibration error on the most clean images that were judged, in per cent."""
    known = [threat for spec, threat in run["threats"].items() if spec.endswith("/clean") and "ece" in threat]
    if not known:
        return ""
    return f"{100 * max(known, key=lambda threat: threat['n'])['ece']:.1f}"


def alarms(run: Run, *, at_full_eps: bool) -> str:
    """After how many epochs the alarm for catastrophic overfitting rang, of those while eps grew or of the others."""
    full = 0.999 * run["config"]["task"]["eps"]
    before = [0, *(row["alarms"] for row in run["epochs"])]
    rang = [after > earlier for earlier, after in itertools.pairwise(before)]
    asked = [ring for ring, row in zip(rang, run["epochs"], strict=True) if (row["train_eps"] >= full) == at_full_eps]
    if not asked:
        return ""
    return f"{sum(asked)} of {len(asked)}"


def worst_twin(run: Run) -> str:
    """Accuracy when every image meets whatever check breaks it, and who breaks more than the white-box attack."""
    for findings in run.get("checks", {}).values():
        worst = next(finding for finding in findings if finding["name"] == "worst case")
        text = f"{100 * worst['numbers']['accuracy']:.1f} of {100 * worst['numbers']['white-box accuracy']:.1f}"
        if worst["passed"]:
            return text
        return f"{text}: {worst['sentence'].partition(' breaks')[0]}"
    return ""


def speed(run: Run) -> float:
    """Images per second of inference in bfloat16; 0 where it was not measured."""
    for rates in run.get("speed", {}).values():
        return float(next(rate for rate in rates if rate["precision"] == "bfloat16")["images_per_second"])
    return 0.0


def ratio(one: float, other: float) -> str:
    if not one or not other:
        return ""
    return f"{one / other:.2f}"


def cycle_share(run: Run) -> str:
    """Cycles of ViTCoD's accelerator for the masks over those without masks."""
    if not run.get("cycles"):
        return ""
    rows = run["cycles"]["rows"]
    dense = next(row for row in rows if row["sparsity"] == 0)
    masked = next(row for row in rows if row["sparsity"] != 0)
    return f"{masked['total'] / dense['total']:.2f}"


def without_compiling(run: Run) -> float:
    """Seconds of all epochs, the first of which, in which models are compiled, counts as the median of the others."""
    seconds = [row["seconds"] for row in run["epochs"]]
    if len(seconds) == 1:
        return float(seconds[0])
    return float(sum(seconds[1:]) + statistics.median(seconds[1:]))


# ---------------------------------------------------------------- comparing runs


def find(run: Run, *words: str, at: str = "") -> Run:
    """The threat whose name holds all words, in the evaluation whose folder begins so."""
    for spec, threat in run["threats"].items():
        if spec.startswith(at) and all(word in spec for word in words):
            found: Run = threat
            return found
    raise SystemExit(f"{run['name']} was not judged by {' '.join(words)}; it has {', '.join(run['threats'])}.")


def named(runs: Sequence[Run], name: str) -> Run:
    for run in runs:
        if run["name"] == name:
            return run
    raise SystemExit(f"there is no run {name} to compare with; there are {', '.join(run['name'] for run in runs)}.")


def of_same_seed(runs: Sequence[Run], run: Run, name: str) -> Run:
    """The run of this name with the seed of another; that of seed 0 where there is none."""
    own = f"{name}_seed{run['seed']}"
    if run["seed"] and any(other["name"] == own for other in runs):
        return named(runs, own)
    return named(runs, name)


def by_threat(runs: Sequence[Run], *words: str, at: str = "") -> list[Run]:
    """Best first."""
    return sorted(runs, key=lambda run: -find(run, *words, at=at)["accuracy"])


def against(run: Run, reference: Run, *words: str, at: str = "") -> str:
    """Difference to a reference on the same images, in points, with its p value; nothing for the reference itself."""
    if run["name"] == reference["name"]:
        return ""
    return compare(find(run, *words, at=at), find(reference, *words, at=at))


def against_random(runs: Sequence[Run], run: Run) -> str:
    """Against masks of chance at the same sparsity, trained with the same seed; nothing for a run without masks."""
    name, mark, seed = run["name"].partition("_seed")
    _, _, removed = name.rpartition("_")
    if not removed.isdigit():
        return ""
    return against(run, named(runs, f"random_{removed}{mark}{seed}"), "clean", at="evaluation")


def compare(one: Run, other: Run) -> str:
    if "correct" in one and "correct" in other:
        difference, p = paired(one, other)
    else:
        difference, p = unpaired(one, other)
    return f"{100 * difference:+.1f} ({p:.2g})"


def corrupted(run: Run) -> float:
    """Mean accuracy over the corruptions at all severities."""
    values = [threat["accuracy"] for threat in run["threats"].values() if threat["severity"] is not None]
    return sum(values) / len(values)


def paired(one: Run, other: Run) -> tuple[float, float]:
    """Difference of accuracies on the same images, and the exact two-sided p of McNemar's test."""
    if one["n"] != other["n"]:
        raise SystemExit(f"{one['n']} images cannot be paired with {other['n']}.")
    better = int((answers(one) > answers(other)).sum())
    worse = int((answers(one) < answers(other)).sum())
    number = better + worse
    tail = sum(math.comb(number, k) for k in range(min(better, worse) + 1)) / 2**number
    return (better - worse) / one["n"], min(1.0, 2 * tail)


def answers(threat: Run) -> np.ndarray:
    """Of every image, whether it was right: 0 or 1."""
    return np.unpackbits(np.frombuffer(base64.b64decode(threat["correct"]), np.uint8))[: threat["n"]]


def unpaired(one: Run, other: Run) -> tuple[float, float]:
    """Difference of accuracies where the answers to single images were not kept, and the two-sided p of a z-test."""
    difference = one["accuracy"] - other["accuracy"]
    pooled = (one["accuracy"] * one["n"] + other["accuracy"] * other["n"]) / (one["n"] + other["n"])
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / one["n"] + 1 / other["n"]))
    if deviation == 0:
        return difference, 1.0
    return difference, math.erfc(abs(difference) / deviation / math.sqrt(2))


TABLES: dict[str, Callable[[list[Run]], str]] = {
    "attention_natural": attention_natural,
    "attention_pgd": attention_pgd,
    "attention_cifar_compact": attention_compact,
    "attention_cifar_compact_natural": attention_compact,
    "structured": structured,
    "structured_p2": structured,
    "light": light,
    "imagenette": imagenette,
    "imagenette_released_protocol": released_protocol,
    "digits_released_protocol": released_protocol,
    "photographs_released_protocol": released_protocol,
    "vitcod": vitcod,
    "vitcod_pretrained": vitcod,
    "speedruns": speedruns,
    "attention_digits": attention_digits,
    "light_digits": light_digits,
    "together_digits": together_digits,
    "kpca_pretrained": kpca,
    "kpca_random": kpca,
    "kpca_digits": kpca,
}
STUDIES = (
    "imagenette_released_protocol",
    "digits_released_protocol",
    "photographs_released_protocol",
    "kpca_pretrained",
    "kpca_random",
    "kpca_digits",
)
