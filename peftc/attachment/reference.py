"""The base under a compiled model, or one of its adapters alone, as a frozen model beside it."""

from collections.abc import Callable, Generator, Mapping
from functools import wraps
from inspect import ismethod
from typing import Any

import torch
from torch import Tensor, nn

from peftc.adapters.checkpoints import state_name
from peftc.concurrency.context import ALL, NO_ADAPTER, Choice, ChoiceBlock
from peftc.concurrency.interrupts import shielded
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.completeness import acting_heads, complete_installation, require_calls
from peftc.installation.contents import names_on_model
from peftc.installation.disable import prepare_variants
from peftc.installation.edited_classes import of_base
from peftc.installation.record import Installation
from peftc.modules.base_values import ADAPTERS, BASE_VALUES
from peftc.modules.instance_forward import FORWARD
from peftc.modules.walk import modules_in
from peftc.rewriting.edits import SHARED


def reference(model: nn.Module, name: str | None = None) -> nn.Module:
    """The base under a compiled model, as a frozen model without weights of its own.

    It is what preference training compares the policy with, in the place of a second model:
    `DPOTrainer(model, ref_model=peftc.reference(model), …)`. A call is a call of `model` in which
    no edit acts, base parameters that are trained have their first values, dropout is off and no
    gradient is computed. Open graphs of the policy, and what gradient checkpointing recomputes
    for them, are as without it.

    `ref.lm_head`, `ref.base_model` and the like are references of these parts, and methods, such
    as `generate`, run as a call does. The weights are those of the model, wherever they are: a
    reference has no parameters and no modules, so that `to`, `half`, `train`, `requires_grad_`,
    an optimizer or a wrapper do nothing to them. `state_dict` has the values that act.

    The modes of the modules change for the time of a call, so no other thread trains meanwhile.

    Args:
        model: a compiled model.
        name: of a spec or an attached adapter that acts alone; by default none acts. Its values
            are those that it has at the time of a call.

    Returns:
        The reference. It is always in evaluation mode.

    Raises:
        PeftcError: P410 (not compiled), P413 (no spec or adapter of that name), P432 as
            `peftc.disabled`, P436 (an edited module was replaced). What would change the model by
            the reference: P562.

    Source: Rafailov et al. 2023, arXiv:2305.18290, section 4 (the reference policy).
    """
    choice_of(complete_installation(model), name)
    view = Reference(model, model, name)
    view.choose()
    return view


class Reference(nn.Module):
    """A model, or a part of it, under a choice of its own. See `reference`."""

    def __init__(self, model: nn.Module, part: nn.Module, name: str | None) -> None:
        super().__init__()
        # Not as modules: what walks, moves or switches modules does not come to those of the model.
        vars(self).update(_model=model, _part=part, _name=name, _prepared=None, training=False)

    def choose(self) -> ChoiceBlock:
        """A block in which the model is what this shows of it. Raises: as `reference`."""
        own = vars(self)
        model: nn.Module = own["_model"]
        record = complete_installation(model)
        choice = choice_of(record, own["_name"])
        whole = record.choice.get().then(choice)
        if own["_prepared"] != (id(record), whole.key):
            prepare_variants(model, record, whole)
            own["_prepared"] = (id(record), whole.key)
        return ChoiceBlock(model, record.choice, choice)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._call, *args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Runs `forward`, also one that a library assigns. Raises: P435 as calls of the model."""
        own = vars(self)
        heads = acting_heads(own["_model"]) if FORWARD in own else {}
        with require_calls(own["_model"], heads):
            return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return vars(self)["_part"](*args, **kwargs)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.choose(), evaluation(vars(self)["_part"]), torch.no_grad():
            return function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        if "_part" not in own:  # a copy that is not complete yet
            raise AttributeError(name)
        with self.choose():
            value = getattr(own["_part"], name)
        return self._method(value) if ismethod(value) else self._shown(value)

    def _method(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            return self._shown(self._run(method, *args, **kwargs))

        return run

    def _shown(self, value: Any) -> Any:
        """A module of the model as a reference of it; anything else as it is."""
        own = vars(self)
        if value is own["_part"] or not isinstance(value, nn.Module):
            return self if value is own["_part"] else value
        return Reference(own["_model"], value, own["_name"])

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, nn.Module | nn.Parameter):
            raise view_error(f"`{name}` of a reference cannot be set")
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> nn.Module:
        """A reference is in evaluation mode."""
        del mode
        return self

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        own = vars(self)
        part, name = own["_part"], own["_name"]
        state = part.state_dict(keep_vars=keep_vars)
        values = of_base(part, state)
        if name is not None and part is own["_model"]:
            record = complete_installation(part)
            names = (state_name(record, saved) for saved in names_on_model(part, name).values())
            values |= {own: state[own] for own in names if not own.startswith(f"{SHARED}.{ADAPTERS}.")}
        with self.choose():
            values |= values_that_act(part, keep_vars)
        result: Any = {} if destination is None else destination
        result.update({f"{prefix}{key}": value for key, value in values.items()})
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Raises: P562."""
        raise view_error("a reference cannot read weights")

    def extra_repr(self) -> str:
        return f"of {type(vars(self)['_part']).__name__}"


def values_that_act(module: nn.Module, keep_vars: bool) -> dict[str, Tensor]:
    """What parameters of the base that specs or adapters train are read as, by dotted name."""
    owners = ((n, own) for n, own in module.named_modules(remove_duplicate=False) if BASE_VALUES in vars(own))
    values = {
        f"{n}.{attribute}".lstrip("."): getattr(own, attribute)
        for n, own in owners
        for attribute in vars(own)[BASE_VALUES]
    }
    return values if keep_vars else {name: value.detach() for name, value in values.items()}


def view_error(message: str) -> PeftcError:
    return PeftcError(Diagnostic("P562", message, help="it is a view: change the model that it shows"))


def choice_of(record: Installation, name: str | None) -> Choice:
    """The choice under which a spec or an adapter acts alone, or none. Raises: P413."""
    if name is None:
        return Choice(frozenset({ALL}))
    if name in record.adapter.names:
        alone, adapter = (), name
    else:
        alone, adapter = record.selected(name), NO_ADAPTER
    others = (spec for spec in record.specs if spec not in alone and not spec.adapters)
    return Choice(frozenset(edit for spec in others for edit in spec.edits), adapter=adapter)


@shielded
def evaluation(module: nn.Module) -> Generator[None]:
    """Inside, all modules are in evaluation mode; afterwards each has its own again."""
    training = [one for one in modules_in(module) if one.training]
    for one in training:
        vars(one)["training"] = False
    try:
        yield
    finally:
        for one in training:
            vars(one)["training"] = True
