import pytest
import torch
from attending import (
    assert_golden,
    assert_golden_gradients,
    make_heads,
    make_site,
    mean_maps,
    of_case,
    run_layer,
)

from golden_files import read_golden
from vitruvius._errors import CheckpointError, SurgeryError, UnsuitableSite
from vitruvius._files import save_tensors
from vitruvius.attention import part
from vitruvius.attention.base import build_core
from vitruvius.attention.softmax import attend

TENSORS, METADATA = read_golden("vitcod_attn_noae")


def random_keep(heads=3, queries=7, keys=7, seed=0):
    keep = torch.rand(heads, queries, keys, generator=torch.Generator().manual_seed(seed)) < 0.4
    keep[..., 0] = True
    return keep


@pytest.mark.parametrize("case", METADATA["cases"], ids=lambda case: case["id"])
def test_masks_match_the_golden_outputs_and_gradients(case):
    expected = of_case(TENSORS, case)
    parts = [part("mask", keep=~expected["mask"][0])] if case["masked"] else []
    core = build_core(parts, make_site(queries=9))
    _, out, leaves = run_layer(TENSORS, METADATA["H"], core)
    assert_golden(out, expected["out"])
    assert_golden(mean_maps(TENSORS, METADATA["H"], list(core.children())[:-1]), expected["attn_avg2"])
    assert_golden_gradients(out.square().sum(), leaves, expected)


def test_removed_keys_have_no_influence_and_kept_ones_are_renormalised():
    keep = random_keep()
    heads = make_heads()
    out = build_core([part("mask", keep=keep)], make_site())(heads)
    for h, n in torch.cartesian_prod(torch.arange(3), torch.arange(7)):
        logits = heads.k[:, h, keep[h, n]] @ heads.q[:, h, n, :, None] * heads.scale
        expected = (logits.softmax(-2) * heads.v[:, h, keep[h, n]]).sum(-2)
        torch.testing.assert_close(out[:, h, n], expected)


def test_the_pattern_joins_the_bias_that_is_there():
    keep, bias = random_keep(), make_heads(tokens=7, width=7, seed=5).q[:1]
    heads = make_heads(bias=bias)
    out = build_core([part("mask", keep=keep)], make_site())(heads)
    both = bias + torch.zeros(3, 7, 7).double().masked_fill(~keep, -torch.inf)
    torch.testing.assert_close(out, attend(heads._replace(bias=both)))


def test_class_queries_and_down_sampling_have_masks_of_their_own_shape():
    for site in (make_site("class", queries=1, keys=7), make_site("downsampled", queries=3, keys=7)):
        heads = make_heads()
        heads = heads._replace(q=heads.q[..., : site.num_queries, :])
        keep = random_keep(queries=site.num_queries)
        assert build_core([part("mask", keep=keep)], site)(heads).shape == (2, 3, site.num_queries, 4)


def test_pairs_of_channels_can_be_masked_as_pairs_of_tokens_can():
    heads, keep = make_heads(), random_keep()
    site = make_site("channels")
    expected = attend(heads._replace(bias=torch.zeros(keep.shape).masked_fill(~keep, -torch.inf)))
    torch.testing.assert_close(build_core([part("mask", keep=keep)], site)(heads), expected)


def test_masks_come_from_a_file_by_the_name_of_the_site(tmp_path):
    file = tmp_path / "masks.safetensors"
    masks = {f"blocks.{i}.attn": random_keep(seed=i) for i in range(2)}
    save_tensors(file, masks)
    core = build_core([part("mask", file=file)], make_site(name="blocks.1.attn"))
    assert torch.equal(core.get_buffer("mask.keep"), masks["blocks.1.attn"])
    with pytest.raises(UnsuitableSite, match=r"no mask for 'blocks\.7\.attn'.*It has 2: blocks\.0\.attn"):
        build_core([part("mask", file=file)], make_site(name="blocks.7.attn"))
    with pytest.raises(CheckpointError, match="no such file"):
        build_core([part("mask", file=tmp_path / "absent.safetensors")], make_site())


def test_another_number_of_tokens_is_an_error_that_names_the_remedy():
    core = build_core([part("mask", keep=random_keep())], make_site())
    with pytest.raises(SurgeryError, match=r"7 queries and 7 keys and met 9 and 9.*interpolate"):
        core(make_heads(tokens=9))


def test_the_pattern_travels_in_the_checkpoint_as_bool_and_nothing_else_does():
    core = build_core([part("mask", keep=random_keep())], make_site())
    assert {name: value.dtype for name, value in core.state_dict().items()} == {"mask.keep": torch.bool}
    other = build_core([part("mask", keep="all")], make_site())
    other.load_state_dict(core.state_dict())
    assert torch.equal(other(make_heads()), core(make_heads()))


def test_the_mask_does_not_share_memory_with_the_tensor_it_came_from():
    keep = random_keep()
    core = build_core([part("mask", keep=keep)], make_site())
    keep.logical_not_()
    assert torch.equal(core.get_buffer("mask.keep"), random_keep())
