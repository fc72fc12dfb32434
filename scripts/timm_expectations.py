"""What timm's own tests ask of a model, asked of a small model of every family, bare and rewired.

    python scripts/timm_expectations.py            (minutes; writes docs/timm_expectations.md)

The questions are those of timm's test suite: forward, backward with a gradient for every parameter, intermediates,
features and head, default configuration, tracing by FX (forward, and backward with a gradient for every parameter).
`torch.jit.trace` is asked too.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers import create_feature_extractor, get_graph_node_names
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from families import FAMILIES, Family
from vitruvius.surgery import rewire

PAGE = Path(__file__).parent.parent / "docs" / "timm_expectations.md"
CLASSES = 10


def forward(model: nn.Module, x: Tensor) -> None:
    """One row of finite logits per image."""
    with torch.no_grad():
        logits = model(x)
    assert logits.shape == (len(x), CLASSES)
    assert logits.isfinite().all()


def backward(model: nn.Module, x: Tensor) -> None:
    """Every parameter gets a gradient, and all of it is finite."""
    model.train()
    _check_gradients(model, model(x))


def intermediates(model: Any, x: Tensor) -> None:
    """`forward_intermediates` gives features of every index, and the last of them agrees with `forward_features`."""
    if not hasattr(model, "forward_intermediates"):
        raise NotImplementedError
    with torch.no_grad():
        last, found = model.forward_intermediates(x)
        assert len(found) > 0
        assert all(feature.isfinite().all() for feature in found)
        expected = model.forward_features(x)
    for ours, theirs in zip(_listed(last), _listed(expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def features(model: Any, x: Tensor) -> None:
    """Features through the head are the logits; without a classifier, features of the width the model names."""
    with torch.no_grad():
        torch.testing.assert_close(model.forward_head(model.forward_features(x)), model(x), atol=1e-5, rtol=1e-5)
        model.reset_classifier(0)
        pooled = model(x)
    assert pooled.ndim == 2
    assert pooled.shape[1] == model.num_features


def default_cfg(model: Any, _: Tensor) -> None:
    """What the configuration calls classifier and first convolution are weights of the model."""
    keys = model.state_dict().keys()
    config = model.pretrained_cfg
    for field in ("classifier", "first_conv"):
        for name in _listed(config.get(field) or ()):
            assert f"{name}.weight" in keys, name
    assert "num_classes" in config
    assert model.num_classes == CLASSES


def fx_forward(model: nn.Module, x: Tensor) -> None:
    """The traced model says what the model says."""
    with torch.no_grad():
        expected = model(x)
        torch.testing.assert_close(_traced(model)(x), expected, atol=1e-5, rtol=1e-5)


def fx_backward(model: nn.Module, x: Tensor) -> None:
    """The traced model gives every parameter a gradient."""
    model.train()
    _check_gradients(model, _traced(model)(x))


def torch_script_trace(model: nn.Module, x: Tensor) -> None:
    """`torch.jit.trace` records the model, and the record says what the model says."""
    with torch.no_grad():
        torch.testing.assert_close(torch.jit.trace(model, x)(x), model(x), atol=1e-4, rtol=1e-4)


QUESTIONS: dict[str, Callable[[Any, Tensor], None]] = {
    "forward": forward,
    "backward": backward,
    "intermediates": intermediates,
    "features": features,
    "default cfg": default_cfg,
    "FX": fx_forward,
    "FX backward": fx_backward,
    "jit.trace": torch_script_trace,
}
PARTS = (None, "softmax")  # bare, rewired


def ask(question: Callable[[Any, Tensor], None], family: Family, part: str | None) -> str:
    """yes, no, or – where upstream has no such thing."""
    model, x = family.randomised()
    if part is not None:
        rewire(model, part, input_size=family.input_size)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            question(model, x)
    except NotImplementedError:
        return "–"
    except Exception:
        return "no"
    return "yes"


def rows(families: list[Family]) -> list[str]:
    """One line of the table per family: one answer where all models agree, else one for each."""
    lines = []
    for family in families:
        cells = []
        for question in QUESTIONS.values():
            answers = [ask(question, family, part) for part in PARTS]
            if len(set(answers)) == 1:
                cells.append(answers[0])
            else:
                cells.append(" / ".join(answers))
        print(family.name, *cells, sep=" | ", flush=True)
        lines.append(f"| {family.name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    names = " | ".join(QUESTIONS)
    head = [f"| family | {names} |", "|---|" + "---|" * len(QUESTIONS)]
    PAGE.write_text(text("\n".join([*head, *rows(FAMILIES)])), encoding="utf-8")
    print(PAGE)


def text(table: str) -> str:
    return f"""# What timm expects of a model

<!-- Written by scripts/timm_expectations.py; do not edit by hand. -->

timm's test suite asks the same of every model: a forward pass, a backward pass with a gradient for every parameter,
intermediate features, features and head apart, a configuration that names its layers, tracing by FX. Here a small
model of every family is asked, all its numbers randomised: bare, as timm builds it, and rewired with a softmax core.
One answer stands for both; where they differ, the bare model's comes first. A dash: upstream has no such thing.
timm {timm.__version__}, torch {torch.__version__.split("+")[0]}, CPU.

{table}

* **FX**: a core is one node of the graph (`timm.layers.register_notrace_module`), so `create_feature_extractor` and
  `features_only` by graph work on rewired models; plain `torch.fx.symbolic_trace` does not know timm's leaves.
* **TorchScript**: `torch.jit.trace` records rewired models; `torch.jit.script` does not compile them, since cores take
  a named tuple and choose kernels at run time. PyTorch has deprecated TorchScript; `torch.compile` and `torch.export`
  take rewired models as one graph.
"""


def _traced(model: nn.Module) -> Callable[[Tensor], Tensor]:
    nodes, _ = get_graph_node_names(model)
    last = nodes[-1]
    extractor = create_feature_extractor(model, [last])

    def run(x: Tensor) -> Tensor:
        found: Tensor = extractor(x)[last]
        return found

    return run


def _check_gradients(model: nn.Module, logits: Tensor) -> None:
    logits.square().mean().backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing, missing
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    return [value]


if __name__ == "__main__":
    main()
