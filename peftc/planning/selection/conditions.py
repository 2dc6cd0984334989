"""Which of the sites of a selector an edit has, by its conditions: `where d(x) >= 1024`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from peftc.addressing.selection import Selection
from peftc.addressing.site_list import Place
from peftc.addressing.sites import Site
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import for_sites, join_names, plural
from peftc.equations.operands import Operands
from peftc.equations.values import FormError, Type, real, type_of
from peftc.equations.words import OUT
from peftc.forms.shapes import KeyValue
from peftc.planning.layer_numbers import LayerNumbers
from peftc.semantics.layer_values import LayerNumber, at_layer
from peftc.syntax import ast
from peftc.syntax.numbers import COMPARISONS
from peftc.syntax.printer import print_expression, print_selector, print_where
from peftc.syntax.walk import condition_values, walk

_NO_FORM = ast.Form("", (), ())


@dataclass
class Conditions:
    """The conditions of an edit or a `train` statement."""

    statement: ast.Edit | ast.Train
    layers: LayerNumbers
    errors: dict[object, list[Diagnostic]] = field(default_factory=dict[object, list[Diagnostic]])
    values: dict[str, dict[str, None]] = field(default_factory=dict[str, dict[str, None]])  # of sizes, for messages

    def split(self, selection: Selection) -> tuple[Selection, Selection]:
        """The sites at which all conditions hold, and the others.

        Raises: P205 for a site without a state that a condition reads, P310 for a size that its
            state lacks, P322 for `layer` outside of layers, P221 if no site is left.
        """
        if not self.statement.where:
            return selection, Selection(selection.sites, {}, {})
        items = {key: numbers for key, numbers in selection.items.items() if self._is_at(selection, *key)}
        others = {path: site for path, site in selection.others.items() if self._holds(site, self.layers.of(site))}
        if self.errors:
            raise PeftcError(for_sites(errors, " of this edit") for errors in self.errors.values())
        left = Selection(selection.sites, items, others)
        if not len(left):
            raise PeftcError(self._nothing_left(selection))
        return left, selection - left

    def _is_at(self, selection: Selection, block: int, item: int) -> bool:
        site, layer = selection.sites.template_site(Place(block, item)), selection.sites.blocks[block].layer
        return self._holds(site, None if layer is None else self.layers.of_layer(layer))

    def _holds(self, site: Site, layer: LayerNumber | None) -> bool:
        try:
            return all(self._condition(condition, site, layer) for condition in self.statement.where)
        except PeftcError as error:
            for one in error.diagnostics:
                self.errors.setdefault((one.code, one.span), []).append(one)
            return False

    def _condition(self, condition: ast.Condition, site: Site, layer: LayerNumber | None) -> bool:
        left, right = (self._number(side, site, layer) for side in condition_values(condition))
        return COMPARISONS[condition.op](left, right)

    def _number(self, value: ast.Expr, site: Site, layer: LayerNumber | None) -> int | float:
        here = at_layer(value, layer, site.path)
        types, pair = self._types(here, site)
        operands = Operands(_NO_FORM, {}, types, tuple(types), pair=pair)
        try:
            number = real(operands.number(here), here)
        except FormError as error:
            message = f"{error.message}, at `{site.path}`"
            raise PeftcError(Diagnostic(error.code, message, error.node.span, help=error.help)) from None
        if not isinstance(value, ast.Number):
            self.values.setdefault(print_expression(value), {})[f"{number:g}"] = None
        return number

    def _types(self, value: ast.Expr, site: Site) -> tuple[dict[str, Type], KeyValue | None]:
        """The types of the states that an expression reads. Raises: P205."""
        types, pair = dict[str, Type](), None
        for name in (part for part in walk(value) if isinstance(part, ast.Name)):
            state = site.states.get(self._written if name.id == OUT else name.id)
            if state is None:
                message = f"`{site.path}` has no state `{name.id}`, whose size the condition asks"
                notes = (f"it has {join_names(site.states)}",) if site.states else ()
                help_ = "name other sites, or a state that all of them have"
                raise PeftcError(Diagnostic("P205", message, name.span, notes=notes, help=help_))
            if name.id == OUT and isinstance(state.shape, KeyValue):
                pair = state.shape
            if (type_ := type_of(state.shape)) is not None:
                types[name.id] = type_
        return types, pair

    @property
    def _written(self) -> str:
        """The state that the equations write."""
        body: Sequence[ast.Statement] = self.statement.body if isinstance(self.statement, ast.Edit) else ()
        return next((line.target for line in body if isinstance(line, ast.Equation)), "")

    def _nothing_left(self, selection: Selection) -> Diagnostic:
        where = self.statement.where
        span = where[0].span.until(where[-1].span)
        text, selector = print_where(self.statement).strip(), print_selector(self.statement.selector)
        message = f"`{text}` leaves no site of `{selector}`"
        notes = (f"{plural(len(selection), 'site')}: {'; '.join(self._shown())}",)
        return Diagnostic("P221", message, span, label="nowhere so", notes=notes, help="ask for less")

    def _shown(self) -> Iterator[str]:
        for text, numbers in self.values.items():
            some = sorted(map(float, numbers))
            ends = f"{some[0]:g}" if len(some) == 1 else f"{some[0]:g} to {some[-1]:g}"
            yield f"`{text}` is {ends}"
