"""Folds edits into the parameters of a module: an interpreter of equations over affine values."""

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from peftc.concurrency.interrupts import shielded
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.folding.computed_weight import has_plain_form, has_value_hooks, is_computed, stored_values
from peftc.folding.own_forward import base_class, computes_product, is_edited
from peftc.folding.report import Change
from peftc.folding.unrounded_parameters import CannotFold, Fold, UnroundedParameters, sum_dtype
from peftc.forms.affine_module import Affine
from peftc.forms.module import FormModule, has_values
from peftc.forms.shapes import Tokens
from peftc.planning.foldability.affine import NotAffine, Side, is_linear, is_table, show_term
from peftc.planning.ir import Arithmetic, Constant, FormCall, Read, SiteEdit, Term, subterms
from peftc.syntax.numbers import ARITHMETIC

Value = Affine | Tensor  # a Tensor is constant: a number, a vector (d_out,), or a weight in equations of w


def combine(
    model: nn.Module, module: str, folds: Sequence[Fold], plain: bool = False, new_biases: bool = True
) -> dict[str, tuple[Tensor, Change]]:
    """The parameters of `module` after all folds into it, by dotted name. Nothing is written.
    `plain`: whether a parameter may take the place of what computes a weight. `new_biases`: whether
    a module may get one that it does not have.

    w and b first, as when the model runs; then what is done to the output; what is done to the
    input last and backwards, since W (E2 (E1 x)) = ((W E2) E1) x. Sums are in float32 (float64).
    Raises: P530 (NaN or infinite entries), CannotFold (the module has no place for a bias, or has a
    forward of its own that computes something else).
    """
    edits = tuple(dict.fromkeys(fold.site_edit.edit for fold in sorted(folds, key=lambda fold: fold.position)))
    with whole_products():
        values = dict(unrounded(model, module, folds, new_biases).rounded(edits))
    for name, (value, _) in values.items():
        owner, _, attribute = name.rpartition(".")
        own = model.get_submodule(owner)
        if not is_computed(own, attribute) or stored_values(own, attribute, value) is not None:
            continue
        has_plain = has_plain_form(own, attribute)
        if not plain or not has_plain:
            reason = f"`{name}` is computed from other parameters, no values of which give the folded weight"
            way_out = "; a plain parameter can take its place only where all edits fold" if has_plain else ""
            raise CannotFold(edits[-1], reason + way_out)
    return values


