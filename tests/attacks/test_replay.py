"""Recorded passes of a model say what the model says. On a CPU a stand-in repeats the work instead of a CUDA graph."""

import pytest
import torch
from torch import nn

from vitruvius.attacks._cuda_graphs import PAYS, GraphedModel, padded_size, with_cuda_graphs
from vitruvius.attacks._models import loss_and_grad, unwrapped
from vitruvius.attacks.autoattack import AutoAttack
from vitruvius.attacks.base import CE


class Repeats:
    """Does the work again; counts how often."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, work):
        work()
        self.recorded += 1

        def again():
            self.replayed += 1
            work()

        return again

    def warm_up(self, work):
        work()

    def has_memory_for(self, bytes_):
        return True


def make_model(seed=0):
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(8 * 64, 4)]
    return nn.Sequential(*layers).eval().requires_grad_(False)


def images(count, seed=0):
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_sizes_are_few_and_never_smaller_than_the_batch():
    for room in (1, 3, 8, 100, 256):
        sizes = {padded_size(count, room) for count in range(1, room + 1)}
        assert all(count <= padded_size(count, room) <= max(room, 1) for count in range(1, room + 1))
        assert len(sizes) <= 8 + 6
    assert padded_size(0, 8) is None
    assert padded_size(9, 8) is None


def test_logits_and_gradients_are_those_of_the_model():
    model, record = make_model(), Repeats()
    view = GraphedModel(model, max_images=16, record=record)
    for turn in range(2 * PAYS):
        x, y = images(11, turn), torch.arange(11) % 4
        expected, found = (loss_and_grad(m, x, lambda logits, y=y: CE(logits, y)) for m in (model, view))
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
        with torch.no_grad():
            torch.testing.assert_close(view(x), model(x))
    assert record.recorded == 3  # there and back; there alone
    assert record.replayed > 2 * PAYS
    assert unwrapped(view) is model


def test_other_sizes_and_too_many_images_are_answered_too():
    model, record = make_model(), Repeats()
    view = GraphedModel(model, max_images=16, record=record)
    for count in [1, 2, 3, 16, 17, 40] * (PAYS + 1):
        torch.testing.assert_close(view(images(count, count)), model(images(count, count)))


def test_images_of_another_shape_or_type_are_another_recording():
    record = Repeats()
    view = GraphedModel(nn.Flatten().eval(), max_images=4, record=record)
    for x in [images(4), images(4)[..., :5], images(4).double()] * (PAYS + 1):
        assert torch.equal(view(x), x.flatten(1))
    assert record.recorded == 3


def test_two_passes_before_one_way_back_are_not_mixed_up():
    model, record = make_model(), Repeats()
    view = GraphedModel(model, max_images=8, record=record)
    for _ in range(PAYS + 1):
        first, second = images(8, 1).requires_grad_(), images(8, 2).requires_grad_()
        one, two = view(first), view(second)
        found = torch.autograd.grad((one * two).sum(), (first, second))
    expected = torch.autograd.grad((model(first) * model(second)).sum(), (first, second))
    assert record.recorded
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_second_derivatives_are_refused():
    view = GraphedModel(make_model(), max_images=4, record=Repeats())
    for _ in range(PAYS):
        x = images(4).requires_grad_()
        (grad,) = torch.autograd.grad(view(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


class Noisy(nn.Module):
    """Answers anew each time."""

    def forward(self, x):
        return (x + 0.1 * torch.randn_like(x)).flatten(1)[:, :4]


class Moody(nn.Module):
    """Cannot be recorded."""

    def forward(self, x):
        if self.recording:
            raise RuntimeError("operation not permitted when stream is capturing")
        return x.flatten(1)[:, :4]


def test_what_does_not_repeat_itself_is_asked_every_time():
    record = Repeats()
    view = GraphedModel(Noisy().eval(), max_images=4, record=record)
    answers = [view(images(4)) for _ in range(2 * PAYS)]
    assert record.replayed <= 1  # the trial
    assert not view.recordings
    assert len({float(answer.sum()) for answer in answers}) == 2 * PAYS


def test_what_cannot_be_recorded_is_asked_every_time():
    model = Moody().eval()
    model.recording = False

    class Fails(Repeats):
        def warm_up(self, work):
            model.recording = True
            try:
                work()
            finally:
                model.recording = False

    view = GraphedModel(model, max_images=4, record=Fails())
    for _ in range(2 * PAYS):
        assert torch.equal(view(images(4)), model(images(4)))
    assert not view.recordings


def test_without_memory_for_a_recording_the_model_is_asked_every_time():
    class Poor(Repeats):
        def has_memory_for(self, bytes_):
            return False

    record = Poor()
    view = GraphedModel(make_model(), max_images=4, record=record)
    for _ in range(2 * PAYS):
        view(images(4))
    assert not record.recorded
    assert not view.recordings


@pytest.mark.parametrize("precision", ["exact", "fast"])
def test_autoattack_finds_the_same_through_recordings(precision, monkeypatch):
    model, x = make_model(), images(24)
    y = model(x).argmax(1)
    attack = AutoAttack(eps=0.02, version="custom", attacks=("apgd-ce", "fab-t", "square"), precision=precision)
    expected = attack.run(model, x, y)
    record = Repeats()
    monkeypatch.setattr(
        "vitruvius.attacks.autoattack.with_cuda_graphs", lambda model, x, size: GraphedModel(model, size, record=record)
    )
    found = attack.run(model, x, y)
    assert record.replayed > 100
    assert torch.equal(found.broken_by, expected.broken_by)


def test_without_a_gpu_nothing_is_put_around_the_model():
    model = make_model()
    assert with_cuda_graphs(model, images(2), 2) is model
