"""Does the model answer alike when it is asked again? A copy taken before the attack judges x' and the clean images.

An attack asks a model hundreds of times. One that remembers images, adapts to batches or counts its calls then answers
otherwise than it would answer a stranger, and the attack's figure is too high. B images, K classes.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from vitruvius.evaluation.base import Columns, logits_of

ROUNDING = 1e-3  # of the largest logit: between logits that are closer, batches of another size may decide otherwise
SAME, MEMORY, BATCH = 0, 1, 2  # in the columns `again` and `clean_again` of a ledger
AGAIN, CLEAN_AGAIN = "again", "clean_again"
ALONE = 4  # images asked about one by one, to tell a memory from a dependence on the batch


class SecondOpinion:
    """Asks copies of a `model` as it is now; where it cannot be copied, the model itself, in another order."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        weights = [p.dtype for p in model.parameters() if p.is_floating_point()] if isinstance(model, nn.Module) else []
        self.rounding = max([ROUNDING, *(4 * torch.finfo(dtype).eps for dtype in weights)])
        self.why_not_copied = ""
        try:
            self.pristine = copy.deepcopy(getattr(model, "_orig_mod", model))  # what torch.compile has wrapped
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError, copy.Error) as error:
            self.why_not_copied = str(error).partition("\n")[0].rstrip(".") or type(error).__name__

    @torch.no_grad()
    def judge(self, moved: Tensor, x: Tensor, y: Tensor, clean: Tensor, rows: Columns, batch_size: int) -> Columns:
        """Rows of a ledger, `correct` only where a copy says so too, with columns of what it says otherwise.

        `rows` are the model's answers about x' `moved` (B, …) with labels `y` (B,); `clean` (B,) its classes of the
        images `x` as they are.
        """
        fresh = self._copy()
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
        size = min(2 * batch_size, -(-len(x) // 2))
        back = order.argsort()
        # x' first: a copy that had seen the image would remember it
        again, clean_again = (logits_of(fresh, images[order], size)[back] for images in (moved, x))
        changed = self._changed(again, rows["prediction"])
        changed_clean = self._changed(clean_again, clean)
        kind = SAME
        if bool(changed.any() or changed_clean.any()):
            images, logits = (moved, again) if bool(changed.any()) else (x, clean_again)
            kind = self._kind(images, logits, changed if bool(changed.any()) else changed_clean)
        fooled = changed & (again.argmax(1) != y)
        return {
            **rows,
            "correct": rows["correct"] & ~fooled,
            AGAIN: changed.to(torch.int8) * kind,
            CLEAN_AGAIN: changed_clean.to(torch.int8) * kind,
        }

    def _copy(self) -> nn.Module:
        return self.model if self.why_not_copied else copy.deepcopy(self.pristine)

    def _kind(self, images: Tensor, logits: Tensor, changed: Tensor) -> int:
        """Whether what a copy says of a few images depends on those beside them; if not, the model remembers."""
        few = changed.nonzero().squeeze(1)[:ALONE]
        alone = logits_of(self._copy(), images[few], 1)
        return BATCH if bool(differ(alone, logits[few], self.rounding).any()) else MEMORY

    def _changed(self, logits: Tensor, before: Tensor) -> Tensor:
        """(B,) whether the class is another one than `before`, by more than rounding."""
        old = logits.gather(1, before.long()[:, None])[:, 0]
        return logits.amax(1) - old > self.rounding * (1 + logits.abs().amax(1))


def differ(logits: Tensor, others: Tensor, rounding: float) -> Tensor:
    """(B,) whether logits (B, K) are others, by more than this share of the largest."""
    return (logits - others).abs().amax(1) > rounding * (1 + others.abs().amax(1))
