"""The callback of training, its file, and the curves that the reproduction study ships."""

import json

import pytest
import torch

import vitruvius
from vitruvius._errors import ConfigError, DataError
from vitruvius.analysis import analyse
from vitruvius.analysis.callback import AnalysisCallback, first_images, read_rows
from vitruvius.analysis.shipped import read_shipped
from vitruvius.data import DataConfig, eval_loader, train_loader
from vitruvius.tasks.supervised import Supervised

FIVE = ["error", "relative_to_h", "relative_to_phi", "h2", "phi2"]


def model():
    return vitruvius.create_model("vitruvius/vit_digits", depth=2, attention=["standardised"])


def batches():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.rand(4, 3, 8, 8, generator=generator) for name in ("train", "validation")}


def test_the_five_curves_of_the_reconstruction_experiment_come_from_fixed_batches(tmp_path):
    network = model().train()
    callback = AnalysisCallback(["reconstruction:variant=reproduction"], batches(), folder=tmp_path)
    first = callback.epoch_end(0, network)
    assert network.training
    with torch.no_grad():
        network.model.blocks[0].attn.qkv.weight.mul_(2)
    callback.epoch_end(1, network)
    assert [row["statistic"] for row in first if row["batch"] == "train"][:5] == FIVE
    rows = read_rows(tmp_path)
    assert {(row["epoch"], row["batch"]) for row in rows} == {(e, b) for e in (0, 1) for b in ("train", "validation")}
    curve = [row["mean"] for row in rows if row["batch"] == "train" and row["statistic"] == "h2"]
    assert len(curve) == 2
    assert curve[0] != curve[1]
    table = analyse(network.eval(), [batches()["train"]], "reconstruction:variant=reproduction", nulls=False)
    expected = [row.mean for row in table.select(statistic="h2")]
    assert curve[1] == pytest.approx(sum(expected) / len(expected))
    assert set(rows[0]["by_site"]) == {"blocks.0.attn", "blocks.1.attn"}


def test_only_every_so_many_epochs(tmp_path):
    callback = AnalysisCallback(["entropy"], batches(), every=3)
    assert [bool(callback.epoch_end(epoch, model())) for epoch in range(6)] == [False, False, True] * 2


def test_an_epoch_written_twice_counts_once_and_a_cut_line_not_at_all(tmp_path):
    callback = AnalysisCallback(["entropy"], {"train": batches()["train"]}, folder=tmp_path)
    callback.epoch_end(0, model())
    again = callback.epoch_end(0, model())
    with (tmp_path / "analysis.jsonl").open("a") as file:
        file.write('{"epoch": 1, "ba')
    assert read_rows(tmp_path) == again
    assert all(json.loads(json.dumps(row)) == row for row in again)
    assert read_rows(tmp_path / "elsewhere") == []


def test_mistakes_are_found_before_training():
    with pytest.raises(ConfigError, match="analyse_every"):
        AnalysisCallback(["entropy"], batches(), every=0)
    with pytest.raises(DataError, match="holds no images"):
        AnalysisCallback(["entropy"], {"train": torch.empty(0, 3, 8, 8)})
    with pytest.raises(vitruvius._errors.UnknownName):
        AnalysisCallback(["entropie"], batches())


def test_the_first_images_of_a_loader_are_the_same_every_time():
    config = DataConfig(batch_size=16, workers=0)
    loader = train_loader(config, input_size=(3, 8, 8), seed=0)
    loader.set_epoch(5)
    first, again = first_images(loader, 20), first_images(loader, 20)
    assert first.shape == (20, 3, 8, 8)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert len(first_images(eval_loader(config, input_size=(3, 8, 8)), 5)) == 5
    with pytest.raises(DataError, match="no images"):
        first_images([], 4)


SHIPPED = """"Step","deit - train_error","deit - train_error__MIN","deit - train_error__MAX"
"14","4.926","4.926","4.926"
"29","4.275","4.275","4.275"
"44","","",""
"61","2.638","2.638","2.638"
"""


def test_a_shipped_curve_is_read_row_by_row_because_steps_do_not_tell_epochs(tmp_path):
    (tmp_path / "curve.csv").write_text(SHIPPED)
    assert read_shipped(tmp_path / "curve.csv") == {0: 4.926, 1: 4.275, 3: 2.638}


@pytest.mark.parametrize("text", ["", "epoch,loss\n1,2\n", "Step,a,b\n1,2,3\n", "Step,a\n1,two\n"])
def test_other_csv_files_are_refused(tmp_path, text):
    (tmp_path / "curve.csv").write_text(text)
    with pytest.raises(DataError, match=r"'two'|expected Step, one value"):
        read_shipped(tmp_path / "curve.csv")


def test_a_stage_whose_penalty_is_trained_can_be_analysed_after_an_update():
    network = vitruvius.create_model("vitruvius/vit_digits", depth=2, attention=["low_rank"]).train()
    task = Supervised(network, penalty=0.1)
    callback = AnalysisCallback(["entropy", "norms"], {"train": batches()["train"]})
    before = callback.epoch_end(0, network)
    task(torch.rand(4, 3, 8, 8), torch.arange(4))["loss"].backward()
    after = callback.epoch_end(1, network)
    assert [row["mean"] for row in after] == [row["mean"] for row in before]