@shielded
def whole_products() -> Generator[None]:
    """Inside of the block products are those of float32, whatever the process has chosen."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def unrounded(model: nn.Module, module: str, folds: Sequence[Fold], new_biases: bool = True) -> UnroundedParameters:
    """As `combine`, before the parameters are rounded."""
    parameters = UnroundedParameters(model, module, new_biases)
    ordered = sorted(folds, key=lambda fold: fold.position)
    for fold in ordered:
        _check_forward(fold, model.get_submodule(module))
    for fold in ordered:
        _apply(fold, parameters, "weight")
    for side, folds_of_side in (("output", ordered), ("input", ordered[::-1])):
        for fold in folds_of_side:
            if fold.target.side == side:
                _apply(fold, parameters, side)
    return parameters


def _check_forward(fold: Fold, module: nn.Module) -> None:
    """Raises: CannotFold where an edit of h or x folds into a module that is no plain product, or
    whose hooks run between the product and the edit.
    """
    weight = fold.target.weight
    if fold.target.side == "weight" or weight is None or fold.target.site.bare or weight.stacked_slice is not None:
        return
    if not computes_product(module, weight):
        cls = base_class(module)
        reason = f"`forward` of {cls.__name__} computes something else than its {weight.attribute} and bias say"
        raise CannotFold(fold.site_edit.edit, reason)
    if not is_edited(module) and has_value_hooks(module):
        reason = f"hooks of `{fold.target.site.module}` run between its product and the edit"
        raise CannotFold(fold.site_edit.edit, reason)


def _apply(fold: Fold, parameters: UnroundedParameters, side: str) -> None:
    """Folds the equations of w and b (side "weight"), or those of the hidden state."""
    site_edit, target = fold.site_edit, fold.target
    selected = [(a.state in ("w", "b")) == (side == "weight") for a in site_edit.assigns]
    if not any(selected):
        return
    assigns = tuple(a for a, is_selected in zip(site_edit.assigns, selected, strict=True) if is_selected)
    lets = tuple((sum(selected[:i]), term) for i, term in site_edit.lets)  # after the same equations as before
    part = replace(site_edit, assigns=assigns, lets=lets)
    bias = parameters.bias(target)
    own = target.weight or bias  # a place of a bias alone has no equation of the weight
    assert own is not None
    values = parameters.read(own), None if bias is None else parameters.read(bias)
    folded = fold_affine(part, fold.modules, *values, "weight" if side == "weight" else target.side)
    if isinstance(folded, Refusal):
        raise CannotFold(fold.site_edit.edit, folded.reason)
    if target.weight is not None:
        parameters.write(target.weight, folded[0])
    if folded[1] is not None:
        parameters.write(bias or parameters.create_bias(fold), folded[1])
    elif bias is not None and values[1] is not None and side != "weight":
        parameters.write(bias, torch.zeros_like(values[1]))  # the edit has replaced what had it


@dataclass(frozen=True)
class Refusal:
    """Why nothing was folded."""

    reason: str


def fold_terms(
    site_edit: SiteEdit, modules: Mapping[str, FormModule], weight: Tensor, bias: Tensor | None, side: Side
) -> tuple[Tensor, Tensor | None] | Refusal:
    """W' and b' in float32 (float64): the Linear alone computes what the edit at it computed.

    Equations of w and b come first, as they do when the model runs; then those of h (or z).
    Shapes: weight (out, in), as `nn.Linear` has it, or (d,) of a norm; bias (out,).
    Args: `modules`: by `FormInstance.key`. `side`: that of the `FoldTarget`.
    """
    folded = fold_affine(site_edit, modules, weight, bias, side)
    if isinstance(folded, Refusal):
        return folded
    return folded[0].matrix() if isinstance(folded[0], Affine) else folded[0], folded[1]


def fold_affine(
    site_edit: SiteEdit, modules: Mapping[str, FormModule], weight: Tensor, bias: Tensor | None, side: Side
) -> tuple[Tensor | Affine, Tensor | None] | Refusal:
    """As `fold_terms`; W' may be that of an affine function, whose matrix has not been made."""
    own = [weight] if bias is None else [weight, bias]
    forms = [one for module in modules.values() for one in (module, module.owner_module) if one is not None]
    trained = [t for form in forms for t in (*form.parameters(), *form.buffers()) if t.is_floating_point()]
    if not all(map(has_values, (*own, *trained))):
        return Refusal("the weights are not loaded")
    if not all(tensor.is_floating_point() for tensor in own):
        return Refusal("the weight is quantised")
    dtype = sum_dtype(weight.dtype)
    if side != "output" or any("w" in reads(term) for term in site_edit.terms()):
        weight = weight.to(dtype)
    try:
        with torch.no_grad(), eval_mode(modules.values()):
            return _fold(site_edit, modules, weight.detach(), None if bias is None else bias.detach().to(dtype), side)
    except NotAffine as error:
        return Refusal(error.reason)


@shielded
def eval_mode(modules: Iterable[FormModule]) -> Generator[None]:
    inner = [one for module in modules for one in module.modules()]
    flags = [one.training for one in inner]
    for one in inner:
        one.training = False
    try:
        yield
    finally:
        for one, flag in zip(inner, flags, strict=True):
            one.training = flag


@dataclass
class Interpreter:
    """Values of terms, each evaluated once. `states` are the present values."""

    modules: Mapping[str, FormModule]
    like: Tensor  # the dtype and the device for forms without an input
    states: dict[str, Value]
    known: dict[int, Value] = field(default_factory=dict[int, Value])

    def run(self, site_edit: SiteEdit, states: Collection[str]) -> None:
        """The equations of some states, in order; what `let` binds is computed where it stands."""
        for i, assign in enumerate(site_edit.assigns):
            for _, term in (let for let in site_edit.lets if let[0] == i):
                if reads(term) <= self.states.keys():
                    self.value(term)
            if assign.state in states:
                self.states[assign.state] = self.value(assign.value)

    def value(self, term: Term) -> Value:
        if id(term) not in self.known:
            self.known[id(term)] = self._value(term)
        return self.known[id(term)]

    def _value(self, term: Term) -> Value:
        match term:
            case Constant(value=number):
                return self.like.new_tensor(number)
            case Read(state=state):
                if state in self.states:
                    return self.states[state]
                raise NotAffine(f"`{state}` is not what the Linear reads", term)
            case FormCall(instance=instance, input=source):
                value = self.like if source is None else self.value(source)
                reason = instance.form.not_affine(instance.args, instance.dims)
                if isinstance(value, Affine) and reason is not None:
                    raise NotAffine(f"`{show_term(term)}`: {reason}", term)
                module = self.modules[instance.key]
                if not isinstance(value, Affine):
                    return module(value)
                folded = module.fold(value)
                if not isinstance(folded, Affine):  # pyright: ignore[reportUnnecessaryIsInstance]  # the user's code
                    message = f"`fold` of the Python form `{instance.form.name}` gives a {type(folded).__name__}"
                    raise PeftcError(Diagnostic("P574", message, help="it gives a `peftc.forms.affine_module.Affine`"))
                return folded
            case Arithmetic(left=left, right=right):
                return arithmetic(term, self.value(left), self.value(right))
            case _:
                raise NotAffine(f"`{show_term(term)}` is not affine", term)


