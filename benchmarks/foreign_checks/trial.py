"""An edit on a model: identity, effect in every mode, values, gradients, copies, fold, removal."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import peftc
from benchmarks.families.failures import reason_of
from benchmarks.families.forward import main_output
from benchmarks.families.state import State, difference, state_of
from benchmarks.foreign_checks.edits import Arm, Trial
from benchmarks.foreign_checks.modes import MODES, fresh, gap, run
from benchmarks.foreign_checks.plain import is_tied
from benchmarks.foreign_checks.roles import Comparison, Entry
from benchmarks.foreign_checks.values import NotComparable, reference_of
from benchmarks.foreign_models.case import Case

Answer = dict[str, Any]


class Base:
    """A case's model before an edit."""

    def __init__(self, case: Case, dtype: torch.dtype, inputs: Mapping[str, Any], dynamo: bool) -> None:
        self.case, self.dtype, self.inputs, self.dynamo = case, dtype, inputs, dynamo
        self.tolerance = 1e-10 if dtype == torch.float64 else 1e-4
        self.roles = frozenset(role for stack in case.stacks for role in stack.roles)
        model = self.model()
        self.names = list(state_of(model).tensors)
        self.unfrozen = run(case, model, inputs, "no_grad")
        # As an edit leaves the base. Some code computes in another order where nothing requires a
        # gradient, even under no_grad.
        model.requires_grad_(False)
        self.out = {mode: run(case, model, inputs, mode) for mode in ("eval", "no_grad")}
        self.out["train"] = run(case, model, inputs, "train")
        # Dropout draws: outputs in training are compared only where there is none.
        draws = [run(case, self.model(), inputs, "train", seed) for seed in (0, 1)]
        self.modes = MODES if torch.equal(*draws) else ("eval", "no_grad")
        self.copies = _works(lambda: copy.deepcopy(self.model()))
        self.clones = _works(lambda: cloned(self.model()))
        self.pickles = _works(lambda: pickle.loads(pickle.dumps(self.model())))
        self.compiles = _works(lambda: _through_dynamo(case, self.model(), inputs)) if dynamo else ""

    def model(self) -> nn.Module:
        return fresh(self.case, self.dtype)


def cloned(model: nn.Module) -> nn.Module:
    """A deep copy that shares the static methods in modules, which `copy.deepcopy` refuses."""
    attributes = [value for module in model.modules() for value in vars(module).values()]
    return copy.deepcopy(model, {id(value): value for value in attributes if isinstance(value, staticmethod)})


def _works(action: Callable[[], Any]) -> str:
    """Empty where the base can do it, else the reason."""
    try:
        action()
    except Exception as error:
        return reason_of(error)
    return ""


