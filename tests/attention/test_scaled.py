import pytest
import torch
from attending import assert_golden, assert_golden_gradients, make_heads, make_site, of_case, run_layer

from golden_files import read_golden
from vitruvius._errors import SurgeryError
from vitruvius.attention import part
from vitruvius.attention.base import attention_map, build_core
from vitruvius.attention.softmax import attend

FILES = {"matrix": read_golden("scaled_matrix"), "alpha": read_golden("scaled_scalar")}
CASES = [(form, case) for form, (_, metadata) in FILES.items() for case in metadata["cases"]]


def core_with(form, value, site=None):
    core = build_core([part("scaled", form=form)], site or make_site()).double()
    with torch.no_grad():
        core.get_parameter(f"scaled.{form}").copy_(value)
    return core


@pytest.mark.parametrize(("form", "case"), CASES, ids=lambda value: value if isinstance(value, str) else value["id"])
def test_both_forms_match_the_golden_outputs_and_gradients(form, case):
    tensors, metadata = FILES[form]
    expected = of_case(tensors, case)
    core = core_with(form, expected["s"])
    _, out, leaves = run_layer(tensors, metadata["H"], core)
    assert_golden(out, expected["out"])
    leaves["s"] = core.get_parameter(f"scaled.{form}")
    assert_golden_gradients(out.square().sum(), leaves, expected)


def test_the_matrix_form_is_the_map_times_identity_minus_s():
    heads, s = make_heads(), make_heads(tokens=7, width=7, seed=3).q[0]
    expected = attention_map(heads) @ (torch.eye(7, dtype=torch.float64) - s) @ heads.v
    torch.testing.assert_close(core_with("matrix", s)(heads), expected)


def test_the_symmetric_map_of_the_alpha_form_respects_the_bias():
    bias = torch.block_diag(torch.ones(4, 4), torch.ones(3, 3)).double().log()
    heads = make_heads(bias=bias)
    symmetric = attention_map(heads._replace(q=heads.k))
    assert (symmetric[..., :4, 4:] == 0).all()
    expected = attention_map(heads) @ (heads.v - 0.5 * symmetric @ heads.v)
    torch.testing.assert_close(core_with("alpha", 0.5)(heads), expected)


def test_class_attention_scales_over_its_keys():
    site = make_site("class", queries=1, keys=7)
    heads, s = make_heads(), make_heads(tokens=7, width=7, seed=3).q[0]
    heads = heads._replace(q=heads.q[..., :1, :], bias=torch.zeros(1, 7).double())
    expected = attention_map(heads) @ (heads.v - s @ heads.v)
    torch.testing.assert_close(core_with("matrix", s, site)(heads), expected)
    expected = attention_map(heads) @ (heads.v - 0.5 * attend(heads._replace(q=heads.k, bias=None)))
    torch.testing.assert_close(core_with("alpha", 0.5, site)(heads), expected)


def test_the_matrix_says_that_it_fixes_the_number_of_tokens():
    core = build_core(["scaled"], make_site(queries=7)).double()
    with pytest.raises(SurgeryError, match=r"7 keys and met 9.*interpolate.*alpha"):
        core(make_heads(tokens=9))
    core_with("alpha", 0.5)(make_heads(tokens=9))
