"""The layers of a model by number, for values that differ by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from peftc.addressing.renaming import LayerName
from peftc.addressing.site_list import show_steps, site_list
from peftc.addressing.sites import Site, SiteTable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.planning.ir import SiteEdit
from peftc.planning.report.layer_values import PlanLayerValues
from peftc.planning.representatives import Representatives
from peftc.semantics.layer_values import Body, LayerNumber, at_layer, body_at_layer, differs, values_by_layer
from peftc.syntax import ast
from peftc.syntax.printer import print_expression


class LayerNumbers:
    """The layers of a table of sites."""

    def __init__(self, table: SiteTable) -> None:
        layers = [block.layer for block in site_list(table).blocks if block.layer is not None]
        depths = Counter(map(_stack, layers))
        self._by_module: dict[str, list[tuple[str, LayerNumber]]] = {}
        for layer in layers:
            number = LayerNumber(_stack(layer), layer.steps[-1][1] or 0, depths[_stack(layer)], layer.runs)
            self._by_module.setdefault(layer.module, []).append((layer.path, number))

    def of_layer(self, layer: LayerName) -> LayerNumber:
        return dict(self._by_module[layer.module])[layer.path]

    def of(self, site: Site) -> LayerNumber | None:
        """The layer that a site is in, by its path or by its module; None outside of layers."""
        prefixes = list(accumulate(site.module.split("."), lambda parent, part: f"{parent}.{part}"))
        layers = [one for name in reversed(prefixes) for one in self._by_module.get(name, ())]
        own = [number for path, number in layers if site.path == path or site.path.startswith(f"{path}.")]
        return own[0] if own else layers[0][1] if len(layers) == 1 else None

    def body(self, edit: ast.Edit, site: Site) -> Body:
        """The equations of an edit at a site. Raises: P321, P322."""
        if not differs(edit.body):
            return edit.body
        body = body_at_layer(edit.body, self.of(site), site.path)
        for other in site.shared_with:
            if body_at_layer(edit.body, self.of(other), other.path) != body:
                _, value = next(values_by_layer(edit.body))
                message = f"`{print_expression(value)}` differs by layer, and one module is at several of them"
                notes = (f"`{site.path}` and `{other.path}` are `{site.module}`",)
                help_ = "write one value"
                raise PeftcError(Diagnostic("P323", message, value.span, notes=notes, help=help_))
        return body

    def variants(self, edits: Sequence[ast.Edit], layer: LayerName | None) -> Iterator[object]:
        """What of some edits differs by layer, at one."""
        if layer is None:
            return
        for edit in edits:
            try:
                yield body_at_layer(edit.body, self.of_layer(layer), layer.path)
            except PeftcError:  # which is reported at the sites
                yield layer

    def plan_values(
        self, edit: ast.Edit, site_edits: Iterable[SiteEdit], representatives: Representatives
    ) -> Iterator[PlanLayerValues]:
        """What of an edit differs by layer, at those of its sites."""
        if not differs(edit.body):
            return
        stacks: dict[str, dict[int, LayerNumber]] = {}
        for site in (use for one in site_edits for use in one.site.uses):
            for layer in self._alike(site, representatives):
                stacks.setdefault(layer.stack, {})[layer.number] = layer
        for name, value in dict.fromkeys(values_by_layer(edit.body)):
            for stack, numbers in stacks.items():
                own = tuple(sorted(numbers))
                values = tuple(print_expression(at_layer(value, numbers[i], stack)) for i in own)
                yield PlanLayerValues(name=name or print_expression(value), stack=stack, layers=own, values=values)

    def _alike(self, site: Site, representatives: Representatives) -> list[LayerNumber]:
        """The layers of all sites that a representative stands for."""
        place, blocks = representatives.place(site), representatives.sites.blocks
        if place is None:
            return [layer for layer in (self.of(site),) if layer is not None]
        names = (blocks[block].layer for block in representatives.alike_blocks(place))
        return [self.of_layer(name) for name in names if name is not None]


def with_text(site_edit: SiteEdit, edit: ast.Edit) -> SiteEdit:
    """An edit at a site, with the equations as the spec has them."""
    equations = [line for line in edit.body if isinstance(line, ast.Equation)]
    pairs = zip(site_edit.assigns, equations, strict=True)
    return replace(site_edit, assigns=tuple(replace(assign, text=text) for assign, text in pairs))


def _stack(layer: LayerName) -> str:
    return show_steps((*layer.steps[:-1], (layer.steps[-1][0], None)))
