"""In a batch of several tasks each row has the values and gradients of its own task alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from peftc.concurrency.context import Choice, ChoiceVar
from peftc.diagnostics import PeftcError
from peftc.equations.definition import TextForm
from peftc.forms.module import FormModule
from peftc.forms.shapes import Tokens, Vector, Weight
from peftc.task_modules.stacked_module import StackedForms
from peftc.task_modules.tasked_module import Chosen, Tasked
from tests.forms.cases import CASES, Case, seeded, shaken

TASKS = ("a", "b", "c", "d")
ROWS = (2, 0, 2, 1, 0, 2)  # no row is of the last task
# Their states go from layer to layer: tests/laws/test_cross_layer_state.py
PER_ROW = [
    c for c in CASES if not isinstance(c.target, Weight | Vector) and c.name not in ("ladder", "layer_attention")
]
# Forms whose equation does not hold for stacked parameters: a call for each task.
TASK_BY_TASK = {"kron", "phm", "mixture", "fusion", "hyper", "sparse_adapter"}


def tasked(
    case: Case, dtype: torch.dtype = torch.float64, rows: tuple[int, ...] = ROWS, names: tuple[str, ...] = TASKS
) -> Tasked:
    """Forms of tasks with different values, in a context with these rows."""
    forms = {name: shaken(case, dtype) for name in names}
    first = forms[names[0]]
    for task, form in forms.items():
        if case.in_part:  # tasks have this part in common
            form.__dict__["owner_module"] = first.owner_module
        for name, parameter in own_parameters(form).items():
            with torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=seeded(task + name)).to(dtype))
    chosen = Chosen(names)
    chosen.variable = ChoiceVar(Choice(task=chosen.rows(rows)))
    return Tasked(chosen, forms).eval()


def own_parameters(form: FormModule) -> dict[str, Tensor]:
    own = dict(form.named_parameters())
    return own if own or form.owner_module is None else dict(form.owner_module.named_parameters())


def parts(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def row_by_row(form: Tasked, x: Tensor) -> tuple[Tensor, ...]:
    """What each row's own task gives for this row alone, with the dimensions of a batch."""
    rows = [parts(form.form(TASKS[task])(x[i : i + 1])) for i, task in enumerate(ROWS)]
    ndim = x.ndim if len(rows[0]) == 1 else 4
    return tuple(
        torch.cat([part.view(*[1] * (ndim - part.ndim), *part.shape) for part in column])
        for column in zip(*rows, strict=True)
    )


def gradients(form: Tasked, values: tuple[Tensor, ...], x: Tensor) -> dict[str, Tensor | None]:
    """Gradients of a sum in which all entries have different weights."""
    loss = sum((v * torch.randn(v.shape, generator=seeded(f"{i}")).to(v)).sum() for i, v in enumerate(values))
    every = {f"{task}.{n}": p for task in TASKS for n, p in own_parameters(form.form(task)).items()} | {"x": x}
    wanted = {name: p for name, p in every.items() if p.requires_grad}
    assert isinstance(loss, Tensor)
    return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values()), allow_unused=True), strict=True))


@pytest.mark.parametrize("way", ["stacked", "task by task"])
@pytest.mark.parametrize("case", PER_ROW, ids=str)
def test_rows_are_those_of_their_task_alone(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StackedForms, "is_cheap", lambda *_: way == "stacked")
    form, x = tasked(case), case.like(batch=len(ROWS)).requires_grad_()
    intrinsic = case.values.get("intrinsic") is not None
    reparametrised_prefix = case.name == "prefix" and case.grouped
    assert (form.stacked is None) == (case.name in TASK_BY_TASK or intrinsic or reparametrised_prefix)
    want = row_by_row(form, x)
    values = parts(form(x))
    for value, expected in zip(values, want, strict=True):
        torch.testing.assert_close(value.expand_as(expected), expected, rtol=0, atol=1e-12)
    got, wanted = (
        gradients(form, tuple(v.expand_as(w) for v, w in zip(vs, want, strict=True)), x) for vs in (values, want)
    )
    for name, gradient in wanted.items():
        own = got[name]
        assert (own is None) == (gradient is None), name
        if own is not None:
            torch.testing.assert_close(own, gradient, rtol=0, atol=1e-11)
    if not case.form.common(case.args):
        assert all(got[name] is None for name in got if name.startswith("d."))


