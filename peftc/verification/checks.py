"""Checks the whole model: outputs, gradients, disabled, removed and folded edits, and decoding."""

import logging
import warnings
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from peftc.concurrency.interrupts import shielded
from peftc.diagnostics import PeftcError
from peftc.folding import fold
from peftc.installation.disable import disabled
from peftc.models.samples import copy_sample
from peftc.planning import ir
from peftc.verification.comparison import (
    Batch,
    CallResult,
    Comparison,
    CompiledModelError,
    compiled_model_errors,
    unavailable_on_error,
)
from peftc.verification.forward_modes import ALL_BUT_EVALUATION, EVALUATION, ForwardMode, training_mode
from peftc.verification.reference.locations import EditKey, ReferenceUnavailable, key_of
from peftc.verification.reference.outputs import (
    GRADIENT_FACTOR,
    Difference,
    Recorder,
    first_difference,
    first_differing_input,
    first_differing_output,
    model_outputs,
)
from peftc.verification.report import Check, Finding

NOWHERE = (None, None)
FOLD_FACTOR = 10.0  # folded weights are rounded
GRADIENT_FLOOR = {torch.float32: 1e-6, torch.float64: 1e-10}  # relative to the largest gradient; else 1e-3
NEW_TOKENS = 3
READS_ALL = "a form reads all tokens of a call: with a cache its equation has another value"
INPUTS = ("input_ids", "attention_mask", "inputs_embeds")
Logits = tuple[Tensor, ...]  # of each new token


@dataclass
class CheckResults:
    """`perturbed`: the number of sites by edit, and `inert`: that of those without an effect."""

    checks: list[Check] = field(default_factory=list[Check])
    findings: list[Finding] = field(default_factory=list[Finding])
    perturbed: Counter[str] = field(default_factory=Counter[str])
    inert: Counter[str] = field(default_factory=Counter[str])

    def add(self, name: str, *findings: Finding, detail: str = "") -> None:
        """A check that fails if there are findings, else holds."""
        outcome, detail = ("fails", findings[0].message) if findings else ("holds", detail)
        self.checks.append(Check(name=name, outcome=outcome, detail=detail))
        self.findings += findings

    def skip(self, name: str, reason: str) -> None:
        self.checks.append(Check(name=name, outcome="not checked", detail=reason))

    def compare(self, name: str, code: str, context: str, difference: Difference | None) -> None:
        findings = [Finding(code=code, message=f"{context}: {d}", size=d.size) for d in (difference,) if d is not None]
        self.add(name, *findings)

    @contextmanager
    def attempt(self, name: str, code: str) -> Generator[None]:
        """A check that fails if the compiled model alone raises, and else is skipped on errors."""
        try:
            yield
        except ReferenceUnavailable as reason:
            self.skip(name, str(reason))
        except CompiledModelError as error:
            self.add(name, Finding(code=code, message=f"{name}: {error}"))
        except PeftcError as error:
            self.skip(name, f"{error.diagnostics[0].code}: {error.diagnostics[0].message}")


def check_base(comparison: Comparison, original: nn.Module | None, results: CheckResults) -> None:
    """Disabled and removed edits leave the base, bit for bit."""
    compiled, name = comparison.compiled, "disabled equals the base"
    with torch.no_grad():
        base = model_outputs(comparison.base(**copy_sample(comparison.batch)))
        with results.attempt(name, "P607"), disabled(compiled):
            with comparison.own_errors(EVALUATION):
                outputs = model_outputs(compiled(**copy_sample(comparison.batch)))
            results.compare(name, "P607", "inside `peftc.disabled`", first_difference(base, outputs, 0))
        if original is None:
            return
        name = "removed equals the base"
        with results.attempt(name, "P608"), training_mode(original, False):
            with unavailable_on_error("it does not run: "):
                outputs = model_outputs(original(**copy_sample(comparison.batch)))
            difference = first_difference(outputs, base, 0) or state_difference(original, comparison.base)
            results.compare(name, "P608", "after `peftc.remove`", difference)


def state_difference(first: nn.Module, second: nn.Module) -> Difference | None:
    """The first parameter, buffer or module class that differs."""
    classes = {name: type(module) for name, module in first.named_modules()}
    for name, module in second.named_modules():
        if classes.get(name) is not type(module):
            return Difference(name, float("inf"), 0.0, 0.0)
    return first_difference(dict(first.state_dict()), dict(second.state_dict()), 0)


