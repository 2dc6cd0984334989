"""Thirty wishes of users, each a spec that says it: what a file states is what the model does.

The first line of a file is the wish. The comments below it name models of tests/zoo.py with fields
of their configurations, and tasks; `calibrated`, where training begins so; `at EDIT: PATHS`, the
sites; and `equation: MODULE: VALUE`, what a module of the base gives instead of `h`, of its input
`x` and the parameters of forms. `expect` states the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import peftc
from peftc.addressing.paths import compress_paths
from peftc.planning.report.plan import Plan
from tests import zoo
from tests.equations.test_more_functions import shaken

FILES = sorted(Path(__file__).parent.glob("*.peft"))
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(torch, name) for name in ("einsum", "rms_norm", "sigmoid", "softmax")
}


class Wish(NamedTuple):
    """A file, one of its models, and its effects: (edit, paths of its sites), ("", equation)."""

    path: Path
    model: str
    options: Mapping[str, int]
    tasks: list[str] | None
    effects: list[tuple[str, str]]

    @property
    def is_calibrated(self) -> bool:
        return "# calibrated\n" in self.path.read_text()

    def build(self) -> nn.Module:
        return zoo.build(self.model, torch.float64, **self.options).eval()

    @torch.no_grad()  # some kernels of a base round otherwise with gradients
    def outputs(self, model: nn.Module) -> Tensor:
        return model(**zoo.inputs(self.model, model)).logits


def wishes(path: Path) -> list[Wish]:
    lines = [line.removeprefix("# ") for line in path.read_text().partition("peft ")[0].splitlines()]
    tasks = [task for line in lines if line.startswith("tasks: ") for task in line[7:].split(", ")]
    matches = [re.fullmatch(r"(at (\S+?)|equation)(?: of (\w+))?: (.+)", line) for line in lines]
    cases = list[Wish]()
    for line in (line for line in lines if line.startswith("model: ")):
        name, *fields = line[7:].split()
        effects = [(m[2] or "", m[4]) for m in matches if m is not None and m[3] in (None, name)]
        options = {key: int(value) for key, value in (one.split("=") for one in fields)}
        cases.append(Wish(path, name, options, tasks or None, effects))
    return cases


CASES = [wish for path in FILES for wish in wishes(path)]


def test_there_are_thirty_wishes_with_effects() -> None:
    assert len(FILES) == 30
    for path in FILES:
        text = path.read_text()
        assert re.match(r'# ".+[.?]"\n# model: ', text), path
        assert "\nexpect " in text, path


@pytest.mark.parametrize("wish", CASES, ids=lambda wish: f"{wish.path.stem}-{wish.model}")
def test_the_model_does_what_the_wish_says(wish: Wish) -> None:
    model = wish.build()
    base = wish.outputs(model)
    plan = peftc.plan(wish.path.read_text(), wish.build(), tasks=wish.tasks)
    peftc.compile(wish.path.read_text(), model, seed=0, tasks=wish.tasks)  # raises where an `expect` does not hold
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == plan.totals.trained
    for edit, paths in (one for one in wish.effects if one[0]):
        sites = next(one.sites for one in plan.edits if one.name == edit)
        assert ", ".join(pattern for pattern, _ in compress_paths([site.path for site in sites])) == paths
    with peftc.task(model, wish.tasks[0]) if wish.tasks else nullcontext():
        check_outputs(wish, model, plan, base)
    if not any(p.requires_grad for name, p in model.named_parameters() if "peftc" not in name):
        peftc.remove(model)
        assert torch.equal(wish.outputs(model), base)


def check_outputs(wish: Wish, model: nn.Module, plan: Plan, base: Tensor) -> None:
    with peftc.disabled(model):
        assert torch.equal(wish.outputs(model), base)
    first = wish.outputs(model)
    assert torch.equal(first, base) == all(edit.identity for edit in plan.edits)
    if wish.is_calibrated:
        peftc.calibrate(model, [zoo.inputs(wish.model, model, labels=True)])
    value = wish.outputs(shaken(model))
    assert torch.equal(value, first) == (plan.totals.trained == 0)
    if equations := [text for edit, text in wish.effects if not edit]:
        torch.testing.assert_close(by_hand(wish, model, equations), value, rtol=0, atol=1e-10)


def by_hand(wish: Wish, model: nn.Module, equations: list[str]) -> Tensor:
    """The outputs of the base with hooks that compute the equations of the file."""
    base = wish.build()
    for path, text in (line.split(": ", 1) for line in equations):
        names = [path.format(i=i) for i in range(len(list(base.modules())))] if "{i}" in path else [path]
        for name in names:
            if any(one == name for one, _ in base.named_modules()):
                base.get_submodule(name).register_forward_hook(hook(text, parameters(model, name)))
    return wish.outputs(base)


def parameters(model: nn.Module, module: str) -> dict[str, SimpleNamespace]:
    """The tensors of the forms at a module, and of those that sites have in common, by form."""
    forms: dict[str, SimpleNamespace] = {}
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if name.startswith((f"{module}.peftc.", "peftc_shared.")):
            form, _, own = name.rpartition(".")
            form = form.rpartition(".")[2].rpartition("_")[2]
            setattr(forms.setdefault(form, SimpleNamespace()), own, tensor)
    return forms


def hook(text: str, forms: Mapping[str, SimpleNamespace]) -> Callable[..., Any]:
    def replace(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        state = output[0] if isinstance(output, tuple) else output
        value = eval(text, {**FUNCTIONS, **forms, "h": state, "x": args[0] if args else None})
        return (value, *output[1:]) if isinstance(output, tuple) else value

    return replace
