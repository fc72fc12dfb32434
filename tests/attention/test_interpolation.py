import pytest
import torch
from attending import make_site

from vitruvius._errors import SurgeryError
from vitruvius.attention.interpolation import interpolate, interpolate_state


def gridded(rows, columns, *, prefix=1, attends="tokens", **more):
    tokens = rows * columns + prefix
    queries = 1 if attends == "class" else tokens
    return make_site(attends, queries=queries, keys=tokens, num_prefix_tokens=prefix, grid=(rows, columns), **more)


def random_keep(site, density=0.1, seed=0):
    keep = torch.rand(3, site.num_queries, site.num_keys, generator=torch.Generator().manual_seed(seed)) < density
    keep[..., -1] |= ~keep.any(-1)
    return keep


def test_the_same_grid_gives_the_same_pattern():
    site = gridded(3, 4)
    keep = random_keep(site)
    assert torch.equal(interpolate(keep, site, site), keep)


def test_doubling_the_grid_repeats_each_patch_and_leaves_the_prefix():
    old, new = gridded(2, 3), gridded(4, 6)
    keep = random_keep(old, 0.4)
    patches = torch.arange(6).view(2, 3).repeat_interleave(2, 0).repeat_interleave(2, 1).flatten()
    index = torch.cat([torch.zeros(1, dtype=torch.long), patches + 1])
    assert torch.equal(interpolate(keep, old, new), keep[:, index][:, :, index])


@pytest.mark.parametrize(("old", "new"), [((4, 4), (2, 2)), ((5, 7), (3, 4)), ((3, 4), (7, 5)), ((6, 6), (1, 1))])
@pytest.mark.parametrize("attends", ["tokens", "class"])
def test_no_query_loses_its_last_key(old, new, attends):
    old, new = gridded(*old, attends=attends), gridded(*new, attends=attends)
    keep = torch.zeros(3, old.num_queries, old.num_keys, dtype=torch.bool)
    keep.scatter_(
        -1, torch.randint(old.num_keys, keep[..., :1].shape, generator=torch.Generator().manual_seed(0)), True
    )
    out = interpolate(keep, old, new)
    assert out.shape == (3, new.num_queries, new.num_keys)
    assert out.any(-1).all()


@pytest.mark.parametrize(("old", "new"), [((4, 4), (8, 8)), ((5, 7), (3, 4))])
def test_the_matrix_does_the_same_to_a_constant_image(old, new):
    old, new = gridded(*old), gridded(*new)
    matrix = torch.randn(3, old.num_keys, old.num_keys, generator=torch.Generator().manual_seed(0))
    out = interpolate(matrix, old, new)
    constant = torch.ones(new.num_keys)
    constant[0] = 3.0  # a class token of its own value
    small = torch.ones(old.num_keys)
    small[0] = 3.0
    torch.testing.assert_close((out @ constant)[:, 0], (matrix @ small)[:, 0], rtol=1e-4, atol=1e-4)
    assert interpolate(torch.zeros_like(matrix), old, new).count_nonzero() == 0  # S = 0 stays softmax


def test_a_matrix_that_is_smooth_comes_back_from_a_finer_grid():
    old, new = gridded(8, 8), gridded(16, 16)
    y, x = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    near = torch.exp(-((y.flatten()[:, None] - y.flatten()) ** 2 + (x.flatten()[:, None] - x.flatten()) ** 2) / 20)
    matrix = torch.block_diag(torch.ones(1, 1), near).expand(3, -1, -1)
    back = interpolate(interpolate(matrix, old, new), new, old)
    assert (back - matrix)[:, 1:, 1:].abs().max() < 0.15
    assert torch.equal(back[:, 0], matrix[:, 0])


def test_what_cannot_be_resampled_is_refused():
    old, new = gridded(3, 4), gridded(6, 8)
    keep = random_keep(old)
    with pytest.raises(SurgeryError, match="is not of 'blocks"):
        interpolate(keep[..., :-1], old, new)
    with pytest.raises(SurgeryError, match="prefix tokens"):
        interpolate(keep, old, gridded(6, 8, prefix=2))
    with pytest.raises(SurgeryError, match="no grid"):
        interpolate(keep, old, make_site(queries=49))
    down = make_site("downsampled", queries=4, keys=16, grid=(4, 4))
    with pytest.raises(SurgeryError, match="from one grid to another"):
        interpolate(torch.ones(3, 4, 16, dtype=torch.bool), down, down)


def test_a_checkpoint_is_carried_to_another_size_site_by_site():
    old = {"blocks.0.attn": gridded(2, 2), "blocks.1.attn": gridded(2, 2)}
    new = {"blocks.0.attn": gridded(4, 4), "blocks.1.attn": gridded(4, 4)}
    state = {
        "blocks.0.attn.core.mask.keep": random_keep(old["blocks.0.attn"]),
        "blocks.1.attn.core.scaled.matrix": torch.zeros(3, 5, 5),
        "head.weight": torch.ones(2, 2),
    }
    changed = interpolate_state(state, old, new)
    assert changed["blocks.0.attn.core.mask.keep"].shape == (3, 17, 17)
    assert changed["blocks.1.attn.core.scaled.matrix"].shape == (3, 17, 17)
    assert changed["head.weight"] is state["head.weight"]
    assert state["blocks.0.attn.core.mask.keep"].shape == (3, 5, 5)