def check_equations(comparison: Comparison, results: CheckResults) -> bool:
    """Compares outputs and gradients: at the present parameters, after noise, in every mode."""
    if comparison.unavailable:
        for name in ("outputs", "gradients", "ways of calling"):
            results.skip(f"{name} equal the equations", f"{len(comparison.unavailable)} sites could not be witnessed")
        return False
    name = "outputs equal the equations"
    for check, is_random in ((name, False), (f"{name}, parameters moved", True)):
        comparison.reset()
        with results.attempt(check, "P602"):
            if is_random:
                comparison.randomize()
            difference = comparison.output_difference()
            if difference is None:
                results.add(check)
                continue
            results.add(check, locate_fault(comparison, difference))
        return False
    for mode in ALL_BUT_EVALUATION:
        with results.attempt(f"{mode.name}: outputs", "P610"):
            check_mode(comparison, mode, results)
        comparison.compiled.zero_grad(set_to_none=True)
    return True


def check_mode(comparison: Comparison, mode: ForwardMode, results: CheckResults) -> None:
    name = f"{mode.name}: outputs"
    if mode.train:
        # A function that is compiled at its first call is not compiled under a torch function mode.
        compiled = comparison.compiled
        with comparison.selected_task(), training_mode(compiled, True), torch.no_grad(), comparison.own_errors(mode):
            compiled(**copy_sample(comparison.batch))
    expected = comparison.run_reference(mode)
    actual = comparison.run_compiled(mode)
    difference = first_difference(expected.outputs, actual.outputs)
    if difference is None:
        results.add(name)
    elif first_difference(actual.outputs, comparison.run_compiled(mode).outputs) is not None:
        results.skip(name, "two calls of the model differ, with the same parameters and inputs")
        return
    else:
        module = edit = site = None
        with suppress(ReferenceUnavailable, CompiledModelError):
            module, (edit, site) = first_differing_module(comparison, mode)
        message, size = f"in {mode.name}: {difference}", difference.size
        results.add(name, Finding(code="P610", message=message, edit=edit, site=site, module=module, size=size))
    if mode.gradients:
        check_gradients(comparison, mode, expected, actual, results)


def check_gradients(
    comparison: Comparison, mode: ForwardMode, expected: CallResult, actual: CallResult, results: CheckResults
) -> None:
    """Compares the gradients of the edits' parameters. No other parameter may have one."""
    name = f"{mode.name}: gradients"
    if expected.gradient_error or actual.gradient_error:
        results.skip(name, expected.gradient_error or actual.gradient_error)
        return
    findings: list[Finding] = []
    largest = max((value.abs().max().item() for value in expected.gradients.values() if value.numel()), default=0.0)
    for parameter, value in expected.gradients.items():
        difference = first_difference({parameter: value}, {parameter: actual.gradients[parameter]}, GRADIENT_FACTOR)
        floor = GRADIENT_FLOOR.get(value.dtype, 1e-3) * largest
        if difference is not None and difference.size > 1e-2 * difference.bound / GRADIENT_FACTOR + floor:
            edit, site = [*parameter.split("/"), "", ""][:2]
            message = f"in {mode.name}, the gradient of {difference}"
            findings = [Finding(code="P603", message=message, edit=edit, site=site, size=difference.size)]
            break
    results.add(name, *findings, detail=f"{len(expected.gradients)} parameters")
    edited = {id(p) for p in comparison.parameters.values()}
    others = [n for n, p in comparison.compiled.named_parameters() if id(p) not in edited and p.grad is not None]
    more = f", and {len(others) - 1} more" if others[1:] else ""
    message = f"`{others[0]}` of the base has a gradient{more}" if others else ""
    findings = [Finding(code="P611", message=message, module=name) for name in others[:1]]
    results.add(f"{mode.name}: the base has no gradients", *findings)


def check_fold(comparison: Comparison, results: CheckResults) -> None:
    """Folded weights compute the same outputs. The last check, since it changes the copy."""
    name = "folded equals unfolded"
    with results.attempt(name, "P609"), comparison.selected_task():
        before = comparison.run_compiled(EVALUATION).outputs
        report = fold(comparison.compiled)
        if not report.folded:
            results.skip(name, "no edit folds")
            return
        with comparison.own_errors(EVALUATION), torch.no_grad():
            after = model_outputs(comparison.compiled(**copy_sample(comparison.batch)))
        edits = ", ".join(f"`{entry.edit}`" for entry in report.folded)
        results.compare(name, "P609", f"after folding {edits}", first_difference(before, after, FOLD_FACTOR))


