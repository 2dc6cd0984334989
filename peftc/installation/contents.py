"""What is on a compiled model: its specs, parameters, states and generated code."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import fx, nn

from peftc.forms.module import FormModule
from peftc.installation.completeness import complete_installation
from peftc.installation.edited_classes import true_parameter
from peftc.installation.record import installation_of, place_of_values
from peftc.modules.offload import refuse_offloaded


def specs(model: nn.Module) -> dict[str, str]:
    """The specs on a compiled model, by name, in the order of compilation: each expanded, as text.

    Args:
        model: a compiled model.

    Raises:
        PeftcError: P410 (not compiled).
    """
    record = installation_of(model)
    own = {spec.name: spec.text for spec in record.specs if spec.alone is None}
    return own | {name: spec.alone.text for spec in record.specs if spec.alone for name in spec.adapters}


def parameters(model: nn.Module, name: str | None = None) -> dict[str, nn.Parameter]:
    """What a compiled model trains, by the names under which it is saved.

    The names are `<edit>/<site>/<form>.<parameter>`, and `<edit>/<dotted name>` for parameters of
    the base that `train` unfroze.

    Args:
        model: a compiled model.
        name: of one spec or attached adapter, for its parameters alone.

    Raises:
        PeftcError: P410 (not compiled), P413 (no spec of that name), P436 (an edited module was
            replaced), P566 (weights are offloaded).
    """
    record = complete_installation(model)
    if name is not None and name in record.adapter.names:
        group = record.group(name).name
        return names_alone(name, group, parameters(model, group))
    edits = _edits(model, name)
    trained = {f"{saved}.{n}": p for saved, form in _forms(model) for n, p in form.named_parameters()}
    trained |= {saved: true_parameter(model, place) for saved, place in record.trained.items()}
    for saved in record.adapter_parameters:
        values = model.get_submodule(place_of_values(saved))
        trained |= {f"{saved}/{adapter}": value for adapter, value in values.named_parameters()}
    chosen = {saved: p for saved, p in trained.items() if saved.partition("/")[0] in edits}
    refuse_offloaded(model, chosen)
    return chosen


def states(model: nn.Module, name: str | None = None) -> dict[str, torch.Tensor]:
    """What forms save beside `parameters`, under such names: which entries are trained."""
    record = complete_installation(model)
    if name is not None and name in record.adapter.names:
        group = record.group(name).name
        return names_alone(name, group, states(model, group))
    edits = _edits(model, name)
    forms = [(saved, form) for saved, form in _forms(model) if saved.partition("/")[0] in edits]
    return {f"{saved}.{buffer}": form.get_buffer(buffer) for saved, form in forms for buffer in form.states()}


T = TypeVar("T")


def names_on_model(model: nn.Module, name: str) -> dict[str, str]:
    """The names in a file, with those on the model, of a spec's or attached adapter's tensors."""
    record = installation_of(model)
    spec = record.group(name).name if name in record.adapter.names else name
    names = {saved: saved for saved in (*parameters(model, spec), *states(model, spec))}
    return names if spec == name else names_alone(name, spec, names)


def names_alone(adapter: str, group: str, values: Mapping[str, T]) -> dict[str, T]:
    """What a group has for one of its attached adapters, by the names in the adapter's file.

    A name ends with that of the adapter where it is a value of a parameter of the base.
    """
    own, prefix = re.compile(rf"\.tasks\.{re.escape(adapter)}(?=[./])"), re.compile(rf"(^|/){group}\.")
    alone: dict[str, T] = {}
    for name, value in values.items():
        first, _, last = name.rpartition("/")
        if last == adapter:
            alone[prefix.sub(r"\1", first)] = value
        elif "." in last and own.search(name):
            alone[prefix.sub(r"\1", own.sub("", name))] = value
    return alone


def _edits(model: nn.Module, name: str | None) -> set[str]:
    return {edit for spec in complete_installation(model).selected(name) for edit in spec.edits}


def _forms(model: nn.Module) -> Iterator[tuple[str, FormModule]]:
    for saved, name in installation_of(model).form_modules.items():
        yield saved, cast(FormModule, model.get_submodule(name))


def reload_forms(model: nn.Module) -> None:
    """Tells forms that their values have changed."""
    for module in model.modules():
        if isinstance(module, FormModule):
            module.after_load()


@dataclass(frozen=True)
class InstalledRegion:
    """A rewritten module.

    Attributes:
        module: its dotted name.
        graphs: the graph of each variant of its forward.
        code: the Python that the graphs became.
    """

    module: str
    graphs: tuple[fx.Graph, ...]
    code: str


def graphs(model: nn.Module) -> dict[str, InstalledRegion]:
    """The rewritten regions of a compiled model, by dotted name.

    Args:
        model: a compiled model.

    Raises:
        PeftcError: P410 (not compiled).
    """
    return {
        name: InstalledRegion(name, tuple(v.graph for v in generated.variants), generated.source)
        for name, generated in installation_of(model).regions
    }
