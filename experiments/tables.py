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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student_t

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments" / "results"
Run = dict[str, Any]
Column = Callable[[Run], str]


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
    return TABLES[campaign](runs, campaign) if runs else "Not run yet."


# ---------------------------------------------------------------- tables


def shown(*words: str, at: str = "") -> Column:
    return lambda run: percent(find(run, *words, at=at))


def judged(*words: str, at: str = "") -> Column:
    return lambda run: with_interval(find(run, *words, at=at))


def versus(runs: Sequence[Run], name: str, *words: str, at: str = "") -> Column:
    """Against the run of this name with the same seed, on the same images."""
    return lambda run: against(run, of_same_seed(runs, run, name), *words, at=at)


def seed(run: Run) -> str:
    return str(run["seed"])


def attention(runs: list[Run], campaign: str) -> str:
    """Every attack, natural or adversarial training; each attention against softmax, on the same images."""
    columns = {
        **attacked(campaign),
        "against softmax (p)": lambda run: against(run, named(runs, "softmax"), "autoattack"),
        "corruptions": lambda run: f"{100 * corrupted(run):.1f}",
        **in_passing(runs),
    }
    return table("attention", by_threat(runs, "autoattack"), columns)


def attacked(campaign: str) -> dict[str, Column]:
    """A column for each threat of a campaign, the last with its interval."""
    *others, last = SHOWN[campaign].items()
    return {name: shown(*words.split()) for name, words in others} | {last[0]: judged(*last[1].split())}


def attention_compact(runs: list[Run], campaign: str) -> str:
    """A compact ViT under AutoAttack: differences to softmax of the same seed, corrected for their number (Holm)."""
    attacks = {spec for run in runs for spec in run["threats"] if "autoattack" in spec}
    main, *weaker = sorted(attacks, key=size_of_eps, reverse=True)
    pairs = {run["name"]: both for run in runs if (both := with_softmax(runs, run, main))}
    corrections = holm({name: paired(*both)[1] for name, both in pairs.items()})
    pgd = next(spec for spec in runs[0]["threats"] if "pgd" in spec)
    columns: dict[str, Column] = {
        "seed": seed,
        "clean, 10,000": lambda run: optional(run, "all_images/clean"),
        label(pgd).replace("pgd", "PGD-20"): lambda run: percent(run["threats"][pgd]),
        **{f"AutoAttack {size_of_eps(spec):g}/255": shown(spec) for spec in weaker},
        f"AutoAttack {size_of_eps(main):g}/255": judged(main),
        "against softmax": lambda run: difference_text(*pairs[run["name"]]) if run["name"] in pairs else "",
        "p, Holm": lambda run: f"{corrections[run['name']]:.2g}" if run["name"] in corrections else "",
        "corruptions": corrupted_with_interval,
        "ECE": calibration,
    }
    widths = [100 * half_width(*both) for both in pairs.values()]
    seen = f"Half-widths of the 95 % intervals of the differences: {min(widths):.1f} to {max(widths):.1f} points."
    return f"{seen}\n\n{table('attention', by_threat(runs, main), columns)}"


def size_of_eps(spec: str) -> float:
    """The eps of `autoattack(eps=0.5/255, …)`, times 255."""
    return float(spec.partition("eps=")[2].partition("/")[0])


def with_softmax(runs: Sequence[Run], run: Run, spec: str) -> tuple[Run, Run] | None:
    """What a run and softmax of its seed did under a threat; nothing for softmax itself."""
    if run["name"].partition("_seed")[0] == "softmax":
        return None
    return run["threats"][spec], of_same_seed(runs, run, "softmax")["threats"][spec]


def holm(values: dict[str, float]) -> dict[str, float]:
    """p values corrected for their number, step down (Holm 1979)."""
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(values, key=lambda name: values[name])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[name]))
        corrected[name] = largest
    return corrected


def difference_text(one: Run, other: Run) -> str:
    """Difference on the same images in points, with its 95 % interval."""
    difference, width = 100 * paired(one, other)[0], 100 * half_width(one, other)
    return f"{difference:+.1f} [{difference - width:+.1f}, {difference + width:+.1f}]"


def half_width(one: Run, other: Run) -> float:
    """Of the 95 % interval of the difference of accuracies on the same images (normal approximation)."""
    steps = answers(one).astype(float) - answers(other)
    return float(1.96 * steps.std(ddof=1) / math.sqrt(len(steps)))


