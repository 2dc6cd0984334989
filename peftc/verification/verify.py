"""`peftc.verify`: compares a compiled model to the equations of its spec, evaluated on its base."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from peftc.compiler import remove
from peftc.compiler import sites as sites_of
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.installation.contents import parameters
from peftc.installation.record import installation_of, is_installed
from peftc.models.skeleton import check_sample
from peftc.verification.checks import CheckResults, check_base, check_equations, check_fold
from peftc.verification.comparison import Comparison
from peftc.verification.decoding import check_decoding
from peftc.verification.forward_modes import EVALUATION
from peftc.verification.preparation import duplicate, fill_forms, require_runnable, sample_batch, without_autocast
from peftc.verification.reference.interpreter import FormModules
from peftc.verification.reference.locations import ReferenceUnavailable, key_of
from peftc.verification.reference.model import ReferenceModel
from peftc.verification.report import NotWitnessed, Verification, VerifiedEdit
from peftc.verification.site_checks import check_perturbations, check_roles

Sites = Literal["sample", "all"]


def verify(
    model: nn.Module,
    batch: Mapping[str, Any] | None = None,
    *,
    sites: Sites = "sample",
    base: nn.Module | None = None,
    weights: str = "its weights",
) -> Verification:
    """Shows, by running a copy of a compiled model, that it computes what its spec says.

    Forward hooks on the base evaluate the equations of the spec; they share no code with the
    rewriter. Outputs and gradients must be equal in every mode. Each edit alone must change the
    output, and nothing before its site. Without its edits the model must equal the base, bit for
    bit; folded, it must equal itself. The model is not touched.

    Args:
        model: a compiled model.
        batch: arguments of one forward; by default those of the compilation, or random ones.
        sites: those perturbed alone: "all", or "sample" for the first, a middle and the last of
            each kind.
        base: the model before it was compiled, to compare the model without its edits.
        weights: the origin of the weights, for the report.

    Returns:
        The checks. A fault of the model is not raised: it is one of the `findings`, P602-P611.

    Raises:
        PeftcError: P410 (not compiled), P436 (an edited module was replaced), P507 (no inputs),
            P509 (the base does not run on the batch), P545 (no batch), P601 (no weights, or it
            cannot be copied).
    """
    record = installation_of(model)
    parameters(model)  # raises P436
    check_sample(batch)
    if sites not in ("sample", "all"):
        raise PeftcError(Diagnostic("P545", f'`sites` is "sample" or "all", not {sites!r}'))
    if base is not None and (not isinstance(base, nn.Module) or is_installed(base)):  # pyright: ignore[reportUnnecessaryIsInstance]  # from Python it may be
        kind = "a compiled one" if isinstance(base, nn.Module) else f"a value of type {type(base).__name__}"  # pyright: ignore[reportUnnecessaryIsInstance]
        message = f"`base` is the model before it was compiled, not {kind}"
        raise PeftcError(Diagnostic("P545", message, help="leave it out: a copy without the edits is compared as well"))
    results = CheckResults()
    with torch.random.fork_rng(), without_autocast():
        compiled = duplicate(model).eval()
        comparison = prepare(compiled, dict(batch) if batch is not None else sample_batch(compiled, record.sample))
        run_checks(comparison, sites == "all", base, results)
    return summary(comparison, results, weights)


def compilation_check(model: nn.Module) -> Callable[[nn.Module], None]:
    """The last step of a compilation with `verify=True`: it raises the findings. Raises: P601."""
    base = None if is_installed(model) else duplicate(model)

    def check(compiled: nn.Module) -> None:
        verification = verify(compiled, base=base)
        if not verification.ok:
            raise PeftcError(verification.diagnostics)

    return check


def prepare(compiled: nn.Module, batch: dict[str, Any]) -> Comparison:
    """Builds the reference model. Raises: P509 if the base does not run."""
    base = remove(duplicate(compiled))
    require_runnable(base, batch)
    fill_forms(compiled, batch)
    record = installation_of(compiled)
    if names := [name for name, value in parameters(compiled).items() if bool(value.isnan().any())]:
        raise PeftcError(Diagnostic("P601", f"`{names[0]}` has NaN entries: nothing can be compared"))
    table = {site.path: site for site in sites_of(base, sample=record.sample).sites}
    trained: dict[str, Tensor] = {name: compiled.get_parameter(name) for name in record.trained.values()}
    base.requires_grad_(False)
    reference = ReferenceModel(base, record.site_edits, table, FormModules(compiled, record), trained)
    return Comparison(compiled, reference, batch)


def run_checks(comparison: Comparison, all_sites: bool, base: nn.Module | None, results: CheckResults) -> None:
    check_base(comparison, base, results)
    find_unreached_sites(comparison)
    are_equal = True
    for task in comparison.tasks:
        comparison.task = task
        are_equal = check_equations(comparison, results) and are_equal
    comparison.task = comparison.tasks[0]
    check_roles(comparison, all_sites, results)
    with results.attempt("far from the present parameters", "P602"):
        comparison.randomize()
    check_perturbations(comparison, all_sites, results)
    if are_equal or comparison.unavailable:
        check_decoding(comparison, results)
        check_fold(comparison, results)


def find_unreached_sites(comparison: Comparison) -> None:
    reason = "no call of the base reached it"
    try:
        comparison.run_reference(EVALUATION)
        site_edits = [write.site_edit for write in comparison.reference.unreached_writes()]
    except ReferenceUnavailable as error:
        reason, site_edits = str(error), comparison.record.site_edits
    for site_edit in site_edits:
        comparison.unavailable.setdefault(key_of(site_edit), reason)


def summary(comparison: Comparison, results: CheckResults, weights: str) -> Verification:
    record = comparison.record
    sites = Counter(site_edit.edit for site_edit in record.site_edits)
    sites |= {e.name: len(e.sites) for spec in record.specs for e in spec.plan.edits if e.name not in sites}
    edits: list[VerifiedEdit] = []
    for name, count in sites.items():
        reasons = [(site, reason) for (edit, site), reason in comparison.unavailable.items() if edit == name]
        unseen = tuple(NotWitnessed(site=site, reason=reason) for site, reason in reasons)
        counts = {"sites": count, "witnessed": count - len(reasons)}
        counts |= {"perturbed": results.perturbed[name], "inert": results.inert[name]}
        edits.append(VerifiedEdit(name=name, not_witnessed=unseen, **counts))
    return Verification(
        model=record.specs[0].plan.model.id,
        weights=weights,
        batch={name: tuple(value.shape) for name, value in comparison.batch.items() if isinstance(value, Tensor)},
        edits=tuple(edits),
        checks=tuple(results.checks),
        findings=tuple(results.findings),
    )