def locate_fault(comparison: Comparison, difference: Difference) -> Finding:
    """Names the first edit that alone differs, else the last one before a wrong module input."""
    values = comparison.values()
    module, key = first_differing_module(comparison, EVALUATION)
    comparison.reset()
    # If the initial values differ already, no perturbation singles out an edit.
    for site_edit in comparison.record.site_edits if comparison.output_difference() is None else ():
        comparison.reset()
        comparison.perturb(comparison.parameters_of(site_edit))
        if comparison.output_difference() is not None:
            key = key_of(site_edit)
            break
    comparison.reset(values)
    states = [a.state for p in comparison.record.site_edits if key_of(p) == key for a in p.assigns]
    (edit, site), state = key, ", ".join(states) or None
    message, size = f"the model does not compute what the spec says: {difference}", difference.size
    return Finding(code="P602", message=message, edit=edit, site=site, state=state, module=module, size=size)


def first_differing_module(comparison: Comparison, mode: ForwardMode) -> tuple[str | None, EditKey | tuple[None, None]]:
    """The first module whose inputs differ, and the edit that causes it, or acted last before."""
    expected, actual = Recorder(), Recorder()
    comparison.run_reference(mode, expected)
    comparison.run_compiled(mode, actual)
    event = first_differing_input(expected.events, actual.events)
    if event is None:
        return None, NOWHERE
    # A hook on a module of a generated class sees its output after the edits; on any other module,
    # maybe before.
    rewritten = {name for name, _ in comparison.record.regions}
    site_edits = [p for p in comparison.record.site_edits if p.site.module in rewritten]
    modules = {key_of(p): p.site.module for p in site_edits}
    output = first_differing_output(expected.events, actual.events, set(modules.values()), event)
    keys = [key for key in expected.edit_positions if output is not None and modules.get(key) == output.module]
    return event.module or "the model", keys[-1] if keys else expected.last_edit_before(event) or NOWHERE


def check_decoding(comparison: Comparison, results: CheckResults) -> None:
    """Decodes a few tokens. Where the equations differ with a cache, the model may, too."""
    name = "decoding with a cache equals decoding without"
    can_generate = getattr(comparison.base, "can_generate", None)
    if can_generate is None or not can_generate() or not isinstance(comparison.batch.get("input_ids"), Tensor):
        results.skip(name, "the model does not generate from this batch")
        return
    with comparison.selected_task(), EVALUATION.applied_to(comparison.compiled), results.attempt(name, "P610"):
        cached, plain = (decode_compiled(comparison, cache) for cache in (True, False))
        difference = logits_difference(plain, cached)
        if comparison.unavailable or comparison.reference.prompts:
            terms = (t for edit in comparison.record.site_edits for a in edit.assigns for t in ir.subterms(a.value))
            reads_all = any(getattr(term.shape, "per_example", False) for term in terms)  # a value for each example
            if difference is not None and reads_all:
                results.skip(name, READS_ALL)
            elif difference is not None and logits_difference(*(decode_base(comparison, c) for c in (False, True))):
                results.skip(name, "the model without its edits computes something else with a cache")
            else:
                results.compare(name, "P610", "decoding with a cache", difference)
            return
        fault = logits_difference(decode_reference(comparison, cache=True), cached)
        if fault is None and difference is not None:
            fault = logits_difference(decode_reference(comparison, cache=False), plain)
            if fault is None:  # each way of decoding has the values of the equations
                results.skip(name, READS_ALL)
                return
        results.compare(name, "P610", "in decoding", fault)


def decode_reference(comparison: Comparison, cache: bool) -> Logits:
    with EVALUATION.applied_to(comparison.base), comparison.reference.active():
        return decode_base(comparison, cache)


def decode_compiled(comparison: Comparison, cache: bool) -> Logits:
    with compiled_model_errors(lambda: decode_base(comparison, cache)):
        return decode(comparison.compiled, comparison.batch, cache)


def decode_base(comparison: Comparison, cache: bool) -> Logits:
    with unavailable_on_error("the model does not generate in this way: "):
        return decode(comparison.base, comparison.batch, cache)


@torch.no_grad()
def decode(model: Any, batch: Batch, cache: bool) -> Logits:
    inputs = {name: batch[name] for name in INPUTS if name in batch}
    pad = getattr(model.config, "pad_token_id", None)
    greedy = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1, "use_cache": cache}
    output = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0 if pad is None else pad}
    with without_generation_warnings():
        return tuple(model.generate(**inputs, **greedy, **output).logits)


def logits_difference(first: Logits, second: Logits) -> Difference | None:
    """The first step whose logits differ. After another token the steps have other inputs."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        difference = first_difference({f"logits of token {i}": a}, {f"logits of token {i}": b})
        if difference is not None or not torch.equal(a.argmax(-1), b.argmax(-1)):
            return difference
    return None


@shielded
def without_generation_warnings() -> Generator[None]:
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
