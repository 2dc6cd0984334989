"""Selectors for modules, as a person would write them: by roles, else by names."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from peftc.addressing.paths import BRANCHES, index_ranges, stack_steps
from peftc.addressing.sites import Site, SiteTable
from peftc.diagnostics import PeftcError
from peftc.planning.selection.selectors import resolve
from peftc.syntax import ast
from peftc.syntax.parser import parse_text

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


class Selectors:
    """Texts of selectors on one model. `step`: the last of the sites, if not the modules' own."""

    def __init__(self, table: SiteTable) -> None:
        self.table = table
        self.texts: dict[str, frozenset[str] | None] = {}
        self.sites: dict[str, list[Site]] = {}
        for site in table.sites:
            self.sites.setdefault(site.module, []).append(site)

    def text(self, modules: Sequence[str], step: str = "") -> str | None:
        """Arms that select the sites of these modules and no others; None where none do."""
        left, arms = dict.fromkeys(modules), list[str]()
        for module in modules:
            if module in left:
                arm, hit = self.arm(module, left, modules, step)
                if arm is None:
                    return None
                arms.append(arm)
                left = {name: None for name in left if name not in hit}
        return " | ".join(arms)

    def arm(
        self, module: str, left: Collection[str], modules: Sequence[str], step: str
    ) -> tuple[str | None, frozenset[str]]:
        """The shortest text whose sites are all of these modules, `module` among them."""
        for text in (*self._paths(module, "*", step), *self._ranges(module, left, step), *_globs(module, step)):
            hit = self.hit(text, step)
            if hit is not None and module in hit and hit <= set(modules):
                return text, hit
        return None, frozenset()

    def hit(self, text: str, step: str) -> frozenset[str] | None:
        """The modules whose sites a text selects; None if it selects others, or nothing."""
        if text not in self.texts:
            self.texts[text] = self._hit(text, step)
        return self.texts[text]

    def _hit(self, text: str, step: str) -> frozenset[str] | None:
        try:
            (edit,) = parse_text(f"peft 2\nedit e at {text} {{ h = h }}\n").statements
            assert isinstance(edit, ast.Edit)
            sites = resolve(edit.selector, self.table)
        except PeftcError:
            return None
        whole = all(is_whole(site) if not step else site.steps[-1][0] == step for site in sites)
        return frozenset(site.module for site in sites) if whole else None

    def _own(self, module: str, step: str) -> Iterator[Site]:
        for site in self.sites.get(module, ()):
            if (site.steps[-1][0] == step) if step else is_whole(site):
                yield site

    def _paths(self, module: str, index: str, step: str) -> list[str]:
        """The paths of a module's site, the shortest first."""
        texts = dict.fromkeys(text for site in self._own(module, step) for text in _abbreviations(site, index))
        return sorted(texts, key=len)

    def _ranges(self, module: str, left: Collection[str], step: str) -> Iterator[str]:
        """The same in some of the layers."""
        numbers: Mapping[str, set[int]] = {}
        for other in left:
            for site in self._own(other, step):
                layers = [number for name, number in site.steps if name == "layer" and number is not None]
                for text in _abbreviations(site, "*") if len(layers) == 1 else ():
                    numbers = {**numbers, text: {*numbers.get(text, set()), layers[0]}}
        for text in self._paths(module, "*", step):
            if text in numbers:
                yield text.replace("layer[*]", f"layer[{index_ranges(sorted(numbers[text]))}]", 1)


def is_whole(site: Site) -> bool:
    """Whether a site is that of the whole weight of a module, or of a bias alone."""
    weight = site.states.get("w") or site.states.get("b")
    return weight is not None and weight.weight is not None and not weight.weight.is_partial


def _abbreviations(site: Site, index: str) -> Iterator[str]:
    names = [name for name, _ in site.steps]
    steps = [name if number is None else f"{name}[{index}]" for name, number in site.steps]
    stack = stack_steps(names)
    for start in {0, stack}:
        for short in (True, False):
            own = [s for i, s in enumerate(steps) if i >= start and not (short and names[i] in BRANCHES)]
            yield ".".join(own)


def _globs(module: str, step: str) -> Iterator[str]:
    if step == f'"{module}"':  # of a module without a role
        yield step
    if not step:
        numbers = len(_NUMBER.findall(module))
        if numbers:
            yield f'"{_NUMBER.sub("*", module, count=1)}"'
            yield f'"{_NUMBER.sub("*", module)}"'
        yield f'"{module}"'
