"""The modules of forms: values, dtypes, first values, copies, compilation."""

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from peftc.forms.affine_module import Affine
from peftc.forms.module import FormModule, build, build_owner, parameter_dtype
from peftc.forms.shapes import Rows, Tokens
from tests.forms.cases import CASES, Case, alone, base, buffers, every, initialised, owner, parameters, seeded, shaken
from tests.reference import forms as reference

TOLERANCE = 1e-12


def parts(value: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def alpha(args: Mapping[str, Any]) -> float:
    """LoRA's α: the product of its factors is scaled by α / r, with rsLoRA by α / √r. α defaults to
    r.
    """
    value = float(args["r"] if args["alpha"] is None else args["alpha"])
    return value * args["r"] ** 0.5 if args["rslora"] else value


def kron_scale(args: Mapping[str, Any]) -> float:
    """LoKr's scale: α / r if the second factor has rank r, α if it is whole, 1 without α."""
    return 1.0 if args["alpha"] is None else float(args["alpha"]) / (args["r"] or 1)


def expected(case: Case, w: dict[str, Tensor], x: Tensor) -> tuple[Tensor, ...]:
    """The value of the hand-written reference."""
    args = case.args
    match case.name:
        case "adapter":
            return (reference.adapter(w, x, str(args["act"])),)
        case "bottleneck":
            turned = x if "tokens," not in str(case.input) else x.transpose(1, 2)
            value = reference.bottleneck(w, turned, str(args["act"]))
            return (value if "tokens," not in str(case.target) else value.transpose(1, 2),)
        case "coupling":
            return (reference.coupling(w, x, str(args["act"]), bool(args["inverse"])),)
        case "lora":
            return (reference.lora(w, x, alpha(args)),)
        case "lowrank":
            return (reference.lowrank(w, alpha(args)),)
        case "magnitude":
            return (reference.magnitude(w, x),)
        case "new_tokens":
            return (reference.new_tokens(w, x),)
        case "prefix" if case.grouped:
            return reference.prefix_group(w, case.sites - 1, 2, 4)
        case "prefix":
            return reference.prefix(w)
        case "sparse":
            return (reference.sparse(w, tuple(x.shape)),)
        case "lines":
            return (reference.lines(w, tuple(x.shape), str(args["by"])),)
        case "sparse_adapter":
            d_out, r = case.target.d, 4  # type: ignore[union-attr]
            return (reference.sparse_adapter(w, x, d_out, r, str(args["act"])),)
        case "fusion":
            return (reference.fusion(w, x, str(args["act"])),)
        case "masked":
            return (reference.masked(w, float(str(args["lower"])), float(str(args["upper"]))),)
        case "linear":
            return (x @ w["weight"].T + w.get("bias", 0.0),)
        case "mixture":
            return (reference.mixture(w, x, str(args["act"])),)
        case "prompt":
            return (reference.prompt(w).view(int(str(args["len"])), -1),)
        case "kron":
            return (reference.kron(w, x, kron_scale(args)),)
        case "hadamard":
            return (reference.hadamard(w, float(str(args["alpha"]))),)
        case "product":
            return (reference.product(w, x),)
        case "image":
            return (x @ w["c"],)
        case "orthogonal":
            return (reference.orthogonal(w, x, int(str(args["block"])), args["neumann"]),)  # type: ignore[arg-type]
        case "vera":
            return (reference.vera(w, x),)
        case "fastfood":
            return (reference.fastfood(w, tuple(x.shape)),)
        case "svd":
            return (reference.svd(w, x, 16.0 if args["alpha"] else 4.0),)
        case "phm":
            return (reference.phm(w, x, str(args["act"])),)
        case "reft":
            return (reference.reft(w, x, bool(args["orthogonal"]), bool(args["subtract"])),)
        case "ladder":
            t = float(str(args["temperature"]))
            return (reference.ladder_end(w, reference.rung(w, x, None, str(args["act"]), t)),)
        case "layer_attention":
            return (reference.layer_attention(w, [x]),)
        case "hyper":
            at = (case.sites - 1, (case.sites - 1) % 2)
            net = at[1] if args["nets"] == "positions" else 0
            w = reference.hyper_of_stack(w, 0) if args["nets"] == "stacks" else w
            return (reference.hyper(w, x, *at, net, str(args["act"])),)
        case "gate" if args["rows"] is not None:
            return (reference.gate(w, x),)
        case "gate":
            return (reference.gate(w, x).view(-1, *[1] * (len(case.like().shape) - 1 + ("heads" in str(case.target)))),)
        case "vector" if isinstance(case.target, Rows):
            return (w["scale"].unsqueeze(1),)
        case _:
            return (w["scale"],)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_hand_written_reference(case: Case) -> None:
    module, x = shaken(case), case.like()
    for got, want in zip(parts(module(x)), expected(case, parameters(module) | buffers(module), x), strict=True):
        torch.testing.assert_close(got, want.expand_as(got), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_parameters_are_float32_and_values_have_the_dtype_of_the_input(case: Case, dtype: torch.dtype) -> None:
    module = initialised(case, dtype)
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    assert {p.dtype for p in parameters(module).values()} == {wide}
    assert {part.dtype for part in parts(module(case.like(dtype)))} == {dtype}


def test_dtype_argument_overrides() -> None:
    assert parameter_dtype({"dtype": "bfloat16"}, torch.float32) == torch.bfloat16
    module = build(Case("vector", CASES[0].target, None, {"dtype": "float64"}), dtype=torch.float16)
    assert (module.scale.dtype, module(torch.ones(1, dtype=torch.float16)).dtype) == (torch.float64, torch.float16)


@pytest.mark.parametrize("case", every(lambda c: c.like().ndim > 2 and c.form.takes_input), ids=str)
def test_examples_of_a_batch_do_not_see_each_other(case: Case) -> None:
    module, x = shaken(case), case.like()
    for whole, one in zip(parts(module(x)), parts(module(x[1:2])), strict=True):
        torch.testing.assert_close(whole[1:2], one, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_first_values_depend_on_the_parameter_alone(case: Case) -> None:
    names: list[str] = []

    def generator(name: str) -> torch.Generator:
        names.append(name)
        torch.rand(3)
        return seeded(name)

    first, again, single = owner(case), owner(case), owner(case, torch.float32)
    before = torch.get_rng_state()
    first.initialise(seeded, base(case))
    assert torch.equal(torch.get_rng_state(), before), "the global generator was used"
    again.initialise(generator, base(case))
    single.initialise(seeded, base(case, torch.float32))
    is_computed = case.name in ("magnitude", "new_tokens")  # from the weight
    names_drawn = [] if is_computed else [name for name, _ in first.named_parameters()]
    assert sorted(names) == sorted(names_drawn)
    for name, value in first.named_parameters():
        assert torch.equal(value, again.get_parameter(name))
        torch.testing.assert_close(value.float(), single.get_parameter(name), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_construction_leaves_the_global_generator_alone(case: Case) -> None:
    before = torch.get_rng_state()
    owner(case)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("args", "name", "low", "high"),
    [
        ({"init": "bert"}, "down", 0.019, 0.021),
        ({"init": "houlsby"}, "up", 0.0085, 0.0092),  # N(0, 0.01) truncated at two deviations: 0.88 of the deviation
        ({"init": "lora"}, "down", 0.98 / 3**0.5 / 300**0.5, 1.02 / 3**0.5 / 300**0.5),  # U(±1/√d)
        ({"init": "lora"}, "up", 0.0, 0.0),
    ],
)
def test_deviation_of_first_values(args: dict[str, object], name: str, low: float, high: float) -> None:
    module = initialised(Case("adapter", Tokens(300), Tokens(300), {"r": 200, **args}))  # type: ignore[dict-item]
    assert low <= float(module.get_parameter(name).detach().std()) <= high


NORMED = every(lambda c: c.name in ("ladder", "hyper") or bool(c.args.get("norm_in") or c.args.get("norm_out")))


@pytest.mark.parametrize("case", NORMED, ids=str)
def test_layer_norms_start_at_weight_1_and_bias_0(case: Case) -> None:
    norms = {name: p for name, p in parameters(initialised(case)).items() if "norm" in name}
    assert norms
    for name, parameter in norms.items():
        assert torch.equal(parameter, torch.full_like(parameter, "weight" in name)), name


@pytest.mark.parametrize("case", every(alone), ids=str)
def test_every_parameter_gets_a_gradient(case: Case) -> None:
    module = shaken(case)
    values = parts(module(case.like()))
    sum(part.pow(2).sum() for part in values).backward()
    for name, parameter in parameters(module).items():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_no_gradient_through_the_norm_of_magnitude() -> None:
    case = next(c for c in CASES if c.name == "magnitude")
    module, w = shaken(case), case.like().requires_grad_()
    module(w).sum().backward()
    factor = module.m / w.norm(dim=1)
    torch.testing.assert_close(w.grad, factor[:, None].expand_as(w).detach())


@pytest.mark.parametrize("case", every(lambda c: bool(c.args.get("dropout"))), ids=str)
def test_dropout_follows_the_training_flag(case: Case) -> None:
    module, x = shaken(case), case.like()
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))


@pytest.mark.parametrize("case", every(alone), ids=str)
def test_copies_and_pickles(case: Case) -> None:
    module, x = shaken(case), case.like()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(torch.equal(a, b) for a, b in zip(parts(module(x)), parts(twin(x)), strict=True))
        next(iter(parameters(twin).values())).data.add_(1.0)
        assert not all(torch.equal(a, b) for a, b in zip(parts(module(x)), parts(twin(x)), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_without_storage(case: Case) -> None:
    with FakeTensorMode():
        fake = parts(initialised(case, torch.bfloat16)(torch.empty(case.like().shape, dtype=torch.bfloat16)))
    real = parts(initialised(case)(case.like()))
    assert [part.shape for part in fake] == [part.shape for part in real]
    build_owner(case, dtype=torch.float32, device="meta").initialise(seeded, base(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiles_into_one_graph(case: Case) -> None:
    module, x = shaken(case), case.like()
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    assert all(torch.equal(a, b) for a, b in zip(parts(compiled(x)), parts(module(x)), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(case: Case, dtype: torch.dtype) -> None:
    module, x = shaken(case, torch.float32), case.like(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        values = parts(module(x))
    assert {part.dtype for part in values} == {dtype}
    for got, want in zip(values, parts(module(x)), strict=True):
        torch.testing.assert_close(
            got.float(), want.float(), rtol=0.1, atol=max(0.3, 0.03 * float(want.detach().abs().max()))
        )


def test_repr_names_form_and_arguments() -> None:
    module: FormModule = initialised(CASES[0])
    assert "r=4" in repr(module)
    assert "down: (4, 12)" in repr(module)


LINEAR = [
    case for case in CASES if isinstance(case.input, Tokens) and case.form.not_affine(case.args, case.dims) is None
]


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_fold_of_an_affine_form_equals_its_forward(case: Case) -> None:
    module, x = shaken(case).eval(), case.like()
    assert isinstance(case.input, Tokens)
    folded = module.fold(Affine.identity(case.input.d, torch.float64, torch.device("cpu")))
    bias = 0.0 if folded.bias is None else folded.bias
    torch.testing.assert_close(module(x), x @ folded.matrix().T + bias, rtol=TOLERANCE, atol=TOLERANCE)