@pytest.mark.parametrize("case", [c for c in PER_ROW if c.name not in TASK_BY_TASK][::3], ids=str)
def test_parameters_in_another_dtype_than_the_state(case: Case) -> None:
    form, x = tasked(case, torch.float32), case.like(torch.bfloat16, batch=len(ROWS))
    for value, expected in zip(parts(form(x)), row_by_row(form, x), strict=True):
        assert value.dtype == torch.bfloat16
        torch.testing.assert_close(value.expand_as(expected), expected, rtol=2e-2, atol=2e-2)


LORA = next(case for case in CASES if case.name == "lora")


def test_rows_with_repeats_in_any_order() -> None:
    """Each example twice, as beams are; examples in order or not; one task alone."""
    for rows in ((2, 0, 1), (0, 1, 2), (1, 1, 1), (3, 3, 0)):
        form = tasked(LORA, rows=rows)
        x = LORA.like(batch=6)
        want = torch.cat([form.form(TASKS[rows[i // 2]])(x[i : i + 1]) for i in range(6)])
        torch.testing.assert_close(form(x), want, rtol=0, atol=1e-12)


def test_many_parameters_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stacked has at most as many entries as the state, or a fixed number a task."""
    form = tasked(LORA)
    assert form.stacked is not None
    x = LORA.like(batch=len(ROWS))
    calls: list[int] = []
    joined = StackedForms.joined
    monkeypatch.setattr(StackedForms, "joined", lambda *args: calls.append(1) or joined(*args))
    form(x)
    assert calls == [1]
    vars(form)["stacked"] = replace(form.stacked, size=1 << 17)
    torch.testing.assert_close(form(x), row_by_row(form, x)[0], rtol=0, atol=1e-12)
    assert calls == [1]


def test_forms_that_differ_are_not_stacked() -> None:
    narrow, wide = (Case("lora", LORA.target, LORA.input, {"r": r}) for r in (2, 4))
    form = tasked(narrow)
    forms = {**dict(form.tasks.items()), "b": shaken(wide)}
    mixed = Tasked(form.chosen, forms).eval()  # type: ignore[arg-type]
    assert mixed.stacked is None
    x = LORA.like(batch=len(ROWS))
    torch.testing.assert_close(mixed(x), row_by_row(mixed, x)[0], rtol=0, atol=1e-12)


def test_copies_compute_with_their_own_parameters() -> None:
    form = tasked(LORA)
    x = LORA.like(batch=len(ROWS))
    want = form(x)
    for twin in (copy.deepcopy(form), pickle.loads(pickle.dumps(form))):
        rows = twin.chosen.rows(ROWS)
        twin.chosen.variable.default = Choice(task=rows)
        with torch.no_grad():
            for parameter in form.parameters():
                parameter.add_(1.0)
        assert torch.equal(twin(x), want)
        with torch.no_grad():
            for parameter in form.parameters():
                parameter.sub_(1.0)


def test_dropout_draws_for_each_row_while_training() -> None:
    case = Case("lora", LORA.target, LORA.input, {"r": 4, "dropout": 0.5})
    form = tasked(case, rows=(1, 2)).train()
    x = case.like(batch=1).expand(2, -1, -1)
    with torch.no_grad():
        for name, parameter in form.form("c").named_parameters():
            parameter.copy_(form.form("b").get_parameter(name))
    one, other = form(x)
    assert not torch.allclose(one, other)
    form.eval()
    one, other = form(x)
    assert torch.allclose(one, other)


def test_one_graph_serves_all_batches() -> None:
    """Under `torch.compile`, a graph depends on how many rows there are, not on their tasks."""
    form = tasked(LORA)
    x = LORA.like(batch=len(ROWS)).requires_grad_()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fast = torch.compile(form, backend=counter, fullgraph=True)
    for rows in (ROWS, (0, 1, 2, 3, 0, 1), (3, 3, 3, 3, 3, 3)):
        form.chosen.variable.default = Choice(task=form.chosen.rows(rows))
        want = torch.cat([form.form(TASKS[task])(x[i : i + 1]) for i, task in enumerate(rows)])
        got = fast(x)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        wanted, own = gradients(form, (want,), x), gradients(form, (got,), x)
        for name, gradient in wanted.items():
            value = own[name]
            assert value is not None
            zero = torch.zeros_like(value)  # of a task that no row has
            torch.testing.assert_close(value, zero if gradient is None else gradient, rtol=0, atol=1e-11)
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_forms_that_are_not_stacked_break_the_graph() -> None:
    case = next(case for case in CASES if case.name == "kron")
    form, x = tasked(case), case.like(batch=len(ROWS))
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(form, backend="eager")(x), row_by_row(form, x)[0], rtol=0, atol=1e-12)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="cannot be stacked"):
        torch.compile(form, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()


PLAIN = (Tokens, type(None))
ADDED = [c for c in PER_ROW if isinstance(c.form, TextForm) and {type(c.target), type(c.input)} <= {*PLAIN}]
ADDED = [c for c in ADDED if c.name != "prompt"]  # whose value is joined to a state, not added


@pytest.mark.parametrize("way", ["stacked", "task by task", "one task"])
@pytest.mark.parametrize("case", ADDED, ids=str)
def test_added_to_a_state(case: Case, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StackedForms, "is_cheap", lambda *_: way == "stacked")
    rows = (1,) * len(ROWS) if way == "one task" else ROWS
    form, x = tasked(case, rows=rows), case.like(batch=len(ROWS)).requires_grad_()
    if way == "one task":
        form.chosen.variable.default = Choice(task="b")
    value = form(x)
    assert isinstance(value, Tensor)
    h = torch.randn(*x.shape[:-1], value.shape[-1], generator=seeded("h"), dtype=x.dtype)
    got, want = form.added_to(h, x), h + value
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    wanted, own = gradients(form, (want,), x), gradients(form, (got,), x)
    for name, gradient in wanted.items():
        value = own[name]
        assert (value is None) == (gradient is None), name
        if value is not None:
            torch.testing.assert_close(value, gradient, rtol=0, atol=1e-11)


@pytest.mark.parametrize("of_h", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_x", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_sum_has_the_dtype_of_the_state(of_h: torch.dtype, of_x: torch.dtype, autocast: bool) -> None:
    form, x = tasked(LORA, torch.float32), LORA.like(of_x, batch=len(ROWS))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = form(x)
        assert isinstance(value, Tensor)
        h = torch.randn(value.shape, generator=seeded("h")).to(of_h)
        got = form.added_to(h, x)
    assert got.dtype == of_h
    torch.testing.assert_close(got.float(), h.float() + value.float(), rtol=2e-2, atol=2e-2)


def test_a_state_with_more_tokens_than_the_input() -> None:
    form, x = tasked(LORA), LORA.like(batch=len(ROWS))[:, :1]
    value = form(x)
    assert isinstance(value, Tensor)
    h = torch.randn(len(ROWS), 5, value.shape[-1], generator=seeded("h"), dtype=x.dtype)
    torch.testing.assert_close(form.added_to(h, x), h + value, rtol=0, atol=1e-12)


class Operations(TorchDispatchMode):
    """The names of all operations, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_forward_has_as_few_operations_for_many_tasks_as_for_few() -> None:
    """A copy of each parameter of the rows, and two products, of which the second adds."""
    x = LORA.like(batch=len(ROWS))
    for count in (4, 64):
        form = tasked(LORA, names=tuple(f"t{i}" for i in range(count)))
        h = x.new_zeros(form(x).shape)  # type: ignore[union-attr]
        with torch.no_grad(), Operations() as operations:
            form.added_to(h, x)
        assert sorted(operations.names) == ["baddbmm", "bmm", "stack", "stack"]


@pytest.mark.parametrize("case", PER_ROW, ids=str)
def test_no_forward_waits_for_a_device(case: Case) -> None:
    """After a first forward, no operation gives Python a number of a tensor, or a size by one."""
    form, x = tasked(case), case.like(batch=len(ROWS))
    form(x)
    with torch.no_grad(), Operations() as operations:
        form(x)
    waits = {"_local_scalar_dense", "item", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim", "_unique2"}
    assert not waits & set(operations.names)


@pytest.mark.parametrize("rows", [ROWS, (1,) * len(ROWS)])
def test_hooks_see_the_rows_of_their_task(rows: tuple[int, ...]) -> None:
    form, x = tasked(LORA, rows=rows), LORA.like(batch=len(ROWS))
    want = form(x)
    assert isinstance(want, Tensor)
    seen: list[Tensor] = []
    with form.form("b").register_forward_hook(lambda module, args, value: seen.append(args[0]) or 2 * value):
        got = form(x)
    of_b = torch.tensor([task == TASKS.index("b") for task in rows])
    assert torch.equal(torch.cat(seen), x[of_b])
    torch.testing.assert_close(got, torch.where(of_b[:, None, None], 2 * want, want), rtol=0, atol=1e-12)


def test_parametrized_forms_are_called_by_themselves() -> None:
    """`torch.nn.utils.parametrize` makes a class of its own for a module."""
    form, x = tasked(LORA), LORA.like(batch=len(ROWS))
    torch.nn.utils.parametrize.register_parametrization(form.form("b"), "A", torch.nn.Softplus())
    assert form.stacked is not None
    torch.testing.assert_close(form(x), row_by_row(form, x)[0], rtol=0, atol=1e-12)


def replace_parameter(form: FormModule) -> None:
    form.A = torch.nn.Parameter(torch.randn(form.A.shape, generator=seeded("new"), dtype=torch.float64))  # type: ignore[attr-defined]


@torch.no_grad()
def change_in_place(form: FormModule) -> None:
    for parameter in form.parameters():
        parameter.data.copy_(parameter + 1.0)


CHANGES: dict[str, Callable[[Tasked], object]] = {
    "in place": lambda form: change_in_place(form.form("b")),
    "other parameters": lambda form: replace_parameter(form.form("a")),
    "assigned": lambda form: form.load_state_dict({n: v + 1.0 for n, v in form.state_dict().items()}, assign=True),
    "data": lambda form: [setattr(p, "data", p.data + 1.0) for p in form.form("c").parameters()],
    "another form": lambda form: form.tasks.update({"a": shaken(LORA, torch.float64)}),
    "a parametrization": lambda form: torch.nn.utils.parametrize.register_parametrization(
        form.form("b"), "A", torch.nn.Softplus()
    ),
    "a hook": lambda form: form.form("c").register_forward_hook(lambda module, inputs, value: 2 * value),
}


@pytest.mark.parametrize("change", CHANGES)
def test_sums_follow_changes_between_calls(change: str) -> None:
    """What is known of rows and forms of an earlier call says nothing of values."""
    form, x = tasked(LORA), LORA.like(batch=len(ROWS))
    h = torch.randn(row_by_row(form, x)[0].shape, generator=seeded("h"), dtype=x.dtype)
    before = form.added_to(h, x)
    CHANGES[change](form)
    want = h + row_by_row(form, x)[0]
    assert not torch.allclose(before, want)
    torch.testing.assert_close(form.added_to(h, x), want, rtol=0, atol=1e-12)
    torch.testing.assert_close(form.to(torch.float32).added_to(h, x), want, rtol=0, atol=1e-4)


def test_copies_add_their_own_parameters() -> None:
    """Also those of forms that have computed a sum before."""
    form, x = tasked(LORA), LORA.like(batch=len(ROWS))
    h = torch.zeros_like(row_by_row(form, x)[0])
    want = form.added_to(h, x)
    twins = copy.deepcopy(form), pickle.loads(pickle.dumps(form))
    change_in_place(form.form("c"))
    for twin in twins:
        twin.chosen.variable.default = Choice(task=twin.chosen.rows(ROWS))
        assert torch.equal(twin.added_to(h, x), want)
    assert not torch.allclose(form.added_to(h, x), want)


def test_edits_of_weights_are_refused_also_beside_others_of_their_tasks() -> None:
    """Forms of one model have the sorted rows in common, and not whether rows are possible."""
    form, x = tasked(LORA), LORA.like(batch=len(ROWS))
    form(x)
    lowrank = next(case for case in CASES if isinstance(case.target, Weight) and case.name == "lowrank")
    of_weight = tasked(lowrank)
    vars(of_weight)["chosen"] = form.chosen
    with pytest.raises(PeftcError, match="P536"):
        of_weight(x)