def _through_dynamo(case: Case, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    torch._dynamo.reset()
    compiled = torch.compile(model.eval().__call__, backend="eager")
    torch.manual_seed(0)
    out = compiled(**inputs)
    return case.output(out) if case.output else main_output(out)


def tried(base: Base, trial: Trial, comparison: Comparison) -> Answer:
    """The verdict on one trial: pass, refused, incomplete (sites are missing), error or wrong."""
    arms = [arm for arm in trial.arms if arm.applies(base.roles)]
    answer = _checked(base, trial, arms, comparison) if arms else _must_refuse(base, trial)
    return answer | {"counts": trial.counts, "arms": [arm.selector for arm in arms]}


def _must_refuse(base: Base, trial: Trial) -> Answer:
    """No layer has such a part: the edit must be refused."""
    try:
        peftc.compile(trial.text(trial.arms), base.model(), seed=0, sample=base.inputs)
    except peftc.PeftcError as error:
        absent = all(d.code.startswith("P2") for d in error.diagnostics)
        return {"verdict": "pass" if absent else "refused", "reason": reason_of(error)}
    except Exception as error:
        return {"verdict": "error", "reason": reason_of(error)}
    return {"verdict": "wrong", "reason": "compiled although no layer has such a part"}


def _checked(base: Base, trial: Trial, arms: list[Arm], comparison: Comparison) -> Answer:
    model = base.model()
    before = state_of(model)
    try:
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            peftc.compile(trial.text(arms), model, seed=0, sample=base.inputs)
    except peftc.PeftcError as error:
        change = difference(before, state_of(model))
        verdict = "wrong" if change else "error" if any(d.code > "P9" for d in error.diagnostics) else "refused"
        return {"verdict": verdict, "reason": reason_of(error) + (f"; left changed: {change}" if change else "")}
    except Exception as error:  # peftc raises nothing else on purpose
        return {"verdict": "error", "reason": reason_of(error)}
    warned = [str(record.message) for record in records if issubclass(record.category, peftc.PeftcWarning)]
    problems, notes = _Checks(base, trial, model, before, comparison).all()
    if lacking := _unedited(arms, comparison):
        problems["incomplete" if warned else "silently incomplete"] = lacking
    return _verdict(problems) | ({"notes": notes} if notes else {}) | ({"warnings": warned[:2]} if warned else {})


def _verdict(problems: Mapping[str, str]) -> Answer:
    if not problems:
        return {"verdict": "pass"}
    reasons = {"reason": "; ".join(f"{name}: {text}" for name, text in problems.items())}
    kinds = {"incomplete": "incomplete", "not folded": "refused"}
    verdicts = {kinds.get(name, "error" if name.endswith("raises") else "wrong") for name in problems}
    return {"verdict": next(v for v in ("wrong", "error", "incomplete", "refused") if v in verdicts), **reasons}


def _unedited(arms: Iterable[Arm], comparison: Comparison) -> str:
    """What the table has of an edit's arms in some layer, and the sites have not."""
    lacking = {role for arm in arms for role in _lacking(arm, comparison)}
    return f"some layers have no site for {', '.join(sorted(lacking))}" if lacking else ""


def _lacking(arm: Arm, comparison: Comparison) -> Iterable[str]:
    if "." in arm.selector:
        return {role for role in comparison.partial if arm.applies([role])}
    # A whole sub-layer: one site of any of its roles shows that it is known.
    known = {_place(entry) for entry in comparison.sites.values() if arm.applies([entry.role])}
    return (
        {_place(e)[2] for e in comparison.expected if arm.applies([e.role]) and _place(e) not in known} if known else ()
    )


def _place(entry: Entry) -> tuple[int, Any, str]:
    """The stack, the layer and the sub-layer of an entry."""
    return id(entry.stack), entry.layer, entry.role.rpartition(".")[0].removesuffix(".q").removesuffix(".k")


class _Checks:
    """The checks of one compiled model. Each gives a reason, or an empty text."""

    def __init__(self, base: Base, trial: Trial, model: nn.Module, before: State, comparison: Comparison) -> None:
        self.base, self.trial, self.model, self.before, self.comparison = base, trial, model, before, comparison
        self.notes: list[str] = []
        self.parameters = peftc.parameters(model)
        self.out: dict[str, Tensor] = {}
        self.reference: nn.Module | None = None
        self.leaves: dict[str, Tensor] = {}
        self.unfolded = ""

    def all(self) -> tuple[dict[str, str], list[str]]:
        steps = {
            "identity": self.identity,
            "effect": self.effect,
            "modes": self.modes,
            "values": self.values,
            "gradients": self.gradients,
            "deepcopy": self.deepcopy,
            "pickle": self.pickle,
            "torch.compile": self.dynamo,
            "fold": self.fold,
            "not folded": self.left,
            "remove": self.remove,
        }
        problems: dict[str, str] = {}
        for name, step in steps.items():
            try:
                if reason := step():
                    problems[name] = reason
            except NotComparable as error:
                self.notes.append(f"values not compared: {error}")
            except Exception as error:
                problems[f"{name} raises"] = reason_of(error)
            if "identity raises" in problems or "effect raises" in problems:
                break
        return problems, self.notes

    def run(self, mode: str, model: nn.Module | None = None) -> Tensor:
        model = self.model if model is None else model
        if mode == "train":
            model = self.copy(model)
        return run(self.base.case, model, self.base.inputs, mode)

    def copy(self, model: nn.Module) -> nn.Module:
        self.run("no_grad", model)  # weights that a forward has computed are no part of a graph now
        return cloned(model)

    def identity(self) -> str:
        if not self.trial.identity:
            return ""
        gaps = {mode: gap(self.run(mode), self.base.out[mode]) for mode in self.base.modes}
        return ", ".join(f"off by {value:.1e} in {m}" for m, value in gaps.items() if value > self.base.tolerance)

    def effect(self) -> str:
        _draw(self.parameters)
        self.out = {mode: self.run(mode) for mode in MODES}
        gaps = {mode: gap(self.out[mode], self.base.out[mode]) for mode in self.base.modes}
        return ", ".join(f"none in {m}" for m, value in gaps.items() if value <= self.base.tolerance)

    def modes(self) -> str:
        """eval with and without gradients is one function: no fast path goes around an edit."""
        off = gap(self.out["no_grad"], self.out["eval"])
        own = gap(self.base.out["no_grad"], self.base.out["eval"])
        return f"eval and no_grad differ by {off:.1e}" if off > max(self.base.tolerance, 10 * own) else ""

    def values(self) -> str:
        if not self.trial.identity:
            raise NotComparable("a prefix has no reference")
        self.leaves = {name: p.detach().clone().requires_grad_() for name, p in self.parameters.items()}
        self.reference = reference_of(self.base.model(), self.comparison, self.trial, self.leaves)
        stateful = any("parametrizations" in n or n.endswith(("_orig", "_v")) for n in self.base.names)
        buffers = [(buffer, buffer.clone()) for buffer in self.reference.buffers()]
        expected = {m: run(self.base.case, self.reference, self.base.inputs, m) for m in ("eval", "train")}
        for buffer, before in buffers:  # running means, which a forward in training moves
            buffer.copy_(before)
        if unreached := getattr(self.reference, "unreached", []):
            raise ValueError(f"the table's module {unreached[0]} is never called")
        modes = [m for m in self.base.modes if m != "no_grad" and not (m == "train" and stateful)]
        gaps = {mode: gap(self.out[mode], expected[mode]) for mode in modes}
        return ", ".join(f"off by {value:.1e} in {m}" for m, value in gaps.items() if value > self.base.tolerance)

    def gradients(self) -> str:
        actual = self._gradients(self.model, self.parameters)
        if self.reference is None:
            lacking = [name for name, g in actual.items() if g is None or not g.any()]
            return f"none at {lacking[0]} and {len(lacking) - 1} others" if len(lacking) == len(actual) else ""
        expected = self._gradients(self.reference, self.leaves)
        for name, one in expected.items():
            zero = torch.zeros_like(self.leaves[name])
            mine, theirs = (zero if g is None else g for g in (actual[name], one))
            if (off := gap(mine, theirs)) > 10 * self.base.tolerance:
                return f"off by {off:.1e} at {name}"
        return "" if any(g is not None and g.any() for g in expected.values()) else "none in the reference"

    def _gradients(self, model: nn.Module, leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        out = run(self.base.case, model, self.base.inputs, "eval")
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        loss = (out * weights.to(out.dtype)).sum()
        return dict(zip(leaves, torch.autograd.grad(loss.real, list(leaves.values()), allow_unused=True), strict=True))

    def deepcopy(self) -> str:
        self.run("no_grad")
        return self._unequal("deepcopy", self.base.copies, lambda: copy.deepcopy(self.model))

    def pickle(self) -> str:
        self.run("no_grad")
        return self._unequal("pickle", self.base.pickles, lambda: pickle.loads(pickle.dumps(self.model)))

    def dynamo(self) -> str:
        if not (self.base.dynamo and self.trial.dynamo):
            return ""
        if self.base.compiles:
            self.notes.append(f"the base has no torch.compile: {self.base.compiles}")
            return ""
        off = gap(_through_dynamo(self.base.case, self.model, self.base.inputs), self.out["eval"])
        return f"off by {off:.1e}" if off > self.base.tolerance else ""

    def fold(self) -> str:
        if not self.trial.folds or self.base.clones:
            return ""
        model = self.copy(self.model)
        peftc.fold(model)
        tied = {p for p, e in self.comparison.sites.items() if is_tied(self.base.model(), e.reference)}
        self.unfolded = _edits_of(model, tied)
        off = gap(self.run("eval", model), self.out["eval"])
        return f"off by {off:.1e}" if off > self.base.tolerance else ""

    def left(self) -> str:
        """What `fold` reports as it is, and leaves active."""
        return self.unfolded

    def remove(self) -> str:
        peftc.remove(self.model)
        if change := difference(self.before, state_of(self.model)):
            return f"is not gone: {change}"
        same = torch.equal(self.run("no_grad"), self.base.unfrozen)
        return "" if same else "the output is not that of the base"

    def _unequal(self, name: str, reason: str, action: Callable[[], nn.Module]) -> str:
        if reason:
            self.notes.append(f"the base has no {name}: {reason}")
            return ""
        off = gap(self.run("eval", action()), self.out["eval"])
        return f"off by {off:.1e}" if off > 0 else ""


def _edits_of(model: nn.Module, tied: Collection[str]) -> str:
    """The parameters that a folded model still has, in a few words. `tied`: sites of weights that
    other modules have, too, into which nothing can be folded.
    """
    try:
        left = [name for name in peftc.parameters(model) if name.split("/")[1] not in tied]
    except peftc.PeftcError:
        return ""  # not compiled any more
    return f"{left[0]} and {len(left) - 1} others" if left else ""


@torch.no_grad()
def _draw(parameters: Mapping[str, nn.Parameter]) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in parameters.values():
        parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
