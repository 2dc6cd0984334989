"""Checks that a model still has its edited modules: quantisers and users replace modules."""

from __future__ import annotations

import itertools
import sys
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from peftc.concurrency.context import CHOICE, Rows
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.record import Installation, installation_of
from peftc.modules.base_values import BASE_VALUES
from peftc.modules.function_parts import held_part
from peftc.modules.instance_forward import FORWARD
from peftc.modules.walk import all_named_modules, modules_in
from peftc.observation.reachable_code import CodeReads
from peftc.rewriting.edits import CONTAINER

COMPLETENESS = "peftc_completeness"  # attribute of a compiled model: its `Completeness`
HELP = "put the edited module back, or take all edits out with `peftc.remove` and compile again"
Link = tuple[dict[str, nn.Module | None], str, nn.Module]  # the children of a module, a name, the child of that name

_count = itertools.count()
_registry: weakref.WeakValueDictionary[int, Completeness] = weakref.WeakValueDictionary()


class Completeness:
    """Checks that no edited module of a compiled model has been replaced.

    Every call compares `links`: the children on the paths from the model to its edited modules. If
    one has changed, all modules are searched: an edited one may be in a wrapper, or elsewhere. It
    also compares what rewritten code reads, which a search lets their classes renew.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model: Callable[[], nn.Module | None] = (lambda: None) if model is None else weakref.ref(model)
        self.number = next(_count)
        self.attribute = f"whole_{self.number}"  # of `DYNAMO_VIEW`, read by compiled code
        self.links: tuple[tuple[Any, ...], ...] | None = None  # owners, names, modules, their classes
        self.code_reads = CodeReads()  # of the edited modules
        self.has_names = False  # whether each edited module still has the name that it was compiled under
        _registry[self.number] = self

    def __deepcopy__(self, memo: object) -> Completeness:
        return Completeness()

    def __reduce__(self) -> Any:
        return (Completeness, ())

    def unchanged(self) -> bool:
        """Whether all links, and the classes of their modules, are those of the last search."""
        if self.links is None:
            return False
        owners, names, modules, classes = self.links
        are_linked = all(map(is_, map(dict.get, owners, names), modules)) and all(map(is_, map(type, modules), classes))
        return are_linked and self.code_reads.are_current()

    def search(self, model: nn.Module, record: Installation) -> None:
        """Searches all modules, renews `links`.

        Raises: P436 if an edited module is missing, P452 if the model calls those of another one.
        """
        links = list[Link]()
        _collect_links(model, record, {}, links)
        elsewhere = [name for name in _names(record) if not _is_edited_at(model, name, record)]
        missing = [name for name in elsewhere if not _contains_edits(model, name, record)]
        regions = [name for name, _ in record.regions]
        edited = edited_modules(model, record)
        if sum(CONTAINER in vars(module)["_modules"] for module in edited) < len(regions):
            raise PeftcError(_replaced(model, missing[0]) if missing else _merged(model, regions))
        trained = {name.rpartition(".")[0] for name in record.parameters_of_base}
        if lost := [name for name in missing if name in trained]:
            raise PeftcError(_replaced(model, lost[0]))
        for site in (site_edit.site for site_edit in record.site_edits):
            for other in site.shared_with:
                if _leads_to_edits(model, site.module, record) and not _leads_to_edits(model, other.module, record):
                    raise PeftcError(_replaced(model, other.module))
        if (name := _function_of_another(model)) is not None:
            message = f"`{name}` is a function that calls edited modules of another model, which this one is a copy of"
            help_ = "save the edits, construct the model anew, and load them: a copy has the functions of its original"
            raise PeftcError(Diagnostic("P452", message, help=help_))
        self.has_names = not elsewhere
        self.code_reads = _renewed_reads(edited)
        parts = tuple(zip(*links, strict=True)) or ((), (), ())
        self.links = (*parts, tuple(map(type, parts[2])))

    def check(self, model: nn.Module, record: Installation) -> None:
        """Raises: P436 where an edited module is not in the model, or not under its name."""
        if not self.unchanged():
            self.search(model, record)
        if not self.has_names:
            name = next(name for name in _names(record) if not _is_edited_at(model, name, record))
            raise PeftcError(_replaced(model, name, _contains_edits(model, name, record)))


def _renewed_reads(edited: Iterable[nn.Module]) -> CodeReads:
    kinds: dict[Any, None] = dict.fromkeys(getattr(type(module), "_peftc_kind", None) for module in edited)
    kinds.pop(None, None)
    for kind in kinds:
        kind.renew()
    return CodeReads(*(read for kind in kinds for read in kind.reads.reads.values()))


def complete_installation(model: nn.Module) -> Installation:
    """The record of a compiled model. Raises: P410 if there is none, P436 for a replaced module."""
    record = installation_of(model)
    completeness: Completeness = vars(model).setdefault(COMPLETENESS, Completeness(model))
    completeness.check(model, record)
    return record


def active_installation(model: nn.Module, *, complete: bool = True) -> Installation:
    """The record of a compiled model whose edits are switched on in the current context.

    Raises: P410 for other models, P436 for a replaced module (if `complete`), P529 for edits off.
    """
    record = complete_installation(model) if complete else installation_of(model)
    if record.choice.default.off:
        help_ = "peftc.set_enabled(model, True)"
        raise PeftcError(Diagnostic("P529", "edits of this model are switched off by `peftc.set_enabled`", help=help_))
    if record.choice.get().off:
        raise PeftcError(Diagnostic("P529", "the edits of this model are switched off by `peftc.disabled`"))
    return record


def is_edited(module: nn.Module, record: Installation) -> bool:
    """Whether a module contains edits of this installation, or parameters that it trains."""
    own = vars(module)
    has_edits = CONTAINER in own["_modules"] and hasattr(type(module), "_peftc_kind")
    return (has_edits or BASE_VALUES in own) and own.get(CHOICE) is record.choice


def edited_modules(model: nn.Module, record: Installation) -> list[nn.Module]:
    """The modules that contain edits or trained parameters, wherever they are now."""
    return [module for module in modules_in(model) if is_edited(module, record)]


def module_at(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def check_complete(model: nn.Module) -> None:
    """Runs first in every call of a compiled model. Raises: P436 for a replaced module."""
    completeness: Completeness = vars(model)[COMPLETENESS]
    if not completeness.unchanged():
        model = completeness.model() or model  # for a replica, the original: a replica's modules are not edited
        completeness.search(model, vars(model)["_peftc"])


# Dynamo shows the reason if the user compiles with `fullgraph=True`.
@cast(Any, torch.compiler.disable)(reason="an edited module of this model was replaced (P436)")
def check_complete_number(number: int) -> None:
    """`check_complete`, called by compiled code."""
    if (model := _registry[number].model()) is not None:
        check_complete(model)


def _collect_links(module: nn.Module, record: Installation, seen: dict[int, bool], links: list[Link]) -> bool:
    """Collects the links on paths to edited modules. Returns whether `module` is or holds one."""
    if id(module) not in seen:
        seen[id(module)] = False  # a module may be its own descendant
        children: dict[str, nn.Module | None] = vars(module)["_modules"]
        all_links = [(children, n, m) for n, m in children.items() if m is not None and n != CONTAINER]
        below = [link for link in all_links if _collect_links(link[2], record, seen, links)]
        links += below
        seen[id(module)] = bool(below) or is_edited(module, record)
    return seen[id(module)]


def _names(record: Installation) -> list[str]:
    """The names that the edited modules were compiled under."""
    owners = (name.rpartition(".")[0] for name in record.parameters_of_base)
    return list(dict.fromkeys((*(name for name, _ in record.regions), *owners)))


def _is_edited_at(model: nn.Module, name: str, record: Installation) -> bool:
    module = module_at(model, name)
    return module is not None and is_edited(module, record)


def _contains_edits(model: nn.Module, name: str, record: Installation) -> bool:
    """Whether the module of that name has an edited one inside, or is one."""
    module = module_at(model, name)
    return module is not None and bool(edited_modules(module, record))


def _leads_to_edits(model: nn.Module, name: str, record: Installation) -> bool:
    """Whether the module of that name has an edited one inside or is inside of one."""
    steps = name.split(".")
    above = (".".join(steps[:i]) for i in range(len(steps)))
    return any(_is_edited_at(model, n, record) for n in above) or _contains_edits(model, name, record)


def _function_of_another(model: nn.Module) -> str | None:
    """The name of an attribute that is a function which holds an edited module of another model, of
    a class that edited modules of this one have: those of a copy and its original have the same.
    """
    modules = all_named_modules(model)
    own = {id(module) for _, module in modules}
    edited = {type(module) for _, module in modules if CHOICE in vars(module)}
    for name, module in modules:
        for attribute, value in vars(module).items():
            held = held_part(value) if type(value) is types.FunctionType and value.__closure__ else None
            others = modules_in(held) if isinstance(held, nn.Module) and id(held) not in own else []
            if any(CHOICE in vars(other) and type(other) in edited for other in others):
                return f"{name}.{attribute}".lstrip(".")
    return None


def _merged(model: nn.Module, names: Sequence[str]) -> Diagnostic:
    """P436 for fewer edited modules than `names`, although each name still leads to one."""
    first: dict[int, str] = {}
    for name in names:
        if (other := first.setdefault(id(module_at(model, name)), name)) != name:
            return Diagnostic("P436", f"`{other}` and `{name}` were edited, and are one module now", help=HELP)
    return Diagnostic("P436", f"some of the {len(names)} edited modules are not in the model any more", help=HELP)


def _replaced(model: nn.Module, name: str, inside: bool = False) -> Diagnostic:
    """P436. `inside`: the module now at `name`, such as a wrapper, contains the edited one."""
    module = module_at(model, name)
    kind = type(module).__name__
    state = f"is inside of a {kind} now" if inside else f"is a {kind} without its edits now"
    state = "is not there any more" if module is None else state
    return Diagnostic("P436", f"`{name}` was edited, and {state}", help=HELP)


# Code under `torch.compile` reads an attribute of `DYNAMO_VIEW`. Dynamo guards on it, and each
# evaluation of the guard calls `_view`, which compares the links again.


def _view(name: str) -> Any:
    number = name.removeprefix("whole_")
    completeness = _registry.get(int(number)) if number.isdigit() else None
    if completeness is None:
        raise AttributeError(name)
    try:
        if not completeness.unchanged() and (model := completeness.model()) is not None:
            check_complete(model)
    except PeftcError:
        return False
    return True


DYNAMO_VIEW = types.ModuleType("peftc.installation.completeness.view", "Whether models are complete, for dynamo.")
vars(DYNAMO_VIEW)["__getattr__"] = _view


def acting_heads(model: nn.Module) -> dict[str, nn.Module]:
    """The edited heads of a model, by the edit, in which an edit acts in the present context."""
    record: Installation = vars(model)["_peftc"]
    edits = [one for one in record.planned.site_edits.representatives if one.site.steps[-1][0] == "head"]
    acting = {one.edit: module_at(model, one.site.module) for one in edits if not record.choice.is_off(one.edit)}
    return {edit: head for edit, head in acting.items() if head is not None and is_edited(head, record)}


@contextmanager
def require_calls(model: nn.Module, heads: Mapping[str, nn.Module]) -> Generator[None]:
    """Around a call of an assigned forward. Raises: P435 where it does not call an edited head."""
    # Seen in: TRL, which multiplies hidden states by the weight of a head in its own kernel
    called = set[nn.Module]()

    def note(module: nn.Module, _: object) -> None:
        called.add(module)

    hooks = [head.register_forward_pre_hook(note) for head in {*heads.values()}]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if left := [edit for edit, head in heads.items() if head not in called]:
        message = f"`{left[0]}` edits the head, which the forward assigned to this {type(model).__name__} does not call"
        help_ = "edit other modules, or `train` the weight of the head, which that forward reads"
        raise PeftcError(Diagnostic("P435", message, help=help_))


def require_rows(model: nn.Module, arguments: Iterable[object]) -> None:
    """Raises: P536 for a batch of other rows than tasks or adapters are chosen for.

    `generate` repeats rows (beams, several sequences); a call outside of it does not.
    """
    choice = vars(model)["_peftc"].choice.get()
    for argument, rows in (("task_ids", choice.task), ("rows", choice.adapter)):
        if not isinstance(rows, Rows):
            continue
        sizes = [value.shape[0] for value in arguments if isinstance(value, Tensor) and value.ndim > 1]
        if sizes and rows.numbers.shape[0] not in sizes and not _is_in_generate():
            message = (
                f"`{argument}` has {rows.numbers.shape[0]} entries, and the batch of this call has {sizes[0]} rows"
            )
            raise PeftcError(Diagnostic("P536", message, help="one entry for each row"))


def _is_in_generate() -> bool:
    """Whether a model's `generate` runs."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        if code.co_name == "generate" and isinstance(frame.f_locals.get(next(iter(code.co_varnames), "")), nn.Module):
            return True
        frame = frame.f_back
    return False


def checked_call(under: Any) -> Callable[..., Any]:
    """The `__call__` of a compiled model's class, which is derived from `under`."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, COMPLETENESS):
            # A bound method, such as `torch.compile` keeps, may outlive the edits; and a program
            # may have constructed the module, of a class that is derived from this one.
            is_derived = any(vars(cls).get("__call__") is __call__ for cls in type(self).__mro__)
            return (under if is_derived else type(self)).__call__(self, *args, **kwargs)
        if is_dynamo_compiling():
            completeness = self.peftc_completeness
            if not getattr(DYNAMO_VIEW, completeness.attribute):
                check_complete_number(completeness.number)
        else:
            check_complete(self)
            require_rows(self, (*args, *kwargs.values()))
            if FORWARD in vars(self) and (heads := acting_heads(self)):
                with require_calls(self, heads):
                    return under.__call__(self, *args, **kwargs)
        return under.__call__(self, *args, **kwargs)

    __call__.__code__ = __call__.__code__.replace()  # a code object of its own, by which dynamo counts
    return __call__
