"""Names for threats: short where one is enough, with ε where an attack appears more than once."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from vitruvius.report._numbers import pixels
from vitruvius.report._runs import Run, Threat


def label_threats(runs: Sequence[Run]) -> dict[str, str]:
    """spec → label of every threat of the runs, in order of appearance; labels differ from each other."""
    threats = {threat.spec: threat for run in runs for threat in run.threats}
    labels = {spec: _label(threat) for spec, threat in threats.items()}
    alike = Counter(labels.values())
    return {spec: label if alike[label] == 1 else spec for spec, label in labels.items()}


def family(threat: Threat) -> str:
    """What an attack is besides its strength: its spec without ε and without the step size that follows from it."""
    head, _, settings = threat.spec.partition("(")
    kept = [one for one in settings.removesuffix(")").split(", ") if not re.match(r"(eps|step_size)=", one)]
    return f"{head}({', '.join(kept)})" if any(kept) else head


def _label(threat: Threat) -> str:
    name = threat.name.partition("(")[0]
    return name if threat.eps is None else f"{name} ε = {pixels(threat.eps)}"