def reads(term: Term) -> set[str]:
    return {part.state for part in subterms(term) if isinstance(part, Read)}


def arithmetic(term: Arithmetic, left: Value, right: Value) -> Value:
    """left op right, for affine values and constants."""
    match term.op, left, right:
        case "+" | "-", Affine(), Affine():
            return left.plus(right if term.op == "+" else right.scaled(-1.0))
        case "+" | "-", Affine(), Tensor():
            return left.shifted(right if term.op == "+" else -right)
        case "+" | "-", Tensor(), Affine():
            return (right if term.op == "+" else right.scaled(-1.0)).shifted(left)
        case ("*", Affine() as value, Tensor() as factor) | ("*", Tensor() as factor, Affine() as value):
            return value.scaled(factor)
        case "/", Affine(), Tensor():
            return left.scaled(1.0 / right)
        case op, Tensor(), Tensor():
            return ARITHMETIC[op](left, right)
        case _:
            raise NotAffine(f"`{show_term(term)}` is not affine in the input", term)


def _fold(
    site_edit: SiteEdit, modules: Mapping[str, FormModule], weight: Tensor, bias: Tensor | None, side: Side
) -> tuple[Tensor | Affine, Tensor | None]:
    like = weight.new_empty((1, 1, 1), dtype=sum_dtype(weight.dtype))
    weights = Interpreter(modules, like, {"w": weight} if bias is None else {"w": weight, "b": bias})
    weights.run(site_edit, ("w", "b"))
    weight, bias = cast(Tensor, weights.states["w"]), cast(Tensor | None, weights.states.get("b"))
    if side == "weight":
        return weight, bias
    if is_table(site_edit.site):  # h = wᵀ x: a constant is added to each row
        value = _hidden_value(site_edit, modules, like, weight.t(), None, side)
        table = value.matrix().t()
        return table if value.bias is None else table + value.bias, None
    if side == "input":
        return _fold_input(site_edit, modules, like, weight, bias)
    value = _hidden_value(site_edit, modules, like, weight, bias, side)
    return value, value.bias


def _fold_input(
    site_edit: SiteEdit, modules: Mapping[str, FormModule], like: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """W' = W E for an edit E of what is read: by a convolution for each entry of its kernel.

    Shapes: weight (out, features · kernel).
    """
    written = next(assign.state for assign in site_edit.assigns if assign.state in ("h", "z"))
    shape = site_edit.site.states[written].shape
    assert isinstance(shape, Tokens)
    rows = weight.unflatten(1, (shape.d, -1)).transpose(1, 2)  # (out, kernel, features)
    value = _hidden_value(site_edit, modules, like, rows.flatten(0, 1), None, "input").through(rows.flatten(0, 1))
    matrix = value.matrix().view(rows.shape).transpose(1, 2).flatten(1)
    constant = None if value.bias is None else value.bias.view(rows.shape[:2]).sum(1)
    return matrix, bias if constant is None else constant if bias is None else constant + bias


def _hidden_value(
    site_edit: SiteEdit,
    modules: Mapping[str, FormModule],
    like: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    side: Side,
) -> Affine:
    """What the equations of h (or z) give, as a function of what the Linear reads."""
    states: dict[str, Value] = {"x": Affine.identity(weight.shape[1], like.dtype, weight.device)}
    if side == "input":
        states = {"h": states["x"], "z": states["x"]}
    else:  # a sub-layer's x is not its Linear's
        states = {"h": Affine.linear(weight, bias)} | (states if is_linear(site_edit.site) else {})
    hidden = Interpreter(modules, like, states)
    hidden.run(site_edit, ("h", "z"))
    state = "h" if any(assign.state == "h" for assign in site_edit.assigns) else "z"
    value = hidden.states[state]
    if not isinstance(value, Affine):
        raise NotAffine(f"`{state}` no longer depends on the input", site_edit.assigns[-1].value)
    return value