def corrupted_with_interval(run: Run) -> str:
    """Mean accuracy over the corruptions, with the 95 % interval over images; empty where none was asked."""
    corrupted = [answers(threat) for threat in run["threats"].values() if threat["severity"] is not None]
    if not corrupted:
        return ""
    per_image = np.mean(corrupted, axis=0)
    width = 196 * per_image.std(ddof=1) / math.sqrt(len(per_image))
    return f"{100 * per_image.mean():.1f} ± {width:.1f}"


def in_passing(runs: list[Run]) -> dict[str, Column]:
    """Calibration, checks and speed, where a run has any of them."""
    columns: dict[str, Column] = {
        "ECE": calibration,
        "worst case of the checks": worst_twin,
        "images/s, bf16": lambda run: f"{speed(run):,.0f}" if speed(run) else "",
    }
    return {name: column for name, column in columns.items() if any(column(run) for run in runs)}


def structured(runs: list[Run], campaign: str) -> str:
    """Accuracy after every start; each against timm's start with the same seed, on the same images."""
    thirds = [round(len(runs[0]["epochs"]) * share) for share in (1 / 3, 2 / 3)]
    columns = {
        "seed": seed,
        f"epoch {thirds[0]}": lambda run: held_out(run, thirds[0]),
        f"epoch {thirds[1]}": lambda run: held_out(run, thirds[1]),
        **attacked(campaign),
        "against timm (p)": versus(runs, "timm", "clean"),
    }
    return table("start", by_threat(runs, "clean"), columns)


def structured_small(runs: list[Run], campaign: str) -> str:
    """Mean accuracy after every start on few images, its seeds, and what it gains on timm's start seed by seed."""
    by_start: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (run["config"]["data"]["train_num_samples"], run["seed"])):
        by_start.setdefault(run["name"].partition("_seed")[0], []).append(run)
    rows = []
    for name, seeds in by_start.items():
        start, _, images = name.rpartition("_")
        accuracies = [100 * find(run, "clean")["accuracy"] for run in seeds]
        pairs = [(run, of_same_seed(runs, run, f"timm_{images}")) for run in seeds if start != "timm"]
        gains = [100 * paired(find(run, "clean"), find(other, "clean"))[0] for run, other in pairs]
        number = seeds[0]["config"]["data"]["train_num_samples"]
        seed_texts = ", ".join(f"{value:.1f}" for value in accuracies), ", ".join(f"{gain:+.1f}" for gain in gains)
        texts = [f"{number:,}", f"**{statistics.mean(accuracies):.1f}**", *seed_texts, mean_over_seeds(gains)]
        rows.append((-number, -statistics.mean(accuracies), cells(f"`{start}`", *texts)))
    head = cells("start", "images", "test accuracy, mean", "by seed", "against timm, by seed", "mean [95 % over seeds]")
    return "\n".join([head, "|---|" + "---:|" * 5, *(text for *_, text in sorted(rows))])


def mean_over_seeds(values: Sequence[float]) -> str:
    """Mean with Student's 95 % interval over seeds; the mean alone where there is one, nothing where there is none."""
    if len(values) < 2:
        return "".join(f"{value:+.1f}" for value in values)
    mean = statistics.mean(values)
    width = student_t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{mean:+.1f} [{mean - width:+.1f}, {mean + width:+.1f}]"


def one_step(runs: list[Run], campaign: str) -> str:
    """One step against three on CIFAR-10: does held-out accuracy under PGD-10 collapse, and does the alarm ring?"""
    columns = {
        "seed": seed,
        **attacked(campaign),
        "against `pgd3` (p)": versus(runs, "pgd3", "pgd"),
        "held-out PGD-10: highest, last": lambda run: "{:.1f}, {:.1f}".format(*highest_and_last(run)),
        "collapse after epoch": lambda run: numbers(collapses(run["epochs"])),
        "alarm after epoch": lambda run: numbers(rings(run["epochs"])),
        "false alarms": lambda run: str(len(false_alarms(run["epochs"]))),
    }
    drawn = f"![Held-out accuracy under FGSM and PGD-10 after every epoch](../figures/results_{campaign}.png)"
    return f"{drawn}\n\n{table('training', by_threat(runs, 'pgd'), columns)}"


def numbers(epochs: Sequence[int]) -> str:
    """Epochs as a person counts them, from 1, runs of them as `7–20`."""
    spans: list[list[int]] = []
    for epoch in epochs:
        if spans and spans[-1][-1] == epoch - 1:
            spans[-1].append(epoch)
        else:
            spans.append([epoch])
    return ", ".join(f"{span[0] + 1}–{span[-1] + 1}" if len(span) > 1 else str(span[0] + 1) for span in spans) or "–"


