"""The figure of `attention.py`: time per image over the number of tokens, forward and with the backward pass.

python -m benchmarks attention_figure RESULTS.json FIGURE.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

STYLES = {
    "released formula, dense": ("#999999", "released code, dense"),
    "SDPA eager": ("#cc8844", "on SDPA, eager"),
    "SDPA compiled": ("#4477aa", "on SDPA, compiled"),
    "fused": ("#bb2233", "fused kernels"),
    "plain SDPA (no pursuit)": ("#111111", "plain attention"),
}


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for name, group in results.items() if name.split()[0] in ("rpc", "tokens") for row in group]
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), sharey=True, layout="constrained")
    for axis, clock, title in zip(axes, ("forward", "both"), ("forward", "forward + backward"), strict=True):
        for what, (colour, label) in STYLES.items():
            points = sorted((row["tokens"], row[clock][1] / row["batch"]) for row in rows if row["what"] == what)
            style = "--" if what.startswith("plain") else "-"
            axis.plot(*zip(*points, strict=True), style, color=colour, label=label, marker="o", markersize=3)
        axis.set(xscale="log", yscale="log", xlabel="tokens", title=title)
        axis.set_xticks(sorted({row["tokens"] for row in rows}), labels=sorted({row["tokens"] for row in rows}))
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("GPU time per image (ms), 3 heads")
    axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
