"""`peftc.verify`: compares a compiled model to the equations of its spec, evaluated on its base."""

import copy
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from peftc.compiler import remove
from peftc.compiler import sites as sites_of
from peftc.concurrency.interrupts import shielded
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.activity import activity
from peftc.fakes.python_globals import unchanged_globals
from peftc.fakes.tensors import fake_copy, fake_mode
from peftc.forms.module import has_values
from peftc.installation.contents import parameters, states
from peftc.installation.record import installation_of, is_installed, refuse_passes
from peftc.models.media import run_on_sample
from peftc.models.samples import check_sample, copy_sample
from peftc.models.skeleton import sample_inputs
from peftc.modules.sharded_tensors import is_sharded
from peftc.training.calibration import calibrate
from peftc.training.tasks import task, tasks
from peftc.verification.checks import CheckResults, check_base, check_decoding, check_equations, check_fold
from peftc.verification.comparison import Batch, Comparison
from peftc.verification.forward_modes import EVALUATION, training_mode
from peftc.verification.reference.interpreter import FormModules
from peftc.verification.reference.locations import ReferenceUnavailable, key_of
from peftc.verification.reference.model import ReferenceModel
from peftc.verification.reference.outputs import model_outputs, random_projection
from peftc.verification.report import NotWitnessed, Verification, VerifiedEdit
from peftc.verification.site_checks import check_perturbations, check_roles

Sites = Literal["sample", "all"]
UNSELECTED, UNFILLED = "P540", "P544"


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
        PeftcError: P410 (not compiled), P436 (an edited module was replaced), P446 (a pass),
            P507 (no inputs), P509 (the base does not run on the batch), P545 (no batch), P601 (no
            weights, or it cannot be copied).
    """
    record = installation_of(model)
    parameters(model)  # raises P436
    refuse_passes(record, "verification computes equations a second time")
    check_sample(batch)
    if sites not in ("sample", "all"):
        raise PeftcError(Diagnostic("P545", f'`sites` is "sample" or "all", not {sites!r}'))
    if base is not None and (not isinstance(base, nn.Module) or is_installed(base)):  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
        kind = "a compiled one" if isinstance(base, nn.Module) else f"a value of type {type(base).__name__}"  # pyright: ignore[reportUnnecessaryIsInstance]
        message = f"`base` is the model before it was compiled, not {kind}"
        raise PeftcError(Diagnostic("P545", message, help="leave it out: a copy without the edits is compared as well"))
    results = CheckResults()
    with activity("verifying"), torch.random.fork_rng(), without_autocast():
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
    trained: dict[str, Tensor] = {name: compiled.get_parameter(name) for name in record.parameters_of_base}
    base.requires_grad_(False)
    reference = ReferenceModel(base, record.site_edits, table, FormModules(compiled, record), trained)
    return Comparison(compiled, reference, batch)


def run_checks(comparison: Comparison, all_sites: bool, base: nn.Module | None, results: CheckResults) -> None:
    check_base(comparison, base, results)
    find_unreached_sites(comparison)
    are_equal = True
    for name in comparison.tasks:
        comparison.task = name
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


def duplicate(model: nn.Module) -> nn.Module:
    """A copy of a model with its weights. Raises: P601."""
    missing = [name for name, tensor in model.named_parameters() if not has_values(tensor)]
    if missing:
        message = f"`{missing[0]}` has no values, only a shape: nothing can be computed with it"
        help_ = "load all weights; a model whose weights are offloaded is verified before it is dispatched"
        raise PeftcError(Diagnostic("P601", message, help=help_))
    if any(map(is_sharded, model.parameters())):
        message = f"the weights of this {type(model).__name__} are sharded over processes"
        raise PeftcError(Diagnostic("P601", message, help="verify it in one process, before it is sharded"))
    try:
        other = copy.deepcopy(model)
    except Exception as error:  # copying an attribute of a module may raise anything
        message = f"this {type(model).__name__} cannot be copied, and it is not verified in place"
        raise PeftcError(Diagnostic("P601", message, notes=(f"{type(error).__name__}: {error}",))) from error
    for (name, module), (_, same) in zip(model.named_modules(), other.named_modules(), strict=True):
        if type(module) is not type(same):
            message = f"the copy of `{name}` is not a {type(module).__name__}, so it may compute something else"
            raise PeftcError(Diagnostic("P601", message))
    return other


@shielded
def without_autocast() -> Generator[None]:
    """Turns autocast off: its cached casts of parameters would outlive changes of their values."""
    with ExitStack() as stack:
        for device in ("cpu", torch.accelerator.current_accelerator()):
            if device is not None and torch.is_autocast_enabled(str(device)):
                stack.enter_context(torch.autocast(str(device), enabled=False))
        yield


def require_runnable(base: nn.Module, batch: Batch) -> None:
    """Raises: P509 if a model does not run on a batch, or returns nothing but NaN."""
    try:
        with torch.no_grad():
            outputs = model_outputs(base(**copy_sample(batch)))
    except Exception as error:  # the model's own code may raise anything
        message = f"this {type(base).__name__} does not run on the batch"
        raise PeftcError(Diagnostic("P509", message, notes=(f"{type(error).__name__}: {error}",))) from error
    if outputs and all(bool(value.isnan().all()) for value in outputs.values()):
        message = f"without any edit, all outputs of this {type(base).__name__} for the batch are NaN"
        raise PeftcError(Diagnostic("P509", message, help="look for NaN entries in the weights of the base"))


def sample_batch(model: nn.Module, sample: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`sample`, else random inputs like those of the tracer. Raises: P507 for unknown inputs."""
    if sample is not None:
        return dict(sample)
    fake = fake_copy(model)
    generator = torch.Generator().manual_seed(0)
    try:
        batch = {name: _random_like(value, model, generator) for name, value in sample_inputs(fake).items()}
        with torch.no_grad():
            model(**copy_sample(batch))
        return batch
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # P507, or what the model's own code raises: it may need an image or a sound
        pass
    with unchanged_globals(fake), fake_mode(fake):
        inputs, _ = run_on_sample(fake, None, lambda arguments: fake(**arguments))
    return {name: _random_like(value, model, generator) for name, value in inputs.items()}


