import torch

from small_run import small_config, small_run
from vitruvius._files import load_tensors
from vitruvius._processes import Process
from vitruvius.models import load_model
from vitruvius.surgery import calibrating
from vitruvius.surgery.base import inner
from vitruvius.training.config import EvaluationPlan
from vitruvius.training.judging import keep_start
from vitruvius.training.session import open_session

PARTS = "attention=[{where: '*', parts: [{use: low_rank, rank: 2, start: START}]}]"


def test_a_calibrated_start_gives_the_dense_maps_and_resuming_does_not_calibrate_again(tmp_path, monkeypatch):
    dense = small_run(tmp_path / "dense")
    wanted = load_model(dense).eval()
    gaps = {}
    for start in ("svd", "calibrated"):
        config = small_config(tmp_path / start, f"model.weights={dense}", PARTS.replace("START", start))
        session = open_session(config, Process(device=torch.device("cpu")))
        x, _ = next(iter(session.train_loader))
        gaps[start] = (session.model.eval()(x) - wanted(x)).norm()
    assert gaps["calibrated"] < gaps["svd"] / 2
    overrides = f"model.weights={dense}", PARTS.replace("START", "calibrated")
    config, fitted = small_config(tmp_path / "judged", *overrides), []
    calibrate = calibrating.calibrate_low_rank
    with monkeypatch.context() as patch:
        patch.setattr("vitruvius.training.session.calibrate_low_rank", lambda *a: (fitted.append(1), calibrate(*a))[1])
        keep_start(config, [EvaluationPlan(threats=(), start=True)], Process(device=torch.device("cpu")))
        session = open_session(config, Process(device=torch.device("cpu")))
    assert len(fitted) == 1  # a start that was judged is the one that is trained
    kept = load_tensors(tmp_path / "judged" / "start" / "best.safetensors")[0]
    assert all(torch.equal(value, kept[name]) for name, value in session.weights().items())
    run = small_run(tmp_path / "run", *overrides)
    monkeypatch.setattr("vitruvius.training.session.calibrate_low_rank", lambda *_, **__: 1 / 0)
    again = small_run(run, *overrides)
    assert "blocks.0.attn.core.low_rank.q.0.weight" in inner(load_model(again)).state_dict()