def held_out_pgd(epochs: Sequence[Run]) -> list[float]:
    """Held-out accuracy under PGD-10 after every epoch: on the images that choose the weights, else on the alarm's."""
    return [row.get("val_robust_accuracy", row["multi_step_accuracy"]) for row in epochs]


def highest_and_last(run: Run) -> tuple[float, float]:
    values = held_out_pgd(run["epochs"])
    return 100 * max(values), 100 * values[-1]


def collapses(epochs: Sequence[Run]) -> list[int]:
    """Epochs after which held-out accuracy under PGD-10 is at most half of what it was one or two epochs before."""
    values = held_out_pgd(epochs)
    return [now for now in range(1, len(values)) if 2 * values[now] <= max(values[max(0, now - 2) : now])]


def rings(epochs: Sequence[Run]) -> list[int]:
    """Epochs after which the alarm rang."""
    before = [0, *(row.get("alarms", 0) for row in epochs)]
    return [epoch for epoch, (earlier, after) in enumerate(itertools.pairwise(before)) if after > earlier]


def false_alarms(epochs: Sequence[Run]) -> list[int]:
    """Epochs after which the alarm rang though nothing had collapsed by then."""
    first = min(collapses(epochs), default=len(epochs))
    return [epoch for epoch in rings(epochs) if epoch < first]


def imagenette(runs: list[Run], campaign: str) -> str:
    """Clean, PGD and AutoAttack of DeiT-Tiny; each against plain attention with the same seed, on the same images."""
    columns = {
        "seed": seed,
        "clean": judged("evaluation/clean"),
        "against plain (p)": versus(runs, "plain", "evaluation/clean"),
        **attacked(campaign),
        "against plain, attacked (p)": versus(runs, "plain", "autoattack"),
        **in_passing(runs),
    }
    return table("attention", by_threat(runs, "autoattack"), columns)


def released_protocol(runs: list[Run], campaign: str) -> str:
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
    _, mark, number = model.partition("_seed")
    for plain in (f"softmax{mark}{number}", "plain"):
        if plain in found and plain != model:
            return f"{text}, {compare(found[model], found[plain])}"
    return text


def vitcod(runs: list[Run], campaign: str) -> str:
    """Masks and low rank before and after the same fine-tuning; each against chance at the same sparsity."""
    dense = named(runs, "dense")
    columns: dict[str, Column] = {
        "seed": seed,
        "begins with": lambda run: optional(run, "start/"),
        "after fine-tuning": judged("evaluation/clean", at="evaluation"),
        "against random (p)": lambda run: against_random(runs, run),
        "against dense (p)": versus(runs, "dense", "clean", at="evaluation"),
        "inference, of dense": lambda run: ratio(speed(run), speed(dense)),
        "ms an image": lambda run: f"{run['milliseconds']['sparse']:.1f}" if run.get("milliseconds") else "",
        "ms, of dense": lambda run: (
            "{sparse_share:.2f}".format(**run["milliseconds"]) if run.get("milliseconds") else ""
        ),
        "cycles, of dense": cycle_share,
    }
    if not speed(dense):
        del columns["inference, of dense"]
    kept = {name: column for name, column in columns.items() if any(column(run) for run in runs)}
    return table("model", by_threat(runs, "clean", at="evaluation"), kept)


def speedruns(runs: list[Run], campaign: str) -> str:
    """Accuracy on all images, and seconds told three ways."""
    columns = {
        "clean, all images": judged("evaluation/clean"),
        "APGD-CE + APGD-T 8/255, all": lambda run: with_images(run, "apgd/autoattack"),
        "AutoAttack 8/255": lambda run: with_images(run, "autoattack/autoattack"),
        "seconds of the epochs": lambda run: f"{without_compiling(run):.0f}",
        "with compiling": lambda run: f"{run['seconds']['train']:.0f}",
        "with data and held-out images": lambda run: f"{run['seconds'].get('wall_train', math.nan):.0f}",
    }
    return table("run", sorted(runs, key=lambda run: run["name"]), columns)


def attention_digits(runs: list[Run], campaign: str) -> str:
    """Clean and attacked digits of adversarially trained models; each against softmax, on the same images."""
    columns = {
        "seed": seed,
        **attacked(campaign),
        "against softmax (p)": versus(runs, "softmax", "autoattack"),
        "p, Holm": corrected(runs, "softmax"),
        "ECE": calibration,
        "minutes": lambda run: f"{run['seconds']['all'] / 60:.1f}" if run["seconds"].get("all") else "",
    }
    return table("attention", by_threat(runs, "autoattack"), columns)


