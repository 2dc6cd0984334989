"""Random forms: what follows from a text holds for what it computes.

An interpreter that reads the text alone (`interpreter`) judges shape, count, first value, affinity,
rank, folds and the code that a form becomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from peftc.equations.checks import check_form
from peftc.equations.definition import text_form
from peftc.forms.affine_module import Affine
from peftc.forms.form import Args, Count, Dims, Form
from peftc.forms.module import FormModule, build, seeded
from peftc.forms.shapes import Tokens, Weight
from peftc.syntax import ast
from peftc.syntax.parser import parse_text
from tests.equations.interpreter import evaluate
from tests.equations.random_forms import D_IN, D_OUT, R, Writer

HIDDEN = [("hidden", seed) for seed in range(150)]
AFFINE = [("affine", seed) for seed in range(60)]
WEIGHTS = [("weight", seed) for seed in range(60)]
ARGS: Args = {"r": R, "s": 2.0, "seed": 0, "dtype": None}
SIZES = {"d": {"x": D_IN, "out": D_OUT}, "rows": {"out": D_OUT}, "cols": {"out": D_IN}}


@dataclass
class Case:
    form: ast.Form
    row: Form
    module: FormModule
    dims: Dims

    @property
    def values(self) -> dict[str, Any]:
        """Numbers and parameters, by name."""
        tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        return {"r": R, "s": 2.0, **{name: tensor.detach() for name, tensor in tensors.items()}}

    def expected(self, x: Tensor) -> Tensor:
        """The value for each token of x (batch, tokens, d), one by one; of a weight, once."""
        if isinstance(self.dims.target, Weight):
            return evaluate(self.form, self.values)
        tokens = [evaluate(self.form, {**self.values, "x": token}) for token in x.flatten(0, -2)]
        return torch.stack(tokens).reshape(*x.shape[:-1], -1)


@dataclass(frozen=True)
class Instance:
    form: Form
    args: Args
    dims: Dims


def text_of(kind: str, seed: int) -> str:
    return Writer(seed, nonlinear=kind == "hidden", of_weight=kind == "weight").text(f"form_{seed}")


def case_of(kind: str, seed: int) -> Case:
    spec = parse_text(f"peft 2\n{text_of(kind, seed)}")
    (form,) = spec.statements
    assert isinstance(form, ast.Form)
    hidden, weight = Dims(Tokens(D_IN), Tokens(D_OUT), D_IN), Dims(None, Weight(D_OUT, D_IN), D_IN)
    dims = weight if kind == "weight" else hidden
    row = text_form(form, spec.source)
    module = build(Instance(row, ARGS, dims), dtype=torch.float64).eval()
    module.initialise(lambda name: seeded(f"{seed}/{name}"), {})
    module.fix("place")
    return Case(form, row, module, dims)


def sample(seed: int) -> Tensor:
    return torch.randn(2, 3, D_IN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def randomize(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / 2)


@pytest.mark.parametrize(("kind", "seed"), [*HIDDEN, *AFFINE, *WEIGHTS])
def test_a_random_form(kind: str, seed: int) -> None:
    case, x = case_of(kind, seed), sample(seed)
    row, dims = case.row, case.dims
    unused = {error.code for error in check_form(case.form)}
    assert unused <= {"P114"}  # the writer may leave a `let` unused, and has `s` and `r` in each form

    first = case.module(x)
    torch.testing.assert_close(first, case.expected(x), rtol=0, atol=1e-9)
    if (number := row.initial(ARGS, dims)) is not None:
        exact = number in (0.0, 1.0)  # from these, a plan says that the model is unchanged
        torch.testing.assert_close(first, torch.full_like(first, number), rtol=0, atol=0 if exact else 1e-6)

    randomize(case.module, seed)
    value, expected = case.module(x), case.expected(x)
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-9)
    shape = row.shape(ARGS, dims)
    assert shape == dims.target
    assert tuple(value.shape[-len(expected.shape) :]) == tuple(expected.shape)

    sizes = [line for line in case.form.body if isinstance(line, ast.Parameter) and not line.fixed]
    count = sum(prod(size_of(size) for size in line.sizes) for line in sizes)
    assert row.count(ARGS, dims) == Count(sum(p.numel() for p in case.module.parameters()), count)
    check_gradients(case.module, x)

    if kind == "weight":
        rank = row.rank(ARGS, dims)
        assert rank is None or torch.linalg.matrix_rank(value) <= rank
        return
    check_affinity(case, x)


def check_gradients(module: FormModule, x: Tensor) -> None:
    """A gradient reaches each parameter that the value depends on, and no state."""
    states = [module.get_buffer(name).requires_grad_() for name in module.states()]
    parameters = list(module.parameters())
    value = module(x)
    gradients = [None] * len(states + parameters)
    if value.requires_grad:
        gradients = torch.autograd.grad(value.sum(), [*states, *parameters], allow_unused=True)
    assert all(gradient is None for gradient in gradients[: len(states)])
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients[len(states) :], strict=True):
            if gradient is None:  # what an unused `let` has
                parameter += 1
                assert module(x).equal(value)
                parameter -= 1


def check_affinity(case: Case, x: Tensor) -> None:
    """The verdict against a test of affinity at random points; the fold against the equation."""
    row, module, dims = case.row, case.module, case.dims
    y = sample(7_919)
    middle = module((x + y) / 2) - (module(x) + module(y)) / 2
    reason = row.not_affine(ARGS, dims)
    assert (reason is None) == bool(middle.abs().max() < 1e-9), reason
    if reason is not None:
        return
    zero = module(torch.zeros_like(x))
    assert row.shifts(ARGS, dims) or torch.equal(zero, torch.zeros_like(zero))
    affine = module.fold(Affine.identity(D_IN, torch.float64, torch.device("cpu")))
    matrix = affine.matrix() if affine.products or affine.diagonal is not None else torch.zeros(D_OUT, D_IN)
    result = x @ matrix.T + (0 if affine.bias is None else affine.bias)
    torch.testing.assert_close(result, module(x), rtol=0, atol=1e-9)
    rank = row.rank(ARGS, dims)
    assert rank is None or torch.linalg.matrix_rank(matrix) <= rank


def size_of(node: ast.Expr) -> int:
    match node:
        case ast.Number(value):
            return int(value)
        case ast.Name("r"):
            return R
        case ast.Call(function, (ast.Name(name),)):
            return SIZES[function][name]
        case _:
            raise AssertionError(node)


def gradients(value: Tensor, parameters: list[nn.Parameter]) -> Sequence[Tensor | None]:
    """Of the sum of a value; None for a parameter whose changes it does not show."""
    if not value.requires_grad:
        return [None] * len(parameters)
    return torch.autograd.grad(value.sum(), parameters, allow_unused=True)


@pytest.mark.parametrize(("kind", "seed"), [*HIDDEN[:40], *WEIGHTS[:20]])
def test_gradients_of_a_random_form(kind: str, seed: int) -> None:
    """Against those of the interpreter."""
    case, x = case_of(kind, seed), sample(seed)
    randomize(case.module, seed)
    parameters = list(case.module.parameters())
    if not parameters:
        return
    names = {"r": R, "s": 2.0, **dict(case.module.named_parameters()), **dict(case.module.named_buffers())}
    if kind == "weight":
        reference = evaluate(case.form, names)
    else:
        reference = torch.stack([evaluate(case.form, {**names, "x": token}) for token in x.flatten(0, -2)])
    own, expected = gradients(case.module(x), parameters), gradients(reference, parameters)
    for a, b in zip(own, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=0, atol=1e-8)