def _random_like(value: Any, model: nn.Module, generator: torch.Generator) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return torch.randn(value.shape, generator=generator).to(value.device, value.dtype)
    if not isinstance(value, FakeTensor):  # integers that came with an image, such as placeholder tokens and sizes
        return value
    # Token ids without special tokens, most of which have the smallest ids.
    count = next(filter(None, map(_vocabulary_size, model.modules())), 2)
    config: Any = getattr(model, "config", None)
    special = (getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "mask"))
    first = 1 + max((id for id in special if isinstance(id, int) and id < count // 2), default=0)
    return torch.randint(first if first < count else 0, count, value.shape, generator=generator).to(value.device)


def _vocabulary_size(module: nn.Module) -> int | None:
    try:
        return getattr(module.get_input_embeddings(), "num_embeddings", None)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):  # a model of several towers, or a module of torch
        return None


def fill_forms(model: nn.Module, batch: Batch) -> None:
    """Selects entries and fills adapters where a form refuses to train without them."""
    names = tasks(model)
    for name in names if len(names) > 1 else (None,):
        with task(model, name) if name is not None else nullcontext():
            code = _training_refusal(model, batch)
            if code == UNSELECTED:
                try:
                    calibrate(model, [batch], loss=_loss)
                except (PeftcError, MemoryError, torch.OutOfMemoryError):
                    raise
                except Exception as error:  # the model's own code may raise anything
                    kind = type(model).__name__
                    message = f"a selection needs gradients, and this {kind} does not train on the batch"
                    notes = (f"{type(error).__name__}: {error}",)
                    raise PeftcError(Diagnostic("P509", message, notes=notes)) from error
            elif code == UNFILLED:
                _fill_states(model)


def _training_refusal(model: nn.Module, batch: Batch) -> str | None:
    try:
        with training_mode(model, True), torch.no_grad():
            model(**copy_sample(batch))
    except PeftcError as error:
        if error.diagnostics[0].code in (UNSELECTED, UNFILLED):
            return error.diagnostics[0].code
        raise
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception:  # the model does not run in training mode, which the checks report
        pass
    return None


def _loss(model: nn.Module, batch: Any) -> Tensor:
    loss = random_projection(model_outputs(model(**copy_sample(batch))))
    assert loss is not None
    return loss


@torch.no_grad()
def _fill_states(model: nn.Module) -> None:
    """Random values for states that are otherwise read from files."""
    generator = torch.Generator().manual_seed(0)
    for value in states(model).values():
        if value.is_floating_point():
            noise = torch.randn(value.shape, generator=generator) / max(1, value.shape[-1]) ** 0.5
            value.copy_(noise.to(value.device, value.dtype))
        elif value.dtype == torch.bool:
            value.fill_(True)
