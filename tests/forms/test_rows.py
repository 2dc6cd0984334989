"""What a form's row promises: counts, shapes, initial value, affinity, and refusals."""

import json
import subprocess
import sys

import pytest
import torch

from peftc.equation_code.buffer_module import BufferModule
from peftc.equation_code.pruning_module import PrunedSites
from peftc.equations.table import FORMS
from peftc.forms import Args, Dims, PlacementError
from peftc.forms.module import build
from peftc.forms.shapes import Heads, KeyValue, Scalar, Shape, Tokens, Vector, Weight
from tests.forms.cases import BATCH, CASES, Case, alone, every, initialised, owner, parameters, shaken, size

NUMERICAL = 1e-12
PASSING: list[tuple[str, Args]] = [
    ("magnitude", {}),
    ("orthogonal", {"block": 32}),
    ("orthogonal", {"block": 8, "neumann": 5}),
]


def test_every_form_is_among_the_cases() -> None:
    assert {case.name for case in CASES} == set(FORMS)


def test_rows_do_not_import_torch() -> None:
    code = "import sys, peftc.forms; print('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_trained_count_is_the_number_of_entries(case: Case) -> None:
    count = case.form.count(case.args, case.dims)
    assert count.trained == sum(p.numel() for p in owner(case).parameters())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stored_count_is_the_count_after_collapsing(case: Case) -> None:
    count = case.form.count(case.args, case.dims)
    if case.form.saved_as(case.args) is not None and case.in_part:
        sites = initialised(case).owner_module
        assert isinstance(sites, PrunedSites)
        sites.choose(torch.arange(sites.unit_count))
        assert count.stored + case.form.common_count(case.args, case.dims).stored == sites.collapsed()["values"].numel()
    elif case.form.saved_as(case.args) is not None:
        assert count.stored == case.sites * sum(rows.numel() for rows in initialised(case).collapsed().values())
    else:
        module = owner(case)
        others = [module.get_buffer(name) for name in module.adapter()] if isinstance(module, BufferModule) else []
        assert count.stored == count.trained + sum(tensor.numel() for tensor in others)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_value_has_the_promised_shape(case: Case) -> None:
    promised = case.form.shape(case.args, case.dims)
    value = shaken(case)(case.like())
    if isinstance(promised, KeyValue):
        want = (BATCH, promised.kv_heads, case.args["len"], promised.d_head)
        assert tuple(tuple(part.shape) for part in value) == (want, want)
    elif isinstance(promised, Scalar) and promised.per_example:
        assert value.shape[0] == BATCH
        assert value.numel() == BATCH * (promised.rows or 1)
        assert value.ndim == (3 if isinstance(case.target, KeyValue) else len(size(case.target)))
    elif isinstance(promised, Scalar):
        assert value.numel() == 1
    elif case.name == "prompt":
        assert value.shape == (case.args["len"], promised.d)
    else:
        assert torch.broadcast_shapes(value.shape, size(promised)) == size(promised)


@pytest.mark.parametrize("case", every(lambda c: c.name not in ("prefix", "prompt")), ids=str)
def test_value_at_initialisation_is_the_promised_constant(case: Case) -> None:
    value, promised = initialised(case)(case.like()), case.form.initial(case.args, case.dims)
    constant = bool((value == value.flatten()[0]).all())
    assert constant == (promised is not None)
    if promised is not None:
        assert torch.equal(value, torch.full_like(value, promised))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("form", "args"), PASSING)
def test_the_base_weight_passes_bit_for_bit(form: str, args: Args, dtype: torch.dtype, transposed: bool) -> None:
    shape = Weight(640, 480)
    case = Case(form, shape, shape, args)
    assert case.form.keeps_base(case.args, case.dims)
    module = build(Case(form, shape, shape, args), dtype=dtype)
    w = torch.randn(480, 640).T.to(dtype) if transposed else torch.randn(640, 480).to(dtype)
    w[3] = 0.0
    module.initialise(lambda name: torch.Generator(), {"w": w})
    assert torch.equal(module(w), w)
    assert torch.equal(module(w.contiguous()), w), "the sum of squares must not depend on the storage"