def corrected(runs: Sequence[Run], name: str) -> Column:
    """p values under attack against the run of this name with the same seed, corrected for their number."""
    values = {}
    for run in runs:
        other = of_same_seed(runs, run, name)
        if other is not run:
            values[run["name"]] = paired(find(run, "autoattack"), find(other, "autoattack"))[1]
    found = holm(values)
    return lambda run: f"{found[run['name']]:.2g}" if run["name"] in found else ""


def light_digits(runs: list[Run], campaign: str) -> str:
    """One step, many steps and three stages of AutoAttack; each against the light recipe at its eps, and the alarm."""

    def is_constant(run: Run) -> bool:
        """Whether no attack changes anything: clean images are as often right as attacked ones."""
        return bool(find(run, "evaluation/clean")["accuracy"] == find(run, "autoattack")["accuracy"])

    def against_light(run: Run) -> str:
        """Nothing for a model that gives one answer to all images, which no attack can change."""
        name = "eps01_light" if run["name"].startswith("eps01_") else "light"
        return "learned nothing" if is_constant(run) else versus(runs, name, "autoattack")(run)

    columns = {
        "seed": seed,
        "ε": lambda run: str(run["config"]["task"]["eps"]),
        **attacked(campaign),
        "against `light` (p)": against_light,
        "alarms, ε growing": lambda run: alarms(run, at_full_eps=False),
        "alarms, ε full": lambda run: alarms(run, at_full_eps=True),
    }
    return table("recipe", sorted(by_threat(runs, "autoattack"), key=is_constant), columns)


def alarms(run: Run, *, at_full_eps: bool) -> str:
    """After how many epochs the alarm for catastrophic overfitting rang, of those while eps grew or of the others."""
    full = 0.999 * run["config"]["task"]["eps"]
    asked = {epoch for epoch, row in enumerate(run["epochs"]) if (row["train_eps"] >= full) == at_full_eps}
    return f"{len(asked.intersection(rings(run['epochs'])))} of {len(asked)}" if asked else ""


def together_digits(runs: list[Run], campaign: str) -> str:
    """Clean and attacked digits of everything at once and alone; each against softmax from scratch and fine-tuned."""
    others = [run for run in load("attention_digits") if run["name"].startswith(("softmax", "rpc_all_n2_released"))]
    known = [*runs, *(run for run in others if run["seed"] < 2)]
    against_dense = versus(known, "dense", "autoattack")
    columns = {
        "seed": seed,
        **attacked("attention_digits"),
        "against `softmax` (p)": versus(known, "softmax", "autoattack"),
        "p, Holm": corrected(known, "softmax"),
        "against `dense` (p)": lambda run: against_dense(run) if run["config"]["model"]["weights"] else "",
        "ECE": calibration,
    }
    return table("model", by_threat(known, "autoattack"), columns)


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


def kpca(runs: list[Run], campaign: str) -> str:
    """What a study of kernel PCA found of every model, beside chance of three kinds."""
    head = ("model", "statistic", "mean over heads", "lowest, highest head", "chance: gaussian", "spectrum", "permuted")
    lines = [cells(*head, "heads beyond chance"), "|---|---|" + "---:|" * 6]
    for row in (row for run in runs for row in run["rows"]):
        if (words := KPCA.get((row["analysis"], row["statistic"]))) is None:
            continue
        chance = [short(row[f"chance_{null}"]) for null in ("gaussian", "spectrum", "permuted")]
        beyond = f"{row['heads_beyond_chance']} of {row['heads_judged']}{sides(row)}"
        spread = f"{short(row['min'])}, {short(row['max'])}"
        lines.append(cells(f"`{row['model']}`", words, f"**{short(row['mean'])}**", spread, *chance, beyond))
    return "\n".join(lines)


def sides(row: Run) -> str:
    """How many heads lie above every null, and how many below, where the signs of heads were kept."""
    heads = list(zip(*row.get("signs", {}).values(), strict=True))
    above, below = (sum(set(head) == {sign} for head in heads) for sign in "+-")
    return f" ({above} above, {below} below)" if heads else ""


