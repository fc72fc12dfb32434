"""The demo, made tiny: two runs, judged under growing attacks and corruptions, and one page that needs no network."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from small_run import SMALL
from vitruvius import demo as demo_module
from vitruvius.cli import main
from vitruvius.corruptions.base import BENCHMARK


def test_the_demo_ends_with_one_page_about_both_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vitruvius")
    monkeypatch.setattr(demo_module, "STRENGTHS", [4, 32])
    monkeypatch.setattr(demo_module, "SEVERITIES", [2, 5])
    tiny = (*SMALL, "train.epochs=1", "data.train_num_samples=32", "data.val_num_samples=12")
    page = demo_module.demo(tmp_path / "demo", overrides=tiny)
    assert page == tmp_path / "demo" / "report.html"
    text = page.read_text()
    assert "Two ways to attend, on digits" in text
    assert "<svg" in text
    assert "Heat map of accuracy by corruption and severity, rpc." in text
    assert "held-out" in text
    assert not re.search(r"""(src|href)=["']https?://""", text)
    for name in ("softmax", "rpc"):
        report = json.loads((tmp_path / "demo" / name / "evaluation" / "report.json").read_text())
        specs = [threat["spec"] for threat in report["threats"]]
        assert specs[:3] == ["clean", "pgd(eps=4/255)", "pgd(eps=32/255)"]
        assert specs[3:] == [f"{one}(severity={severity})" for one in BENCHMARK for severity in (2, 5)]
        shift = json.loads(
            (tmp_path / "demo" / name / "evaluation" / "shifts" / "corruptions" / "report.json").read_text()
        )
        assert len(shift["parts"]) == 30
        assert set(shift["reliability"]) == {"clean", "shifted"}
        assert name in caplog.text
    assert "Open this page in a browser" in caplog.text
    before = (tmp_path / "demo" / "softmax" / "state.pt").stat().st_mtime_ns
    assert demo_module.demo(tmp_path / "demo", overrides=tiny) == page
    assert (tmp_path / "demo" / "softmax" / "state.pt").stat().st_mtime_ns == before  # nothing is trained twice


def test_the_verb_looks_at_a_robust_vit_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_module, "demo", lambda out: out / "report.html")
    main(["demo", "--out", str(tmp_path)])
    page = (tmp_path / "look.html").read_text()
    assert "pgd(eps=8/255, steps=20)" in page
    assert capsys.readouterr().out.splitlines()[-2:] == [str(tmp_path / "look.html"), str(tmp_path / "report.html")]