def test_scale_of_low_rank_forms() -> None:
    cases: list[tuple[Args, float]] = [
        ({}, 1.0),
        ({"alpha": 16}, 4.0),
        ({"alpha": 2.0}, 0.5),
        ({"alpha": 16, "rslora": True}, 8.0),
        ({"rslora": True}, 2.0),
    ]
    for args, scale in cases:
        module = shaken(Case("lora", Tokens(6), Tokens(7), {"r": 4, **args}))
        x = torch.randn(2, 3, 7, dtype=torch.float64)
        torch.testing.assert_close(module(x), scale * (x @ module.A.T) @ module.B.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", every(lambda c: c.form.takes_input and alone(c)), ids=str)
def test_affine_where_the_row_says_so_and_nowhere_else(case: Case) -> None:
    module, x, y = shaken(case), case.like(), case.like().flip(-1)
    mixed, separate = module(0.3 * x + 0.7 * y), 0.3 * module(x) + 0.7 * module(y)
    error = ((mixed - separate).abs().max() / separate.abs().max()).item()
    reason = case.form.not_affine(case.args, case.dims)
    assert (error < NUMERICAL) == (reason is None), (error, reason)


@pytest.mark.parametrize(
    "case",
    every(lambda c: c.form.not_affine(c.args, c.dims) is None and c.form.rank(c.args, c.dims) is not None),
    ids=str,
)
def test_rank_is_that_of_the_change(case: Case) -> None:
    """The rank of the change of a weight, or of the matrix of the affine map."""
    module, like = shaken(case), case.like()
    if isinstance(case.target, Weight):
        change = module(like)
    else:
        eye = torch.eye(like.shape[-1], dtype=torch.float64)[None]
        change = (module(eye) - module(torch.zeros_like(eye)))[0]
    assert torch.linalg.matrix_rank(change) == case.form.rank(case.args, case.dims)


T, W, KV = Tokens(8), Weight(8, 4), KeyValue(2, 4)
REFUSED = [
    ("lora", {"r": 9}, T, T, "P317", "r"),
    ("lora", {"r": 5}, Tokens(4), T, "P317", "r"),
    ("lora", {"r": 2}, Heads(2, 4), T, "P310", "input"),
    ("lora", {"r": 2}, T, W, "P310", None),
    ("lowrank", {"r": 5}, None, W, "P317", "r"),
    ("lowrank", {"r": 2}, None, T, "P310", None),
    ("adapter", {}, T, T, "P317", "r"),
    ("adapter", {"r": 2, "reduction": 2}, T, T, "P317", "r"),
    ("adapter", {"r": 2}, T, KV, "P310", None),
    ("adapter", {"r": 2}, None, T, "P310", "input"),
    ("bottleneck", {"r": 2}, T, Heads(2, 4), "P310", "input"),
    ("magnitude", {}, T, T, "P310", "input"),
    ("prefix", {"len": 3}, None, T, "P310", None),
    ("prefix", {"len": 3, "reparam": ("mlp", 0)}, None, KV, "P318", "reparam"),
    ("prompt", {"len": 3}, None, KV, "P310", None),
    ("prompt", {"len": 3, "keep": True}, None, T, "P317", "keep"),
    ("prompt", {"len": 3, "intrinsic": 2}, None, T, "P317", "intrinsic"),
    ("prompt", {"len": 3, "reparam": ("mlp", 8), "std": 1.0}, None, T, "P317", "std"),
    ("prefix", {"len": 3, "keep": True}, None, KV, "P317", "keep"),
    ("prefix", {"len": 3, "std": 1.0, "reparam": ("mlp", 8)}, None, KV, "P317", "std"),
    ("vector", {}, None, W, "P310", None),
    ("vector", {}, None, KV, "P310", None),
    ("gate", {}, Heads(2, 4), T, "P310", "input"),
    ("linear", {}, Heads(2, 4), T, "P310", "input"),
    ("linear", {}, T, W, "P310", None),
    ("sparse_adapter", {"density": 0.1}, T, T, "P317", "r"),
    ("sparse_adapter", {"density": 0.1, "r": 2}, T, W, "P310", None),
    ("masked", {"density": 0.1}, None, T, "P310", None),
    ("layer_attention", {}, Tokens(4), T, "P317", "input"),
    ("reft", {"r": 2}, Tokens(4), T, "P317", "input"),
    ("fusion", {"n": 2}, T, T, "P317", "r"),
    ("fusion", {"n": 2, "r": 2}, Tokens(4), T, "P317", "input"),
    ("lines", {"density": 0.1}, None, T, "P310", None),
    ("lines", {"density": 0.1, "by": "column"}, None, Vector(8), "P317", "by"),
]


@pytest.mark.parametrize(("name", "args", "source", "target", "code", "argument"), REFUSED)
def test_refused_with_a_code_and_the_argument_to_underline(
    name: str, args: dict[str, object], source: Shape | None, target: Shape, code: str, argument: str | None
) -> None:
    form = FORMS[name]
    with pytest.raises(PlacementError) as excinfo:
        form.shape(form.fill(args), Dims(source, target, 8))  # type: ignore[arg-type]
    assert (excinfo.value.code, excinfo.value.argument) == (code, argument)


def test_an_intervention_that_takes_nothing_off_may_change_the_width() -> None:
    form = FORMS["reft"]
    assert form.shape(form.fill({"r": 2, "subtract": False}), Dims(Tokens(4), T, 8)) == T


@pytest.mark.parametrize("name", [form.name for form in FORMS.values() if form.argument("reduction")])
def test_a_reduction_leaves_a_feature(name: str) -> None:
    form = FORMS[name]
    args = {
        n: value
        for n, value in {"n": 2 if name == "mixture" else 1, "density": 0.5, "factorised": False}.items()
        if form.argument(n)
    }
    most = 4 if name == "coupling" else 8  # of the halves
    assert form.shape(form.fill({**args, "reduction": most}), Dims(T, T, 8)) == T
    with pytest.raises(PlacementError) as excinfo:
        form.shape(form.fill({**args, "reduction": most + 1}), Dims(T, T, 8))
    codes = ("P312",) if form.text is None else ("P317", "P318")
    assert excinfo.value.code in codes
    assert excinfo.value.argument == "reduction"


def test_numbers_have_ranges() -> None:
    ranges = {
        (form.name, p.name): (p.low, p.high, p.open)
        for form in FORMS.values()
        for p in form.arguments
        if p.low is not None
    }
    assert ranges["lora", "alpha"] == ranges["lowrank", "alpha"] == (0.0, None, "low")
    assert ranges["lora", "dropout"] == ranges["adapter", "dropout"] == (0.0, 1.0, "high")
    assert {low for (_, name), (low, _, _) in ranges.items() if name in ("r", "len", "reduction")} == {1}


def test_published_prefix_counts() -> None:
    """BART-large MAM with mlp(800) (He et al.'s code) and T5-3B prefixes with mlp(512) (Lialin et
    al. 2024, Table 5).
    """
    prefix = FORMS["prefix"]
    bart = Dims(None, KeyValue(16, 64), 1024, 12)
    mam = prefix.count(prefix.fill({"len": 30, "reparam": ("mlp", 800)}), bart)
    assert (3 * mam.trained + 25_202_688, 3 * mam.stored) == (86_810_976, 2_211_840)
    t5 = Dims(None, KeyValue(32, 128), 1024, 24)
    assert 3 * prefix.count(prefix.fill({"len": 30, "reparam": ("mlp", 512)}), t5).trained == 304_246_272


def test_rows_can_be_listed_as_json() -> None:
    rows = {f.name: {p.name: [p.type, p.doc, p.default, p.choices] for p in f.arguments} for f in FORMS.values()}
    assert all(doc for form in json.loads(json.dumps(rows)).values() for _, doc, _, _ in form.values())
    assert all(f.paper and f.equation for f in FORMS.values())
    assert Vector(3) != Tokens(3)
    assert parameters(initialised(CASES[0]))
