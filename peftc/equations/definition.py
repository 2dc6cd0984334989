"""From the text of a form to what the planner asks of it: the equation answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, Literal

from peftc.diagnostics import Related, Source, Span
from peftc.equations.analysis import Place, place_of
from peftc.equations.bindings import check_sites, is_written_out
from peftc.equations.common_tensors import CommonTensors, Tensors, common_tensors, dims_at, size_refusal
from peftc.equations.exports import Export, are_alternatives, check_export, export_of, has_ends, may_hold
from peftc.equations.patterns import bottleneck_of, value_arguments
from peftc.equations.values import NUMBERS_OF_SITES, TOP, FormError, SiteNumbers, Value, numbers_of, shape_of
from peftc.equations.words import (
    BUDGET,
    BUFFER,
    COUNTED,
    CROSS_LAYER,
    HISTORY,
    KEPT,
    OVER_SITES,
    PRUNED,
    PRUNED_PARTS,
    RANDOM,
    SELECTION,
    SITE,
    arguments_of,
    criterion_of,
    inputs_of,
    is_attention,
    is_of_task,
    is_whole,
    mean_over,
    number_of,
    optional_inputs_of,
    scope_of,
)
from peftc.forms.arguments import DTYPE
from peftc.forms.form import Args, Dims, Form, Parameter, PlacementError, Scope
from peftc.forms.shapes import Ids, KeyValue, Prompt, Shape, Tokens, Weight
from peftc.syntax import ast
from peftc.syntax.printer import print_expression, print_statement
from peftc.syntax.walk import names_in, values, walk

MODULE = "peftc.equation_code.module:EquationModule"
SELECTION_MODULE = "peftc.equation_code.selection_module:SelectionModule"
CROSS_LAYER_MODULE = "peftc.equation_code.cross_layer_module:CrossLayerModule"
PRUNED_SITES = "peftc.equation_code.pruning_module:PrunedSites"
RESULT = "f"
OWNER, PARAMETERS = "owner_module", "parameters"  # the module of common parameters; a key of the code of a place
_MODULES = {
    RANDOM: "peftc.equation_code.random_module:RandomModule",
    BUFFER: "peftc.equation_code.buffer_module:BufferModule",
    BUDGET: "peftc.equation_code.budget_module:BudgetModule",
    SELECTION: SELECTION_MODULE,
    PRUNED: "peftc.equation_code.pruning_module:PruningModule",
    **dict.fromkeys(CROSS_LAYER, CROSS_LAYER_MODULE),
}


class TextForm(Form):
    """A form with a text: its equation answers what `Form` asks."""

    def __init__(self, form: ast.Form, source: Source | None) -> None:
        self.form, self.source = form, source
        lines = [line for line in form.body if isinstance(line, ast.Equation) and line.target == RESULT]
        scopes = set(map(scope_of, self._lines()))
        self.name = form.name
        self.equation = f"{RESULT} = {print_expression(lines[-1].value)}" if lines else ""
        self.paper = " ".join(line.lstrip("# ") for line in form.leading if line)
        self.inputs = inputs_of(form)
        self.arguments = (*arguments_of(self.form), DTYPE)
        self.value_arguments = value_arguments(form)
        self.gives_pair = any(isinstance(line.value, ast.Pair) for line in lines)
        self.place = lru_cache(maxsize=1024)(self._place)
        self._tensors: dict[object, CommonTensors] = {}
        self._is_numbered = any(map(number_of, self._lines()))
        parts = [part for value in values(form) for part in walk(value)]
        self._calls = [part for part in parts if isinstance(part, ast.Call)]
        functions = {call.function for call in self._calls}
        self._attentions = [line for line in form.body if any(map(is_attention, values(line)))]
        selection = next((line for line in self._lines() if criterion_of(line)), None)
        words = functions | {line.value.id for line in self._lines() if isinstance(line.value, ast.Name)}
        self.counts_rows = COUNTED in functions
        self.joins_rows, self.joins_tokens = (over in map(mean_over, self._calls) for over in ("batch", "tokens"))
        self.is_cross_layer = not functions.isdisjoint(CROSS_LAYER)
        self.mixes_shapes = self.is_cross_layer or (scopes != {"site"} and not are_alternatives(self._lines()))
        has_tasks = any(map(is_of_task, self._lines()))
        shares_tasks = has_tasks and any(line.common for line in self._lines())
        if self.is_cross_layer or shares_tasks or ("site" in scopes and self.mixes_shapes):
            has_buffers = any(scope_of(line) != "site" and line.value == ast.Name(BUFFER) for line in self._lines())
            common_module = _MODULES[BUFFER] if has_buffers else MODULE
            self.common_module = CROSS_LAYER_MODULE if self.is_cross_layer else common_module
            self.tasks_module, self.separates_tasks = MODULE if shares_tasks else "", has_tasks
        if selection is not None and selection.scope:
            words.remove(SELECTION)
            self.common_module, self.separates_tasks = SELECTION_MODULE, True
        self.module = next((module for word, module in _MODULES.items() if word in words), MODULE)
        self._is_pruned = PRUNED in functions
        if self._is_pruned:
            self.common_module, self.separates_tasks, self.mixes_shapes = PRUNED_SITES, True, True
        self._is_wide = "widest" in functions
        self._asked = functions.intersection(NUMBERS_OF_SITES) | ({SITE} if HISTORY in functions else set())
        self.asks_site_numbers = bool(self._asked) or self._is_numbered  # such as `layer(out)`
        self._is_written_out = any(map(is_written_out, parts))

    @cached_property
    def text(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # as a spec has it, with its comments
        return print_statement(self.form)

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        return optional_inputs_of(self.form)

    def flops(self, args: Args, dims: Dims) -> int:
        return self.at(args, dims).flops

    def shown(self, source: str, args: Args, dims: Dims) -> str:
        bottleneck = bottleneck_of(self.at(self.fill(args), dims)) if self.inputs else None
        if bottleneck is not None:
            return bottleneck.shown(source)
        return f"softmax({source} P_kᵀ) P_v" if self.gives_pair else f"{self.name}({source})"

    def __reduce__(self) -> Any:
        return (text_form, (self.form, self.source))

    # What the planner asks

    def _place(
        self, args: tuple[tuple[str, object], ...], shapes: tuple[Shape | None, ...], numbers: SiteNumbers
    ) -> Place:
        return place_of(self.form, self.inputs, dict(args), shapes, numbers, self._is_written_out)  # pyright: ignore[reportArgumentType]

    def at(self, args: Args, dims: Dims) -> Place:
        """The form at a place. Raises: PlacementError, with the part of the text that is wrong."""
        try:
            return self.place(
                tuple(sorted(args.items(), key=lambda item: item[0])),
                (dims.target, dims.input, dims.second),
                numbers_of(dims, self._asked, self._is_wide),
            )
        except FormError as error:
            raise self.illegal(error, args) from None
        except RecursionError:
            raise self.illegal(FormError("P018", "its equation is nested too deeply", self.form)) from None

    def differs_by_site(self, args: Args) -> bool:
        """Whether sites that share parameters have values of their own."""
        is_asked = self.is_cross_layer or self._is_numbered or SITE in self._asked
        return is_asked and self.common(self.fill(args)) is not None

    def illegal(self, error: FormError, args: Args | None = None) -> PlacementError:
        label = "this line of the form" if error.code == "P317" else error.message
        related = (Related(error.node.span, self.source, label),) if self.source is not None else ()
        message = error.message if error.code == "P317" else f"`{self.form.name}` does not fit: {error.message}"
        return PlacementError(error.code, message, self._blamed(error, args or {}), help=error.help, related=related)

    def _blamed(self, error: FormError, args: Args) -> str | None:
        """The argument of the call that an error is about, or "input" or "second"."""
        node = error.node
        parts = (node.left, node.right) if isinstance(node, ast.Require) else (node,)
        names = [name for part in parts if not isinstance(part, ast.Statement) for name in self._names_behind(part)]
        if error.code in ("P106", "P317", "P318"):
            own = [name for name in names if name in args and name not in self.inputs]
            defaults = {param.name: param.default for param in self.arguments}
            if own:
                return next((name for name in own if args[name] != defaults[name]), own[0])
        roles = dict(zip(self.inputs, ("input", "second"), strict=False))
        return next((roles[name] for name in names if name in roles), None)

    def _names_behind(self, node: Any) -> list[str]:
        """The names in an expression, and in the parts that it names, in their order."""
        lets = [line for line in self.form.body if isinstance(line, ast.Let)]
        names: list[str] = []
        todo = [*names_in(node)]
        while todo:
            name = todo.pop(0)
            if name not in names:
                names.append(name)
                todo += [inner for let in lets if let.name == name for inner in names_in(let.value)]
        return names

    def selects_positions(self, args: Args) -> bool:
        return any(may_hold(line.condition, args) for line in self._attentions) or has_ends(self._calls, args)

    def shape(self, args: Args, dims: Dims) -> Shape:
        if self.gives_pair and not isinstance(dims.target, KeyValue):
            help_ = f"write `kv = concat({self.name}(…), kv)` at an attention"
            message = f"`{self.name}` gives rows of keys and values, here {dims.target}"
            raise PlacementError("P310", message, help=help_)
        if self.is_cross_layer:
            check_sites(self.name, dims, TOP in self._asked)
        place = self.at(args, dims)
        self.tensors(args, dims)
        self._check_export(place, args, dims)
        of_others = any(isinstance(shape, Tokens) and shape.of for shape in (dims.input, dims.target))
        if of_others and self.selects_positions(args):
            message = "the tokens here are not those of the stack, whose positions `positions` counts"
            raise PlacementError("P422", message)
        value = place.value
        if value.pair is not None:
            return self._rows(place, value, dims.target)
        tokens = dims.input.of if isinstance(dims.input, Tokens) else ""
        shape = shape_of(value.type, dims.target, "" if isinstance(dims.input, Ids) else tokens)
        node = place.result or self.form
        if shape is None:
            raise self.illegal(FormError("P301", f"its value is {value.type}, and no state is", node))
        if isinstance(shape, Prompt):
            self._check_positions(place, shape.rows, args, dims)
        return shape

    def _check_positions(self, place: Place, rows: int, args: Args, dims: Dims) -> None:
        """Raises: PlacementError P314 if a prompt leaves no position for the input."""
        if dims.positions is not None and rows >= dims.positions:
            message = f"a prompt of {rows} tokens leaves no position for the input: the model has {dims.positions}"
            names = [name for name, value in place.numbers.items() if value == rows and name in args]
            help_ = f"use {names[0]} < {dims.positions}" if names else f"use fewer than {dims.positions} rows"
            raise PlacementError("P314", message, names[0] if names else None, help=help_)

    def _rows(self, place: Place, value: Value, target: Shape) -> KeyValue:
        """Rows of keys and values. Raises: PlacementError if the state has no such rows."""
        assert place.result is not None
        assert value.pair is not None
        assert isinstance(target, KeyValue)
        own = (target.kv_heads, target.d_head), (target.kv_heads, target.d_value or target.d_head)
        heads, rows, d_key = value.type.size
        if own != ((heads, d_key), (heads, value.pair.size[2])):
            message = f"its keys {value.type} and values {value.pair} are not like {target}"
            raise self.illegal(FormError("P301", message, place.result))
        return replace(target, rows=rows)

    def parameters(self, args: Args, dims: Dims) -> Iterable[Parameter]:
        place, tensors = self.at(args, dims), self.tensors(args, dims)
        if PARAMETERS not in place.code or self._is_numbered:
            export = self.export(args)
            trained = "trained" if export is None else "training"
            own = [
                Parameter(
                    tensor,
                    at.sizes[name],
                    scope=self.scope_at(line),
                    role="state" if name in at.states else "fixed" if line.fixed else trained,
                    dtype="int64" if is_whole(line) else "bool" * (at.pruning is not None and name in (KEPT, PRUNED)),
                )
                for tensor, (at, name) in tensors.items()
                for line in (at.parameters[name],)
            ]
            if export is not None:
                # One module has what all sites save.
                count = dims.sites if self.common(args) is not None and not self.has_common_part else 1
                scope = "common" if self._is_pruned else "site"
                for name, node in (place.saved or {}).items():
                    dtype = "int64" if isinstance(node, ast.Attribute) and node.name == PRUNED_PARTS[1] else ""
                    own += [Parameter(name, place.type_of(node).size, 0.0, scope, "saved", dtype)] * count
            place.code[PARAMETERS] = tuple(own)
        return place.code[PARAMETERS]

    def scope_at(self, line: ast.Parameter) -> Literal["site", "common", "tasks"]:
        """Which module has a parameter."""
        return "site" if not line.scope else "tasks" if self.tasks_module and line.common else "common"

    def tensors(self, args: Args, dims: Dims) -> Tensors:
        """The tensors of a site, and all those of the sites that it has some in common with.

        Raises: PlacementError P305 if sites of different sizes have one in common.
        """
        place = self.at(args, dims)
        own = {place.tensor(name): (place, name) for name in place.parameters}
        if not self._is_numbered:
            return own
        common = self._common_tensors(args, dims)
        if common.conflict is not None:

            def fits(others: Args) -> bool:
                return self._common_tensors({**args, **others}, dims).conflict is None

            raise size_refusal(self.form, *common.conflict, map(self.argument, args), fits)
        return common.tensors | {tensor: value for tensor, value in own.items() if tensor not in common.tensors}

    def _common_tensors(self, args: Args, dims: Dims) -> CommonTensors:
        key = tuple(sorted(args.items(), key=lambda item: item[0])), replace(dims, index=0, spread=(0, dims.spread[1]))
        if key not in self._tensors:
            places = [self.at(args, dims_at(dims, i)) for i in range(len(dims.spots))] or [self.at(args, dims)]
            if len(self._tensors) > 16:
                self._tensors.clear()
            self._tensors[key] = common_tensors([line for line in self._lines() if line.scope], places)
        return self._tensors[key]

    # What an adapter has in its place

    def export(self, args: Args) -> Export | None:
        """The form that is saved in its place."""
        return export_of(self, self.form, args)

    def saved_as(self, args: Args) -> str | None:
        export = self.export(args)
        return None if export is None else export.form.name

    def saved_arguments(self, args: Args) -> Mapping[str, str]:
        export = self.export(args)
        return super().saved_arguments(args) if export is None else export.arguments

    def _check_export(self, place: Place, args: Args, dims: Dims) -> None:
        """Raises: PlacementError if what is saved is not what the other form has."""
        try:
            check_export(self.export(args), place, args, dims)
        except FormError as error:
            raise self.illegal(error) from None

    def _lines(self) -> list[ast.Parameter]:
        return [line for line in self.form.body if isinstance(line, ast.Parameter)]

    def common(self, args: Args) -> Scope | None:
        scopes = {scope_of(line) for line in self._lines() if may_hold(line.condition, args)}
        scopes |= {"edit"} if self._is_pruned else set()
        return "edit" if "edit" in scopes else "group" if "group" in scopes or self.is_cross_layer else None

    def initial(self, args: Args, dims: Dims) -> float | None:
        return self.at(args, dims).value.initial

    def keeps_base(self, args: Args, dims: Dims) -> bool:
        return self.at(args, dims).value.first in self.inputs[:1]

    def not_affine(self, args: Args, dims: Dims) -> str | None:
        value = self.at(args, dims).value
        if dims.second is not None:
            return "it reads two states"
        shape = shape_of(value.type, dims.target)
        if isinstance(shape, Prompt):
            return "it adds tokens, which no weight holds"
        return value.reason if value.varies or not self.inputs else "its value does not depend on its input"

    def common_sizes(self, args: Args, dims: Dims) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The sizes of the parameters that sites share, by name: all sites need the same.

        Empty where they depend on the widest site, and `dims` do not say yet how wide that is.
        """
        is_unknown = (self._is_wide and dims.widest == (0, 0)) or (OVER_SITES in self._asked and not dims.spread[1])
        if is_unknown or self._is_numbered:  # `tensors` compares them
            return ()
        place = self.at(args, dims)
        states = ((print_expression(call.args[0]), place.type_of(call.args[0]).size) for call in place.layer_calls)
        return (*((n, place.sizes[n]) for n, p in place.parameters.items() if scope_of(p) != "site"), *states)

    def entries(self, args: Args, dims: Dims) -> int:
        if OVER_SITES not in self._asked:
            return super().entries(args, dims)
        place = self.at(self.fill(args), replace(dims, spread=(0, 0)))
        if place.pruning is not None:
            return prod(place.sizes[place.pruning.name])
        return super().entries(args, dims) if place.selection is None else place.selection.units

    def changed_entries(self, args: Args, dims: Dims) -> int | None:
        place = self.at(self.fill(args), dims)
        if not self.inputs and place.pruning is not None and place.pruning.fills:
            return place.pruning.entries
        if self.inputs or place.selection is None or not place.selection.fills:
            return None
        return prod(place.sizes[place.selection.values])

    def selects_rows(self, args: Args, dims: Dims) -> bool:
        """Whether it selects rows at each site."""
        selection = self.at(self.fill(args), dims).selection
        return selection is not None and not selection.together and selection.dimension == 0

    def shifts(self, args: Args, dims: Dims) -> bool:
        return self.at(args, dims).value.shifted

    def rank(self, args: Args, dims: Dims) -> int | None:
        value = self.at(args, dims).value
        size = value.type.size
        if len(size) != (1 if value.type.batch else 2) or not (value.type.batch or isinstance(dims.target, Weight)):
            return None
        widths = (*size, dims.input.d) if isinstance(dims.input, Tokens) else size
        if value.rank is None or value.rank > min(widths) - (len(size) == 2):
            return None
        return value.rank


def owner_path(line: ast.Parameter, form: TextForm) -> str:
    """The attribute of a module at a site with the module that has a parameter, dotted."""
    return f"{OWNER}.{OWNER}" if form.scope_at(line) == "tasks" else OWNER


_FORMS: dict[tuple[ast.Form, str, Span], TextForm] = {}


def text_form(form: ast.Form, source: Source | None = None) -> TextForm:
    """A form with a text: one object for a text at one place of a file."""
    own = form.origin or source
    key = (form, "" if own is None else own.path, form.span)
    if key not in _FORMS:
        if len(_FORMS) > 1_000:
            _FORMS.clear()
        _FORMS[key] = TextForm(form, own)
    return _FORMS[key]
