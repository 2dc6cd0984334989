"""The types of PEFT adapters as equations: one row for each set of tensors of a module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from peftc.addressing.sites import SiteTable
from peftc.exchange.peft_format.config import PeftConfig
from peftc.exchange.peft_format.names import pattern_of
from peftc.exchange.spec_text import ModulePart

Tensors = Mapping[str, Tensor]  # of one module, by the end of their names in PEFT
Numbers = dict[str, Any]  # for the braces of an equation; `tasks` is their number
Size = tuple[int, int]  # of a weight (out, in)
Sizes = Mapping[str, Size]  # by module
OfBase = Callable[[str], Tensor]  # of "weight" (out, in) and "bias" of a module of the base
Files = Mapping[str, Tensor]  # tensors of an adapter, by PEFT's names


PLACES = "places"  # the name of the numbers of chosen entries in our forms


class NoConfig(Exception):
    """Why no configuration of PEFT says what some modules have."""


@dataclass(frozen=True)
class PeftRow:
    """What PEFT computes at a module that has these tensors.

    Attributes:
        tensors: the end of PEFT's name, and ours: `form.parameter`.
        equation: at the module, with braces for numbers.
        form: the text of a form that the equation calls, if it is none of peftc's own.
        step: the site below the module's own sub-layer where the equation stands, if it is not the
            module itself.
        config: the keys of PEFT for the arguments of the forms; None where an edit of such an
            equation leaves as another type.
        linear_alone: whether PEFT has it at no other class.
        fits: whether a configuration and tensors are those of this row, where others have the same.
        shapes: of tensors that PEFT stores with a dimension of 1.
        common: tensors of the whole adapter, by PEFT's name, and ours.
        places: the name of ours of places that PEFT's files do not have.
        read: makes our tensors of PEFT's, where they are not the same ones.
        write: makes PEFT's tensors of ours and the arguments of the forms. Raises: NoConfig.
        tied: a `let`, and the equation with its name, where PEFT changes modules that are tied with
            the input embedding together; empty where it changes each alone.
        by_task: the names of ours of tensors whose first dimension are tasks.
        check: a reason why PEFT computes something else with these values; None where it does not.
        shared: the ends of tensors that several modules may have together: where it is one tensor,
            they are one edit.
        computed: the names of ours of tensors that PEFT computes of the weight of the base when it
            loads an adapter, and does not save.
        of_base: computes these of the weight (out, in), and of the bias.
    """

    tensors: Mapping[str, str]
    equation: str
    form: str = ""
    step: str = ""
    config: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    linear_alone: bool = False
    fits: Callable[[PeftConfig, Tensors], bool] | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    common: Mapping[str, str] = field(default_factory=dict[str, str])
    places: str = ""
    read: Callable[[PeftConfig, Tensors, Size], dict[str, Tensor]] | None = None
    write: Callable[[Tensors, Mapping[str, Any], Size], dict[str, Tensor]] | None = None
    tied: tuple[str, str] | tuple[()] = ()
    by_task: Collection[str] = ()
    check: Callable[[Tensors], str | None] | None = None
    shared: Collection[str] = field(default=())
    computed: Collection[str] = field(default=())
    of_base: Callable[[PeftConfig, Tensors, OfBase], dict[str, Tensor]] | None = None


@dataclass(frozen=True)
class PeftType:
    """A type of adapters.

    Attributes:
        rows: by the tensors of a module.
        numbers: reads the configuration for a module. Raises: P802.
        ignored: keys that matter for training alone, or together with others.
        flags: keys with which a module has a tensor, and else has none.
        patterns: the keys of numbers that modules may have of their own, and where PEFT has these.
        common: makes the tensors of the whole adapter that its files lack.
        settle: the configuration of all modules, from the keys and the tensors of each, if patterns
            do not say it all. Raises: NoConfig.
        is_lora: whether edits that do not fit the type can leave as LoRA.
        has_transposition: whether its configuration has `fan_in_fan_out`.
        dimensions: the most that its tensors have.
        place: the selector of the one place where it stands, of a type that has no modules.
        zeros: the end of the names of tensors that are zero, for parts that are not there.
        chosen: the tensors of such a type that PEFT reads.
        unpack: the tensors of each module, where the files have them for several modules in one, or
            not at all, and PEFT makes them when it loads an adapter. Raises: P802, P803.
        pack: the tensors of files, of those of each module. Raises: NoConfig.
        sites: the parts of an adapter whose tensors are of no modules. Raises: P802, P803, P804.
        groups: the modules that have tensors in common, of types of which some have: the name of a
            group for each. Raises: P802, P804.
    """

    rows: tuple[PeftRow, ...]
    numbers: Callable[[PeftConfig, str, Tensors], Numbers]
    ignored: Collection[str] = field(default=())
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    patterns: Mapping[str, str] = field(default_factory=dict[str, str])
    common: Callable[[PeftConfig, Sizes], dict[str, Tensor]] | None = None
    settle: Callable[[Mapping[str, dict[str, Any]], Mapping[str, Tensors]], dict[str, Any]] | None = None
    is_lora: bool = False
    has_transposition: bool = False
    dimensions: int = 2
    place: str = ""
    zeros: str | None = None
    chosen: Callable[[PeftConfig, Tensors], dict[str, Tensor]] | None = None
    unpack: Callable[[PeftConfig, Files, nn.Module], dict[str, Tensor]] | None = None
    pack: Callable[[dict[str, Any], Files, Sequence[str]], dict[str, Tensor]] | None = None
    sites: Callable[[PeftConfig, Tensors, SiteTable, nn.Module], list[ModulePart]] | None = None
    groups: Callable[[PeftConfig, Mapping[str, Tensors], Sizes], Mapping[str, str]] | None = None

    def row(self, config: PeftConfig, tensors: Tensors) -> PeftRow | None:
        """The row of a module with these tensors."""
        own = (row for row in self.rows if set(row.tensors) == set(tensors))
        return next((row for row in own if row.fits is None or row.fits(config, tensors)), None)

    def whole_ends(self) -> tuple[str, ...]:
        """The ends of PEFT's names of places, which are whole numbers."""
        return tuple(end for row in self.rows for end, name in row.tensors.items() if name.endswith(f".{PLACES}"))

    def common_names(self) -> set[str]:
        return {name for row in self.rows for name in row.common}

    def config(self, numbers: Mapping[str, dict[str, Any]], tensors: Mapping[str, Tensors]) -> dict[str, Any]:
        """The keys of all modules, from those of each. Raises: NoConfig."""
        return (self.settle or self.alike)(numbers, tensors)

    def alike(self, numbers: Mapping[str, dict[str, Any]], tensors: Mapping[str, Tensors]) -> dict[str, Any]:
        """Keys that all modules have in common, and patterns of the others. Raises: NoConfig."""
        config = dict[str, Any]()
        for module, keys in numbers.items():
            own = {key: value for key, value in keys.items() if key not in self.patterns}
            if config not in ({}, own):
                raise NoConfig(f"PEFT has one of each for all modules, and `{module}` has {own}")
            config = own
        for key, pattern in self.patterns.items():
            config[key], config[pattern] = pattern_of({module: keys[key] for module, keys in numbers.items()})
        return config


def shown(number: float) -> str:
    """A number in the text of a spec, of which all digits are read again."""
    return str(int(number)) if float(number).is_integer() and abs(number) < 2**53 else repr(float(number))


def dropout_text(config: PeftConfig, key: str) -> str:
    """`dropout` as an argument of a form, if there is one."""
    rate = config.number(key, 0.0)
    return f", dropout={shown(rate)}" if rate else ""


def whole(number: Any) -> Any:
    """A number as PEFT writes it."""
    return int(number) if float(number).is_integer() else number


@dataclass(eq=False)
class TypedAdapter:
    """An adapter of one type. `config`: the keys of the type."""

    type: str
    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    modules: list[str] = field(default_factory=list[str])
    ranks: dict[str, int] = field(default_factory=dict[str, int])
    notes: list[str] = field(default_factory=list[str])
