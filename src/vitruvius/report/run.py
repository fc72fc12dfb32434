"""A run folder as the page sees it: what is there is read, what is missing or damaged is remarked; and how it is named.

config.yaml is required; metrics.jsonl, evaluation/report.json, evaluation/shifts, model.json, maps.safetensors and the
examples of attention are not. H heads, N queries, M keys.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from vitruvius._errors import CheckpointError, ConfigError, DataError, RunError
from vitruvius._files import load_tensors
from vitruvius._files import read_json as read_object
from vitruvius._format import format_number, interval, natural_key, number
from vitruvius._secrets import redact
from vitruvius._style import Series, series
from vitruvius._yaml import read_yaml
from vitruvius.analysis.recording import TEXTS, Examples, SiteMaps
from vitruvius.attention import attentions
from vitruvius.evaluation.shift_report import ShiftReport, load_shift_report


@dataclass(frozen=True, kw_only=True)
class Threat:
    """Accuracy under one threat, with its 95 % interval where the evaluation gave one."""

    name: str
    spec: str
    eps: float | None
    accuracy: float
    low: float | None
    high: float | None
    n: int | None
    top5: float | None
    loss: float | None
    seconds: float | None
    doubts: tuple[str, ...] = ()  # open findings: the figure is shown with them

    @property
    def detail(self) -> str:
        """What stands beside the accuracy: its interval, and why it is doubtful."""
        doubtful = f"doubtful: {', '.join(self.doubts)}" if self.doubts else ""
        return "; ".join(filter(None, [interval(self.low, self.high), doubtful]))

    @property
    def label(self) -> str:
        """Its name without settings, and ε where it has one."""
        name = self.name.partition("(")[0]
        return name if self.eps is None else f"{name} ε = {format_number(self.eps)}"

    @property
    def family(self) -> str:
        """What an attack is besides its strength: its spec without ε and without the step size that follows from it."""
        head, _, settings = self.spec.partition("(")
        kept = [each for each in settings.removesuffix(")").split(", ") if not re.match(r"(eps|step_size)=", each)]
        return f"{head}({', '.join(kept)})" if any(kept) else head


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, read whole."""

    name: str
    folder: Path
    index: int  # its place on the page, and so its colour
    config: dict[str, Any]
    epochs: list[dict[str, Any]]
    evaluation: dict[str, Any]
    threats: list[Threat]
    worst_case: Threat | None
    model: dict[str, Any]  # model.json: parameters, sites
    weights: dict[str, int]  # numbers stored per part of the checkpoint
    maps: dict[str, np.ndarray]  # site → (H, N, M)
    examples: Examples | None
    remarks: list[str]
    shifts: dict[str, ShiftReport] = field(default_factory=dict)  # by name

    @property
    def look(self) -> Series:
        return series(self.index)

    @property
    def model_name(self) -> str:
        """As the recipe names it; empty where it does not."""
        return str((self.config.get("model") or {}).get("name") or "")

    @property
    def attention_rules(self) -> list[tuple[str, str]]:
        """(where, chain of parts) of every rule of the recipe."""
        chains = [(rule, " → ".join(map(_describe_part, rule.get("parts") or []))) for rule in self._rules()]
        return [(str(rule.get("where", "*")), chain or "softmax") for rule, chain in chains]

    @property
    def attention(self) -> str:
        """The chains of parts a recipe plugs in, each once; a recipe without any has upstream's attention."""
        return "; ".join(dict.fromkeys(chain for _, chain in self.attention_rules)) or "as upstream"

    @property
    def parts(self) -> list[str]:
        """The registered parts of the rules, in order, plain softmax apart."""
        parts = [part for rule in self._rules() for part in rule.get("parts") or []]
        names = [str(p.get("use", "")) if isinstance(p, dict) else str(p).partition(":")[0] for p in parts]
        return [name for name in names if name != "softmax" and name in attentions]

    def _rules(self) -> list[dict[str, Any]]:
        rules = self.config.get("attention")
        return [rule for rule in rules if isinstance(rule, dict)] if isinstance(rules, list) else []

    @property
    def clean(self) -> Threat | None:
        """Accuracy without an attack."""
        return next((threat for threat in self.threats if threat.name == "clean"), None)

    def under(self, spec: str) -> Threat | None:
        """Accuracy under the threat of that description."""
        return next((threat for threat in self.threats if threat.spec == spec), None)

    def logged(self, key: str) -> list[float]:
        """The finite values of a metric over the epochs."""
        return [value for row in self.epochs if (value := number(row.get(key))) is not None]