def kpca_draws(runs: list[Run], campaign: str) -> str:
    """The trained model beside several random draws of its weights: is a head beyond chance, and beyond the draws?"""
    rows = [row for run in runs for row in run["rows"] if (row["analysis"], row["statistic"]) in KPCA]
    head = (
        "statistic",
        "trained",
        "heads beyond chance",
        "random draws, lowest to highest",
        "heads beyond chance, each",
    )
    lines = [cells(*head), "|---|" + "---:|" * 4]
    for key, words in KPCA.items():
        own = [row for row in rows if (row["analysis"], row["statistic"]) == key]
        drawn = sorted((row for row in own if "random" in row["model"]), key=lambda row: row["mean"])
        trained = next((row for row in own if "random" not in row["model"]), None)
        if drawn and trained:
            spread = f"{short(drawn[0]['mean'])} to {short(drawn[-1]['mean'])} ({len(drawn)})"
            beyond = f"{trained['heads_beyond_chance']} of {trained['heads_judged']}{sides(trained)}"
            each = ", ".join(str(row["heads_beyond_chance"]) for row in drawn)
            lines.append(cells(words, f"**{short(trained['mean'])}**", beyond, spread, each))
    return "\n".join(lines)


def short(value: float | None) -> str:
    """Two digits, or three where the number is large."""
    if value is None:
        return ""
    if abs(value) >= 10:
        return f"{value:.3g}"
    return f"{value:.2g}"


def table(first: str, runs: Sequence[Run], columns: Mapping[str, Column]) -> str:
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
    """The accuracy under a threat that only some runs meet."""
    return percent(find(run, spec)) if any(spec in known for known in run["threats"]) else ""


def with_images(run: Run, spec: str) -> str:
    """The cell of a threat that only some runs meet, with its interval and number of images."""
    if not optional(run, spec):
        return ""
    threat = find(run, spec)
    return f"{with_interval(threat)}, {threat['n']:,} images"


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
    name, mark, number = run["name"].partition("_seed")
    _, _, removed = name.rpartition("_")
    chance = f"random_{removed}{mark}{number}" if removed.isdigit() else f"random{mark}{number}"
    if name == "dense" or chance not in {other["name"] for other in runs}:
        return ""
    return against(run, named(runs, chance), "clean", at="evaluation")


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


SHOWN: dict[str, dict[str, str]] = {  # heading → the words by which a threat is found; rows are ordered by the last
    "attention_natural": {
        "clean": "evaluation/clean",
        "PGD-20 0.5/255": "pgd 0.5/255",
        "PGD-20 1/255": "pgd (eps=1/255",
        "AutoAttack 1/255": "autoattack",
    },
    "attention_pgd": {"clean": "evaluation/clean", "PGD-20 8/255": "pgd", "AutoAttack 8/255": "autoattack"},
    "attention_digits": {
        "clean": "evaluation/clean",
        "PGD-20 0.1": "pgd",
        "APGD-CE, APGD-T, Square 0.1": "autoattack",
    },
    "imagenette": {
        "PGD-20 0.25/255": "pgd 0.25/255",
        "PGD-20 1/255": "pgd (eps=1/255",
        "AutoAttack 0.5/255": "autoattack",
    },
    "light": {
        "clean": "evaluation/clean",
        "FGSM": "fgsm",
        "AutoAttack 8/255": "autoattack/autoattack",
        "PGD-20 8/255": "pgd steps=20",
    },
    "light_compact": {"clean": "evaluation/clean", "FGSM": "fgsm", "PGD-20 8/255": "pgd"},
    "light_digits": {
        "clean": "evaluation/clean",
        "FGSM": "fgsm",
        "PGD-20": "pgd steps=20",
        "APGD-CE, APGD-T, Square": "autoattack",
    },
    **{name: {"test accuracy": "clean"} for name in ("structured", "structured_p2", "structured_small")},
}
TABLES: dict[str, Callable[[list[Run], str], str]] = {
    "attention_natural": attention,
    "attention_pgd": attention_compact,
    "attention_cifar_compact": attention_compact,
    "attention_cifar_compact_natural": attention_compact,
    "structured": structured,
    "structured_p2": structured,
    "structured_small": structured_small,
    "light": one_step,
    "light_compact": one_step,
    "imagenette": imagenette,
    "imagenette_released_protocol": released_protocol,
    "digits_released_protocol": released_protocol,
    "photographs_released_protocol": released_protocol,
    "vitcod": vitcod,
    "vitcod_pretrained": vitcod,
    "vitcod_pretrained_90": vitcod,
    "speedruns": speedruns,
    "attention_digits": attention_digits,
    "light_digits": light_digits,
    "together_digits": together_digits,
    "kpca_pretrained": kpca,
    "kpca_random": kpca,
    "kpca_digits": kpca,
    "kpca_draws": kpca_draws,
}
STUDIES = {name for name, made in TABLES.items() if made in (released_protocol, kpca, kpca_draws)}
