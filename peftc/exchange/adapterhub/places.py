"""Where AdapterHub's library keeps the parts of an adapter, and the sites that these are at."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from posixpath import commonpath

from torch import nn

from peftc.addressing.module_infos import infos_of
from peftc.addressing.site_list import site_list
from peftc.addressing.sites import Site
from peftc.diagnostics.suggestions import did_you_mean
from peftc.exchange.spec_text import unfit
from peftc.planning.selection.module_sites import module_site
from peftc.recognition.analysis import Analysis

# The dictionaries of a layer, for sub-layers whose residual sum is code of the layer itself. A
# module of its own for the sum has them as `adapters`.
LAYER_NAMES = {"self": "attention_adapters", "cross": "cross_attention_adapters", "ffn": "output_adapters"}
_OUTPUTS = {"self": "o", "cross": "o", "ffn": "down"}


class HubPlaces:
    """The sites of a model by the names of AdapterHub's library."""

    def __init__(self, analysis: Analysis, model: nn.Module) -> None:
        self.table, self.seen = analysis.table, analysis.structure.seen
        self.sites = {site.path: site for site in self.table.sites}
        self.model, self.modules = model, dict(model.named_modules(remove_duplicate=False))
        self.prefix = getattr(model, "base_model_prefix", "")

    @cached_property
    def sublayers(self) -> list[Site]:
        """Attentions and ffns inside of layers, in the order of the model."""
        return [site for site in self.sites.values() if site.steps_in_layer and site.steps[-1][0] in _OUTPUTS]

    @cached_property
    def layers(self) -> list[Site]:
        return [site for site in self.sites.values() if site.steps[-1][0] == "layer"]

    def embeddings(self, owner: str, name: str = "") -> Site:
        """The embeddings of a part of the model: its module of that name, or the last one of those
        that it calls once, before its layers, whose value has the features of the residual stream.

        Raises: P804.
        """
        inside = self.module(owner) if owner else self.prefix if self.prefix in self.modules else ""
        layers = [layer for layer in self.seen.layers if layer.startswith(f"{inside}.".lstrip("."))]
        names, calls = list(self.seen.calls), self.seen.calls
        before = names[: names.index(layers[0])] if layers else []
        infos = infos_of(self.table)
        own = [
            module
            for module in (infos.find(one) for one in before if one.rpartition(".")[0] == inside and one)
            if module is not None and module.output == self.table.d_model and calls[module.name].count == 1
            if not any(layer.startswith(f"{module.name}.") for layer in layers)
        ]
        chosen = [infos.find(self.module(f"{inside}.{name}".lstrip(".")))] if name else own[-1:]
        if not chosen or chosen[0] is None:
            raise unfit(f"`{owner}` has no embeddings that run once, before its layers")
        sites = site_list(self.table)
        site = module_site(chosen[0], sites)
        return site if isinstance(site, Site) else sites.at(site)

    @cached_property
    def output_embeddings(self) -> Site | None:
        """The head that gives scores of tokens."""
        module = getattr(self.model, "get_output_embeddings", lambda: None)()
        names = [name for name, other in self.modules.items() if other is module]
        return next((site for site in self.sites.values() if site.module in names and "h" in site.states), None)

    @property
    def has_decoder_behind_encoder(self) -> bool:
        """Whether tokens of two inputs pass layers."""
        return {site.steps[0][0] for site in self.layers} >= {"encoder", "decoder"}

    def layer(self, name: str) -> Site:
        """The layer of that name. Raises: P804."""
        module = self.module(name)
        site = next((site for site in self.layers if site.module == module), None)
        if site is None:
            raise unfit(f"`{module}` is no layer of the model")
        return site

    def module(self, name: str) -> str:
        """The module of that name, with a head around the model or without. Raises: P804."""
        names = [name, f"{self.prefix}.{name}", name.removeprefix(f"{self.prefix}."), name.partition(".")[2]]
        own = next((one for one in names if one in self.modules), None)
        if own is None:
            near = did_you_mean(name, list(self.modules))
            raise unfit(f"the model has no module `{name}`", *((near,) if near else ()))
        return own

    def sublayer(self, owner: str) -> Site:
        """The sub-layer whose parts a module has. Raises: P804."""
        parent, _, last = owner.rpartition(".")
        kind = next((kind for kind, name in LAYER_NAMES.items() if name == last), None)
        module = self.module(owner if kind is None else parent)
        inside = [site for site in self.sublayers if self._has_output(module, site)]
        chosen = inside if len(inside) == 1 else [site for site in inside if site.steps[-1][0] == kind]
        if len(chosen) != 1:
            raise unfit(f"`{owner}` is not of one attention or ffn of the model")
        return chosen[0]

    def owner(self, site: Site) -> str:
        """The module that has the parts: the smallest with the output and the norm."""
        kind = site.steps[-1][0]
        output, norm = (self.sites[f"{site.path}.{name}"].module for name in (_OUTPUTS[kind], "norm"))
        common = commonpath([output.replace(".", "/"), norm.replace(".", "/")]).replace("/", ".")
        own = [other for other in self.sublayers if self._has_output(common, other)]
        return common if len(own) == 1 else f"{common}.{LAYER_NAMES[kind]}"

    def _has_output(self, module: str, site: Site) -> bool:
        output = self.sites.get(f"{site.path}.{_OUTPUTS[site.steps[-1][0]]}")
        return output is not None and f"{output.module}.".startswith(f"{module}.")

    def attention(self, module: str) -> Site:
        """The attention that a module computes. Raises: P804."""
        for site in self.sublayers:
            query = self.sites.get(f"{site.path}.q")
            if query is not None and site.steps[-1][0] != "ffn" and f"{query.module}.".startswith(f"{module}."):
                return site
        raise unfit(f"`{module}` is no attention of the model")

    def has_relative_positions(self, site: Site) -> bool:
        """Whether trained numbers of the distance of tokens are added to the scores."""
        first = next(other for other in self.sublayers if other.group == site.group)
        return any(isinstance(one, nn.Embedding) for one in self.modules[first.module].modules())

    def projections(self, module: str) -> list[Site]:
        """The sites of a Linear; q, k and v of a fused one."""
        own = (site for site in self.sites.values() if site.module == module and "w" in site.states)
        return [site for site in own if "x" in site.states]

    def layer_number(self, site: Site) -> int:
        """As the library counts: those of an encoder first, those of a decoder behind them."""
        number = next(number for name, number in site.steps if name == "layer")
        assert number is not None
        if site.steps[0][0] != "decoder":
            return number
        return number + len({other.steps[:2] for other in self.sublayers if other.steps[0][0] == "encoder"})

    def is_behind_norm(self, site: Site) -> bool:
        """Whether the layer normalises the sum with the residual stream, as BERT does."""
        norm, add = (self.sites.get(f"{site.path}.{name}") for name in ("norm", "add"))
        if norm is None or add is None:
            return False
        return norm.states["x"].activation == add.states["h"].activation

    def shares_residual(self, site: Site) -> bool:
        """Whether another sub-layer of the layer is added to the same residual stream."""
        return any(other.states["res"] == site.states["res"] for other in self._beside(site))

    def _beside(self, site: Site) -> Iterator[Site]:
        depth = len(site.steps) - len(site.steps_in_layer)
        return (
            other
            for other in self.sublayers
            if other.path != site.path and other.steps[:depth] == site.steps[:depth] and "res" in other.states
        )