def _describe_part(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    settings = ", ".join(f"{key}={value}" for key, value in part.items() if key != "use" and value is not None)
    name = str(part.get("use", "?"))
    return f"{name}({settings})" if settings else name


def label_threats(runs: Sequence[Run]) -> dict[str, str]:
    """spec → label of every threat of the runs, in order of appearance; labels differ from each other."""
    labels = {threat.spec: threat.label for run in runs for threat in run.threats}
    times = Counter(labels.values())
    return {spec: label if times[label] == 1 else spec for spec, label in labels.items()}


def shift_names(runs: Sequence[Run]) -> list[str]:
    """Names of all shifts of the runs, in order of appearance."""
    return list(dict.fromkeys(name for run in runs for name in run.shifts))


def explain_maps(runs: Sequence[Run]) -> str:
    """A sentence for a page that shows maps: what the map of each part is; softmax's says itself."""
    names = dict.fromkeys(name for run in runs for name in run.parts)
    told = [f"of {name} {text}" for name in names if (text := getattr(attentions[name], "map_text", ""))]
    return f"Maps are the weights that the model really gives to its values: {'; '.join(told)}." if told else ""


def explain_doubts(runs: Sequence[Run]) -> str:
    """A sentence for a caption: which figures are doubtful, and why; nothing if none is."""
    doubtful = [(run.name, threat) for run in runs for threat in run.threats if threat.doubts]
    told = [f"{name} under {threat.name} ({', '.join(threat.doubts)})" for name, threat in doubtful]
    return f" Doubtful, see the remarks: {'; '.join(told)}." if told else ""


def check_runs(folders: Sequence[Path]) -> None:
    """Refuse what is not a run folder, before anything is read or written."""
    if not folders:
        raise RunError("a report needs at least one run folder; none was given.")
    for folder in folders:
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise RunError(
                f"{folder} {what}; a report needs run folders, as `vitruvius train` and `evaluate` write them."
            )
        if not (folder / "config.yaml").is_file():
            inside = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
            raise RunError(f"{folder} is not a run folder: it has no config.yaml. It holds: {inside}.")


def read_runs(folders: Sequence[Path], evaluations: Mapping[Path, Path] | None = None) -> list[Run]:
    """Read every run; all must be run folders. `evaluations` that lie elsewhere than in a run, by its folder."""
    check_runs(folders)
    names = zip(folders, _names(folders), strict=True)
    folders_of = evaluations or {}
    return [read_run(folder, name, index, folders_of.get(folder)) for index, (folder, name) in enumerate(names)]


def _names(folders: Sequence[Path]) -> list[str]:
    """Folder names; with parents where two are alike, with a number where even those are."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" for path in paths]
    times: Counter[str] = Counter()
    for place, name in enumerate(names):
        times[name] += 1
        if times[name] > 1:
            names[place] = f"{name} ({times[name]})"
    return names


def read_run(folder: Path, name: str, index: int, judged: Path | None = None) -> Run:
    """Read one folder, and the evaluation in `judged`; `remarks` tells what was left out and why."""
    remarks: list[str] = []
    if judged is None:  # by `evaluate MODEL --out FOLDER` it lies in the folder itself
        judged = folder if (folder / "report.json").is_file() else folder / "evaluation"
    evaluation = read_json(judged / "report.json", remarks, lost="the comparison of threats")
    worst = evaluation.get("worst_case")
    noted = evaluation.get("remarks")
    remarks += [f"evaluation: {remark}" for remark in noted] if isinstance(noted, list) else []
    return Run(
        name=name,
        folder=folder,
        index=index,
        config=_read_config(folder / "config.yaml"),
        epochs=_read_epochs(folder / "metrics.jsonl", remarks),
        evaluation=evaluation,
        threats=_read_threats(evaluation.get("threats"), remarks),
        worst_case=_read_threat({"name": "worst case", **worst}) if isinstance(worst, dict) else None,
        model=read_json(folder / "model.json", remarks, lost="the table of attention sites"),
        weights=_read_weight_counts(folder, remarks),
        maps=_read_maps(folder / "maps.safetensors", remarks),
        examples=read_examples(folder, remarks),
        remarks=remarks,
        shifts=_read_shifts(judged / "shifts", remarks),
    )


def _read_config(path: Path) -> dict[str, Any]:
    """The resolved recipe, with secrets hidden; a run without a readable one is an error."""
    try:
        return redact(read_yaml(path))
    except ConfigError as error:
        raise RunError(f"{_one_line(error)} A run folder needs its resolved recipe.") from error


def read_json(path: Path, remarks: list[str], *, lost: str) -> dict[str, Any]:
    """A JSON table, or an empty one and a remark that says what the page loses."""
    name = f"evaluation/{path.name}" if path.parent.name == "evaluation" else path.name
    if not path.is_file():
        remarks.append(f"no {name}: {lost} is left out.")
        return {}
    try:
        return read_object(path)
    except RunError as error:
        remarks.append(f"{_one_line(error).replace(str(path), name)} Meanwhile {lost} is left out.")
        return {}


def _read_epochs(path: Path, remarks: list[str]) -> list[dict[str, Any]]:
    """One row an epoch, in order; of an epoch written twice (a resumed run) the later row counts."""
    if not path.is_file():
        remarks.append("no metrics.jsonl: the training curves are left out.")
        return []
    lines = path.read_text("utf-8", errors="replace").splitlines()
    rows: dict[float, dict[str, Any]] = {}
    broken: dict[str, list[str]] = {}  # metrics that are NaN or infinite somewhere → epochs
    for place, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and number(row.get("epoch")) is not None:
            rows[row["epoch"]] = row
        elif line.strip():
            fault = "is cut off" if place == len(lines) else "is not a row with an epoch"
            remarks.append(f"metrics.jsonl: line {place} {fault}; it is ignored.")
    epochs = [rows[epoch] for epoch in sorted(rows)]
    for row in epochs:
        for key, value in row.items():
            if isinstance(value, float) and number(value) is None:
                broken.setdefault(key, []).append(f"{row['epoch'] + 1:g}")
    remarks += [
        f"metrics.jsonl: {key} is not a finite number in {len(at)} of {len(epochs)} epochs (first: {at[0]}); "
        "the curve has gaps there."
        for key, at in broken.items()
    ]
    return epochs


def _read_threats(entries: Any, remarks: list[str]) -> list[Threat]:
    """Attacks; corruptions have a severity, and a report of their own among the shifts."""
    threats: list[Threat] = []
    for entry in entries if isinstance(entries, list) else []:
        fields = entry if isinstance(entry, dict) else {"name": repr(entry)}
        if fields.get("severity") is not None:
            continue
        if (threat := _read_threat(fields)) is not None:
            threats.append(threat)
        else:
            name = fields.get("name", "without a name")
            remarks.append(f"evaluation/report.json: threat {name} has no finite accuracy; it is left out.")
    return threats


def _read_threat(entry: dict[str, Any]) -> Threat | None:
    accuracy = number(entry.get("accuracy"))
    if accuracy is None:
        return None
    n = number(entry.get("n"))
    name = str(entry.get("name", entry.get("spec", "threat")))
    doubts = entry.get("doubts")
    return Threat(
        name=name,
        spec=str(entry.get("spec", name)),
        accuracy=accuracy,
        n=None if n is None else int(n),
        doubts=tuple(map(str, doubts)) if isinstance(doubts, list) else (),
        **{key: number(entry.get(key)) for key in ("eps", "low", "high", "top5", "loss", "seconds")},
    )


def _read_weight_counts(folder: Path, remarks: list[str]) -> dict[str, int]:
    """How many numbers the checkpoint stores, masks not counted: `model`, and for each part of a core `core.<part>`."""
    path = next((folder / name for name in ("best.safetensors", "last.safetensors") if (folder / name).is_file()), None)
    if path is None:
        return {}
    counts: Counter[str] = Counter()
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                _, core, part = name.partition(".core.")
                tensor = file.get_slice(name)
                size = 0 if tensor.get_dtype() == "BOOL" else int(np.prod(tensor.get_shape(), dtype=np.int64))
                counts[f"core.{part.split('.')[0]}" if core else "model"] += size
    except (SafetensorError, OSError) as error:
        remarks.append(f"{path.name} cannot be read ({_one_line(error)}): its parameters are not counted.")
        return {}
    return dict(counts)


def _read_shifts(folder: Path, remarks: list[str]) -> dict[str, ShiftReport]:
    """Every readable report; those that cannot be read, and what they name as missing, are remarked."""
    reports: dict[str, ShiftReport] = {}
    for file in sorted(folder.glob("*/report.json")):
        try:
            report = load_shift_report(file)
        except (DataError, RunError) as error:
            remarks.append(f"{_one_line(error).replace(str(folder), 'evaluation/shifts')} It is left out.")
            continue
        reports[report.name] = report
        remarks += [f"{report.name}: {remark}" for remark in report.remarks]
        if report.missing:
            remarks.append(f"{report.name}: not there: {', '.join(report.missing)}.")
    return reports


def _read_maps(path: Path, remarks: list[str]) -> dict[str, np.ndarray]:
    """Average attention maps, (H, N, M) for each site, in reading order of their names."""
    if not path.is_file():
        remarks.append("no maps.safetensors: the average attention maps are left out.")
        return {}
    maps = {}
    for site, tensor in _read_tensors(path, remarks, lost="the average attention maps are left out").items():
        if tensor.ndim != 3 or 0 in tensor.shape or not np.isfinite(tensor).all():
            remarks.append(f"maps.safetensors: {site} is not a finite map of shape (heads, queries, keys); left out.")
        else:
            maps[site] = tensor.astype(np.float32)
    return maps


def _read_tensors(path: Path, remarks: list[str], *, lost: str) -> dict[str, np.ndarray]:
    """All tensors of a file in reading order of their names, or none and a remark."""
    try:
        tensors, _ = load_tensors(path)
    except CheckpointError as error:
        remarks.append(f"{_one_line(error).replace(str(path), path.name)} So {lost}.")
        return {}
    arrays = {name: (each.float() if each.dtype == torch.bfloat16 else each).numpy() for name, each in tensors.items()}
    return {name: arrays[name] for name in sorted(arrays, key=natural_key)}


def read_examples(run: Path, remarks: list[str]) -> Examples | None:
    """The examples of a run, as `record_examples` wrote them, or None and a remark."""
    path = run / "attention.safetensors"
    if not path.is_file():
        remarks.append("no attention.safetensors: the attention viewer is left out; `report` says why it made none.")
        return None
    facts = read_json(run / "attention.json", remarks, lost="the attention viewer")
    tensors = _read_tensors(path, remarks, lost="the attention viewer is left out")
    images, relevance = tensors.pop("images", None), tensors.pop("relevance", None)
    if not facts or images is None:
        return None
    n = len(images)
    sites = [_place(name, facts, maps, n, remarks) for name, maps in tensors.items()]
    if not any(sites):
        return None
    texts: dict[str, list[str]] = {}
    for name in TEXTS:  # one per image, empty where there is none
        values = facts.get(name)
        texts[name] = [*(map(str, values) if isinstance(values, list) else ()), *[""] * n][:n]
    if not any(texts["pictures"]):
        texts["pictures"] = [str(place) for place in range(n)]
    return Examples(images=images, sites=[site for site in sites if site], relevance=relevance, **texts)


def _place(name: str, facts: dict[str, Any], maps: np.ndarray, n: int, remarks: list[str]) -> SiteMaps | None:
    """Lay the maps of one site on its grid; maps that do not fit are left out with a remark."""
    facts = {**facts, **facts["sites"].get(name, {})}
    (rows, columns), prefix = facts["grid"], facts["num_prefix_tokens"]
    tokens = prefix + rows * columns
    fits = maps.ndim == 4 and maps.shape[0] == n and maps.shape[2:] == (tokens, tokens)
    if not fits or not np.isfinite(maps).all():
        remarks.append(
            f"attention.safetensors: {name} has shape {maps.shape}, not {n} images, heads and finite maps of "
            f"{tokens} × {tokens} tokens; it is left out of the viewer."
        )
        return None
    return SiteMaps(name=name, maps=maps, grid=(rows, columns), num_prefix_tokens=prefix)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
