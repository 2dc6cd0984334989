"""Whether the edited modules of a model are still in it: a quantiser, or a user, may assign others in their place."""

from __future__ import annotations

import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, cast

import torch
from torch import nn

from peftc.concurrency.context import CHOICE
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.record import Installation, installation_of
from peftc.rewriting.container import CONTAINER

ORIGINALS = "peftc_originals"  # the name of the first values of what `train` changes in the attributes of a module
PRESENCE = "peftc_presence"  # the name of a `Presence` in the attributes of a compiled model
HELP = "put the edited module back, or take all edits out with `peftc.remove` and compile again"
Link = tuple[dict[str, nn.Module | None], str, nn.Module]

_count = itertools.count()
_presences: weakref.WeakValueDictionary[int, Presence] = weakref.WeakValueDictionary()


class Presence:
    """The attributes between a compiled model and its edited modules. While they hold what they held, modules of the same classes, no
    edit is lost.

    Every call of the model compares them. Where one has changed, all modules are looked at: an edited one may be inside of a
    wrapper, or in another place. A copy of the model has a `Presence` of its own.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = None if model is None else weakref.ref(model)
        self.number = next(_count)
        self.attribute = f"whole_{self.number}"  # of `VIEW`
        self.links: tuple[tuple[Any, ...], ...] | None = None
        self.named = False  # whether the edited modules have the names that they were compiled under
        _presences[self.number] = self

    def __deepcopy__(self, memo: object) -> Presence:
        return Presence()

    def __reduce__(self) -> Any:
        return (Presence, ())

    def holds(self) -> bool:
        """Whether nothing has changed since all modules were looked at."""
        if self.links is None:
            return False
        owners, names, modules, classes = self.links
        return all(map(is_, map(dict.get, owners, names), modules)) and all(map(is_, map(type, modules), classes))

    def look(self, model: nn.Module, record: Installation) -> None:
        """Looks at all modules. Raises: P436 where an edited one is not in the model."""
        links = list[Link]()
        _find(model, record, {}, links)
        if lost := _lost(model, record):
            raise PeftcError(lost)
        for placed in record.site_edits:
            for use in placed.site.shared_with:
                if _leads_to_edits(model, placed.site.module, record) and not _leads_to_edits(
                    model, use.module, record
                ):
                    raise PeftcError(_replaced(model, use.module))
        self.named = all(_is_edited_at(model, name, record) for name in _names(record))
        parts = tuple(zip(*links, strict=True)) or ((), (), ())
        self.links = (*parts, tuple(map(type, parts[2])))

    def confirm(self, model: nn.Module, record: Installation) -> None:
        """Raises: P436 where an edited module is not in the model, or has another name than the record knows."""
        if not self.holds():
            self.look(model, record)
        if not self.named:
            name = next(name for name in _names(record) if not _is_edited_at(model, name, record))
            raise PeftcError(_replaced(model, name, _holds_edits(model, name, record)))


def complete_installation(model: nn.Module) -> Installation:
    """The record of a compiled model that has all of its edited modules, by the names that it had them under.

    Raises: P410 for a model that is not compiled, P436 where an edited module was replaced.
    """
    record = installation_of(model)
    presence: Presence = vars(model).setdefault(PRESENCE, Presence(model))
    presence.confirm(model, record)
    return record


def active_installation(model: nn.Module, *, complete: bool = True) -> Installation:
    """The record of a compiled model all of whose edits act in the present context.

    Args: `complete`: without it, edited modules may have been replaced.
    Raises: P410 for a model that is not compiled, P436 where an edited module was replaced, P529 where edits are switched off.
    """
    record = complete_installation(model) if complete else installation_of(model)
    if record.choice.default.off:
        help_ = "peftc.set_enabled(model, True)"
        raise PeftcError(Diagnostic("P529", "edits of this model are switched off by `peftc.set_enabled`", help=help_))
    if record.choice.get().off:
        raise PeftcError(Diagnostic("P529", "the edits of this model are switched off by `peftc.disabled`"))
    return record


def is_edited(module: nn.Module, record: Installation) -> bool:
    """Whether edits of this installation are in a module, or parameters that it trains."""
    own = vars(module)
    here = ORIGINALS in own or (CONTAINER in own["_modules"] and hasattr(type(module), "_peftc_kind"))
    return here and own.get(CHOICE) is record.choice


def edited(model: nn.Module, record: Installation) -> list[nn.Module]:
    """The modules that edits are in, or parameters that they train, wherever they are now."""
    return [module for module in model.modules() if is_edited(module, record)]


def module_at(model: nn.Module, name: str) -> nn.Module | None:
    """The module of that dotted name, where there is one."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def refuse_loss(model: nn.Module) -> None:
    """What a call of a compiled model begins with. Raises: P436 where an edited module was replaced."""
    presence: Presence = vars(model)[PRESENCE]
    if not presence.holds():
        model = _model(presence) or model  # of a replica, which has no edited modules of this installation
        presence.look(model, vars(model)["_peftc"])


