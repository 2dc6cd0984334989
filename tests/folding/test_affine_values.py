"""A folded edit computes what the edit computed, to 1e-10 in float64; what does not fold is refused
by name.
"""

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from peftc.folding.module_folds import Refusal, fold_terms
from peftc.folding.rounding import is_run_of_entries
from peftc.forms.shapes import KeyValue, Tokens, Vector, Weight
from peftc.planning.foldability.affine import fold_reason, fold_target
from peftc.planning.ir import Assign, Concat
from tests.folding import equations as eq

TOLERANCE = 1e-10
D_IN, D_OUT = 10, 6
X, H, Z = eq.read("x", Tokens(D_IN)), eq.read("h", Tokens(D_OUT)), eq.read("h", Tokens(D_IN))
W, B = eq.read("w", Weight(D_OUT, D_IN)), eq.read("b", Vector(D_OUT))
OUT, IN = Tokens(D_OUT), Tokens(D_IN)


def normal(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


WEIGHT, BIAS, INPUT = normal(D_OUT, D_IN), normal(D_OUT, seed=1), normal(2, 7, D_IN, seed=2)

lora = eq.apply("lora", X, OUT, r=3, alpha=16, dropout=0.5)
parallel = eq.apply("adapter", X, OUT, r=4, act="none")
sequential = eq.apply("adapter", eq.read("h", OUT), OUT, r=4, act="none", bias=False)
l_v = eq.apply("vector", None, OUT, init=0.7)
s = eq.apply("scalar", None, OUT, init=0.4)
difference = eq.op("-", eq.apply("lora", H, OUT, r=3), eq.op("*", s, H))

OUTPUT_EDITS: dict[str, list[Assign]] = {
    "lora": [eq.assign("h", eq.op("+", H, lora))],
    "ia3": [eq.assign("h", eq.op("*", H, l_v))],
    "new bias": [eq.assign("h", eq.op("+", H, eq.apply("vector", None, OUT, init=0)))],
    "parallel linear adapter": [eq.assign("h", eq.op("+", H, eq.op("*", eq.number(4), parallel)))],
    "sequential linear adapter": [eq.assign("h", eq.op("+", H, sequential))],
    "both in a row": [eq.assign("h", eq.op("+", H, lora)), eq.assign("h", eq.op("+", eq.read("h", OUT), sequential))],
    "constant gate": [eq.assign("h", eq.op("+", eq.op("*", eq.op("-", eq.number(1), s), H), eq.op("*", lora, s)))],
    "learned and shifted": [eq.assign("h", eq.op("-", eq.number(2), eq.op("/", eq.op("-", H, l_v), s)))],
    "difference of affine values": [eq.assign("h", difference)],
    "vector over lora": [eq.assign("h", eq.op("+", H, eq.op("*", l_v, eq.op("+", lora, eq.number(0.5)))))],
    "nested": [eq.assign("h", eq.apply("lora", eq.apply("adapter", X, IN, r=4, act="none"), OUT, r=2))],
    "DoRA and lora": [
        eq.assign("h", eq.op("+", H, lora)),
        eq.assign("w", eq.apply("magnitude", eq.op("+", W, eq.apply("lowrank", None, W.shape, r=2)), W.shape)),
        eq.assign("h", eq.op("*", eq.read("h", OUT), l_v)),
    ],
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", OUTPUT_EDITS)
def test_an_edit_of_h_folds_into_its_linear(name: str, bias: bool) -> None:
    where = eq.site("layer.attn.q", D_OUT, D_IN, bias=bias)
    edit = eq.site_edit(where, *OUTPUT_EDITS[name])
    assert fold_reason(edit, {where.path: where}) is None
    b = BIAS if bias else None
    modules = eq.trained(edit, base={"w": WEIGHT})
    folded = eq.fold(edit, modules, WEIGHT, b)
    assert isinstance(folded, eq.Folded)
    weights = eq.site_edit(where, *[a for a in edit.assigns if a.state == "w"])
    hidden = eq.site_edit(where, *[a for a in edit.assigns if a.state == "h"])
    w = eq.run(weights, modules, {"w": WEIGHT, "like": WEIGHT})["w"]
    want = eq.run(hidden, modules, {"x": INPUT, "h": linear(INPUT, w, b), "like": INPUT})["h"]
    assert not torch.allclose(want, linear(INPUT, WEIGHT, b), atol=1e-3)
    torch.testing.assert_close(linear(INPUT, folded.weight, folded.bias), want, rtol=TOLERANCE, atol=TOLERANCE)


def test_let_binds_the_value_at_its_position() -> None:
    """`let f = adapter(h) h += lora(x) h += f`: f reads the first h."""
    where = eq.site("layer.attn.q", D_OUT, D_IN)
    after = eq.op("+", eq.read("h", OUT), sequential)
    edit = eq.site_edit(where, eq.assign("h", eq.op("+", H, lora)), eq.assign("h", after))
    bound = dataclasses.replace(edit, lets=((0, sequential),))
    modules = eq.trained(edit)
    f = modules["adapter"](linear(INPUT, WEIGHT, BIAS))
    folded = eq.fold(bound, modules, WEIGHT, BIAS)
    assert isinstance(folded, eq.Folded)
    want = linear(INPUT, WEIGHT, BIAS) + modules["lora"](INPUT) + f
    torch.testing.assert_close(linear(INPUT, folded.weight, folded.bias), want, rtol=TOLERANCE, atol=TOLERANCE)


INPUT_EDITS = {
    "l_ff": eq.op("*", Z, eq.apply("vector", None, IN)),
    "shift": eq.op("+", Z, eq.apply("vector", None, IN, init=0)),
    "linear adapter": eq.op("+", Z, eq.op("*", eq.number(2), eq.apply("adapter", Z, IN, r=3, act="none"))),
    "lora": eq.op("-", Z, eq.apply("lora", Z, IN, r=3)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", INPUT_EDITS)
def test_an_edit_of_the_hidden_activation_folds_into_down(name: str, bias: bool) -> None:
    down = eq.site("layer.ffn.down", D_OUT, D_IN, bias=bias)
    edit = eq.site_edit(eq.site("layer.ffn.hidden", D_IN, D_IN, weight=False), eq.assign("h", INPUT_EDITS[name]))
    sites = {down.path: down}
    target = fold_target(edit, sites)
    assert not isinstance(target, str)
    assert (target.side, target.weight, fold_reason(edit, sites)) == ("input", down.states["w"].weight, None)
    b, modules = BIAS if bias else None, eq.trained(edit)
    folded = eq.fold(edit, modules, WEIGHT, b, target.side)
    assert isinstance(folded, eq.Folded)
    want = linear(eq.run(edit, modules, {"h": INPUT, "like": INPUT})["h"], WEIGHT, b)
    torch.testing.assert_close(linear(INPUT, folded.weight, folded.bias), want, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_sub_layer_folds_into_the_linear_that_computes_its_h() -> None:
    down = eq.site("layer.ffn.down", D_OUT, D_IN)
    where = eq.site("layer.ffn", D_OUT, D_OUT, weight=False, linear=down.path)
    edit = eq.site_edit(where, eq.assign("h", eq.op("+", H, sequential)))
    target = fold_target(edit, {down.path: down})
    assert not isinstance(target, str)
    assert (target.side, target.weight) == ("output", down.states["w"].weight)
    modules = eq.trained(edit)
    folded = eq.fold(edit, modules, WEIGHT, BIAS)
    assert isinstance(folded, eq.Folded)
    want = eq.run(edit, modules, {"h": linear(INPUT, WEIGHT, BIAS), "like": INPUT})["h"]
    torch.testing.assert_close(linear(INPUT, folded.weight, folded.bias), want, rtol=TOLERANCE, atol=TOLERANCE)
    sandwich = eq.site("layer.ffn", D_OUT, D_OUT, weight=False)
    reason = fold_reason(eq.site_edit(sandwich, *edit.assigns), {down.path: down})
    assert reason == "`h` of `layer.ffn` is not simply the output of `down`"


def test_weights_and_biases_of_norms() -> None:
    where = eq.site("layer.norm", 5, 5, weight=False)
    w, b = eq.read("w", Vector(5)), eq.read("b", Vector(5))
    edit = eq.site_edit(
        where,
        eq.assign("w", eq.op("*", w, eq.apply("vector", None, Vector(5), "gain"))),
        eq.assign("b", eq.op("+", b, eq.apply("vector", None, Vector(5), "shift", init=0))),
    )
    assert fold_reason(edit, {}) is None
    modules = eq.trained(edit)
    weight, bias = normal(5), normal(5, seed=1)
    folded = eq.fold(edit, modules, weight, bias)
    assert isinstance(folded, eq.Folded)
    torch.testing.assert_close(folded.weight, weight * modules["gain"].scale)
    torch.testing.assert_close(folded.bias, bias + modules["shift"].scale)


relu = eq.apply("adapter", X, OUT, r=4)
gate = eq.apply("gate", X, OUT)
REASONS = {
    "nonlinear": (
        eq.op("+", H, relu),
        "`adapter(x)`: `act(down @ z + down_bias)` is not linear with `act=relu`",
    ),
    "layer norm": (
        eq.apply("adapter", X, OUT, r=4, act="none", norm_in=True),
        "`adapter(x)`: `layer_norm(x)` is not linear",
    ),
    "gate": (eq.op("*", gate, lora), "`gate(x)`: `sigmoid(weight @ x + bias)` is not linear"),
    "square": (eq.op("*", H, eq.op("+", lora, eq.number(1))), "`h * (lora(x) + 1)` multiplies two values"),
    "quotient": (eq.op("/", eq.number(1), H), "`1 / h` divides by a value that depends on the input"),
    "other state": (eq.op("+", H, eq.read("res", OUT)), "`res` is not what the Linear reads"),
    "the base's norm": (eq.op("+", H, eq.frozen("norm", H)), "`norm(h)`: the model's own `norm` is not folded"),
    "form of a constant": (eq.apply("lora", l_v, OUT, r=2), "`lora(vector())` reads nothing"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_reason_names_the_term_that_does_not_fold(name: str) -> None:
    value, reason = REASONS[name]
    where = eq.site("layer.attn.q", D_OUT, D_IN)
    edit = eq.site_edit(where, eq.assign("h", value))
    assert (fold_reason(edit, {where.path: where}) or "").startswith(reason)
    if name != "form of a constant":
        folded = eq.fold(edit, eq.trained(edit), WEIGHT, BIAS)
        assert isinstance(folded, eq.Unfolded)


def test_prefixes_and_states_of_attention_do_not_fold() -> None:
    where = eq.site("layer.attn", D_OUT, D_OUT, weight=False)
    kv = eq.read("kv", KeyValue(2, 3))
    joined = Concat((eq.apply("prefix", None, kv.shape, len=3), kv), shape=kv.shape, source=eq.SOURCE)
    reason = fold_reason(eq.site_edit(where, eq.assign("kv", joined)), {})
    assert reason == "`concat(prefix(), kv)` adds rows to the keys and values, which no weight holds"
    q = eq.site_edit(where, eq.assign("q", eq.op("*", eq.read("h", OUT), eq.number(2))))
    assert fold_reason(q, {}) == "`q` of `layer.attn` is not the output of a Linear"


def test_a_parallel_adapter_of_a_sub_layer_does_not_fold() -> None:
    down = eq.site("layer.ffn.down", D_OUT, D_IN)
    where = eq.site("layer.ffn", D_OUT, D_IN, weight=False, linear=down.path)
    edit = eq.site_edit(where, eq.assign("h", eq.op("+", H, parallel)))
    assert fold_reason(edit, {down.path: down}) == "`x` is not what the Linear reads"
    assert isinstance(eq.fold(edit, eq.trained(edit), WEIGHT, BIAS), eq.Unfolded)


def test_tied_weights_are_refused() -> None:
    where = eq.site("head", D_OUT, D_IN)
    edit = eq.site_edit(where, *OUTPUT_EDITS["lora"])
    reason = fold_reason(edit, {where.path: where}, [("head.weight", "embed.weight")])
    assert reason == "`head.weight` is tied to `embed.weight`: a fold would change both uses"
    assert fold_reason(edit, {where.path: where}, [("other.weight", "embed.weight")]) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_summed_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    where = eq.site("layer.attn.q", 64, 48, bias=False)
    small = eq.apply("lora", eq.read("x", Tokens(48)), Tokens(64), r=2)
    edit = eq.site_edit(where, eq.assign("h", eq.op("+", eq.read("h", Tokens(64)), small)))
    modules = eq.trained(edit, torch.float32)
    modules["lora"].B.data.mul_(0.05)
    weight = normal(64, 48).to(dtype)
    folded = eq.fold(edit, modules, weight, None)
    assert isinstance(folded, eq.Folded)
    delta = modules["lora"].B.detach() @ modules["lora"].A.detach()
    assert torch.equal(folded.weight, (weight.float() + delta).to(dtype))
    assert not torch.equal(folded.weight, weight + delta.to(dtype))
    changed_share = (folded.weight != weight).double().mean().item()
    assert folded.survived == pytest.approx(changed_share)
    assert 0 < folded.survived < 1
    assert folded.bias is None


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_not_a_number_is_refused(value: float) -> None:
    where = eq.site("layer.attn.q", D_OUT, D_IN)
    edit = eq.site_edit(where, *OUTPUT_EDITS["lora"])
    modules = eq.trained(edit)
    modules["lora"].A.data[0, 0] = value
    folded = eq.fold(edit, modules, WEIGHT, BIAS)
    assert isinstance(folded, eq.Unfolded)
    assert "NaN" in folded.reason
    overflow = eq.fold(eq.site_edit(where, *OUTPUT_EDITS["ia3"]), _big(), WEIGHT.half(), BIAS.half())
    assert isinstance(overflow, eq.Unfolded)


def _big() -> dict[str, object]:
    modules = eq.trained(eq.site_edit(eq.site("q", D_OUT, D_IN), *OUTPUT_EDITS["ia3"]), torch.float32)
    modules["vector"].scale.data.fill_(1e6)
    return modules  # type: ignore[return-value]


def test_meta_and_quantised_weights_are_refused() -> None:
    where = eq.site("layer.attn.q", D_OUT, D_IN)
    edit = eq.site_edit(where, *OUTPUT_EDITS["lora"])
    modules = eq.trained(edit)
    assert eq.fold(edit, modules, WEIGHT.to("meta"), BIAS) == eq.Unfolded("the weights are not loaded")
    quantised = (100 * WEIGHT).to(torch.int8)
    assert fold_terms(edit, modules, quantised, None, "output") == Refusal("the weight is quantised")


def test_no_square_matrix_is_formed_for_a_wide_hidden_state() -> None:
    """(IA)³ and low-rank edits of a 28,672-wide hidden state never form a square matrix, which
    would take 3.3 GB.
    """
    d = 28_672
    z = eq.read("h", Tokens(d))
    value = eq.op("*", eq.op("+", z, eq.apply("lora", z, Tokens(d), r=2)), eq.apply("vector", None, Tokens(d)))
    edit = eq.site_edit(eq.site("layer.ffn.hidden", d, d, weight=False), eq.assign("h", value))
    weight = torch.randn(4, d)
    folded = eq.fold(edit, eq.trained(edit, torch.float32), weight, None)
    assert isinstance(folded, eq.Folded)
    assert folded.weight.shape == weight.shape


def test_a_weight_with_gaps_in_memory_folds_where_its_rows_are() -> None:
    """Rows that lie together, in a parameter whose entries do not: a view of a larger buffer."""
    torch.manual_seed(0)
    buffer = torch.randn(4, 2, 6, 5, dtype=torch.bfloat16)
    whole = buffer[:, 0]
    assert is_run_of_entries(buffer[1, 0], buffer)
    assert whole[1].is_contiguous()
    assert not is_run_of_entries(whole[1], whole)  # its offset is not the number of its first entry
    assert not is_run_of_entries(whole[1].clone(), buffer)
    assert not is_run_of_entries(buffer[1, 0].t(), buffer)