def _refuse_loss_of(number: int) -> None:
    model = _model(_presences[number])
    if model is not None:
        refuse_loss(model)


REASON = "an edited module of this model was replaced (P436)"  # told where a whole graph is asked for
# The same where compiled code has found it.
refuse_loss_of: Callable[[int], None] = cast(Any, torch.compiler.disable)(_refuse_loss_of, reason=REASON)


def _find(module: nn.Module, record: Installation, done: dict[int, bool], links: list[Link]) -> bool:
    """Collects the attributes on all ways from a module to edited ones. Returns whether there is one, or it is one itself."""
    if id(module) not in done:
        done[id(module)] = False  # a module may be inside of itself
        children: dict[str, nn.Module | None] = vars(module)["_modules"]
        there = [(children, n, m) for n, m in children.items() if m is not None and n != CONTAINER]
        below = [link for link in there if _find(link[2], record, done, links)]
        links += below
        done[id(module)] = bool(below) or is_edited(module, record)
    return done[id(module)]


def _names(record: Installation) -> list[str]:
    """The names that the edited modules were compiled under."""
    regions = (name for name, _ in record.regions)
    return list(dict.fromkeys((*regions, *(name.rpartition(".")[0] for name in record.trained.values()))))


def _is_edited_at(model: nn.Module, name: str, record: Installation) -> bool:
    module = module_at(model, name)
    return module is not None and is_edited(module, record)


def _holds_edits(model: nn.Module, name: str, record: Installation) -> bool:
    """Whether the module of that name has an edited one inside, or is one."""
    module = module_at(model, name)
    return module is not None and bool(edited(module, record))


def _leads_to_edits(model: nn.Module, name: str, record: Installation) -> bool:
    """Whether the module of that name has an edited one inside or is inside of one."""
    steps = name.split(".")
    above = (".".join(steps[:i]) for i in range(len(steps)))
    return any(_is_edited_at(model, n, record) for n in above) or _holds_edits(model, name, record)


def _lost(model: nn.Module, record: Installation) -> Diagnostic | None:
    """P436 where there are fewer modules with edits than there were, or a parameter that is trained is another module's."""
    gone = (n for n in _names(record) if not _is_edited_at(model, n, record) and not _holds_edits(model, n, record))
    regions = [name for name, _ in record.regions]
    if sum(CONTAINER in vars(module)["_modules"] for module in edited(model, record)) < len(regions):
        return _replaced(model, lost) if (lost := next(gone, None)) is not None else _merged(model, regions)
    trained = {name.rpartition(".")[0] for name in record.trained.values()}
    lost = next((name for name in gone if name in trained), None)
    return None if lost is None else _replaced(model, lost)


def _merged(model: nn.Module, names: Sequence[str]) -> Diagnostic:
    """P436 where what is at each of these names has edits, but there were more."""
    first: dict[int, str] = {}
    for name in names:
        if (other := first.setdefault(id(module_at(model, name)), name)) != name:
            return Diagnostic("P436", f"`{other}` and `{name}` were edited, and are one module now", help=HELP)
    return Diagnostic("P436", f"some of the {len(names)} edited modules are not in the model any more", help=HELP)


def _replaced(model: nn.Module, name: str, inside: bool = False) -> Diagnostic:
    """P436. `inside`: whether the edited module is inside of what is there now."""
    module = module_at(model, name)
    kind = type(module).__name__
    now = (
        "is not there any more"
        if module is None
        else f"is {'inside of ' * inside}a {kind}{' without its edits' * (not inside)} now"
    )
    return Diagnostic("P436", f"`{name}` was edited, and {now}", help=HELP)


def _model(presence: Presence) -> nn.Module | None:
    return None if presence.model is None else presence.model()


# Code under `torch.compile` reads this: dynamo guards on the attribute, and each evaluation of the guard compares anew.


def _view(name: str) -> Any:
    number = name.removeprefix("whole_")
    presence = _presences.get(int(number)) if number.isdigit() else None
    if presence is None:
        raise AttributeError(name)
    model = _model(presence)
    if presence.holds() or model is None:
        return True
    try:
        refuse_loss(model)
    except PeftcError:
        return False
    return True


VIEW = types.ModuleType("peftc.installation.presence.view", "Whether models have all of their edits, for dynamo.")
vars(VIEW)["__getattr__"] = _view
