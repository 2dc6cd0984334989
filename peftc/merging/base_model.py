"""The base of a merge: a model over the files of its checkpoint, and adapters on it.

Nothing of a weight is in memory before it is read. A parameter that transformers makes of several
tensors has no values, until `loaded` makes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from peftc.adapters.base import distance
from peftc.adapters.files import path_of, read_description
from peftc.adapters.loading import check_weights, load
from peftc.adapters.metadata import Adapter
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import join_names
from peftc.installation.record import installation_of, is_installed
from peftc.merging.checkpoint import DTYPES, Checkpoint, placeholder
from peftc.merging.dequantization import open_dense, quantization_of, without_quantization
from peftc.merging.keys import KeyGroup, has_inverse, key_groups, meta
from peftc.models.skeleton import meta_model
from peftc.models.sources import ModelSource, resolve, weights_folder

_LISTED = 3
_OTHERS = "`other_weights=True`, or `--other-weights`, says that others are meant"


class BaseModel:
    """A checkpoint as a model.

    Attributes:
        model: the module; parameters of plain keys are views of files.
        groups: by the name of each parameter and buffer, those that hold its values; a name of a
            tied parameter that has no key of its own has none.
        unknown: keys that name nothing in the model.
    """

    def __init__(self, source: ModelSource, checkpoint: Checkpoint) -> None:
        """Raises: P506, P702 (the checkpoint does not fit the configuration)."""
        self.source, self.checkpoint = source, checkpoint
        self.model: Any = meta_model(source)
        entries = checkpoint.entries.values()
        self.shapes = {e.key: meta(e.shape, DTYPES[e.dtype]) for e in entries if e.dtype in DTYPES}
        groups, self.unknown = key_groups(self.model, self.shapes)
        self.unknown += [entry.key for entry in entries if entry.key not in self.shapes]
        self.groups: dict[str, KeyGroup] = {name: group for group in groups for name in group.names}
        self.parameters = dict(cast(nn.Module, self.model).named_parameters(remove_duplicate=False))
        self.names: dict[int, list[str]] = defaultdict(list)  # all names of a parameter
        for name, parameter in self.parameters.items():
            self.names[id(parameter)].append(name)
        self.own_values = set[int]()  # parameters with values of their own
        self.device = torch.device("cpu")  # where sums are computed
        self.assign()

    def assign(self) -> None:
        """Gives all parameters and buffers of the checkpoint their values."""
        buffers = dict(cast(nn.Module, self.model).named_buffers(remove_duplicate=False))
        new: dict[int, nn.Parameter] = {}
        parameters: dict[str, nn.Parameter] = {}
        for name, old in {**self.parameters, **buffers}.items():
            if (first := self.first(name)) is None:
                continue
            if id(old) not in new or name in buffers or self.differs(name, new[id(old)]):
                value = self.initial(self.groups[first], first)
                if value.shape != old.shape:
                    shapes = f"{list(value.shape)} in the checkpoint, and {list(old.shape)} by the configuration"
                    raise self.unfit(f"`{first}` is {shapes}")
                if name in buffers:
                    owner, _, attribute = name.rpartition(".")
                    self.model.get_submodule(owner)._buffers[attribute] = value
                    continue
                new[id(old)] = nn.Parameter(value, value.is_floating_point() and old.requires_grad)
            parameters[name] = new[id(old)]
            owner, _, attribute = name.rpartition(".")
            self.model.get_submodule(owner)._parameters[attribute] = new[id(old)]
        if missing := [name for name in self.parameters if name not in parameters]:
            more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
            raise self.unfit(f"it has no {join_names(missing[:_LISTED])}{more}")
        self.parameters = parameters
        self.names.clear()
        for name, parameter in parameters.items():
            self.names[id(parameter)].append(name)

    def differs(self, name: str, tied: Tensor) -> bool:
        """Whether the checkpoint has a matrix of its own for a parameter that would be tied."""
        group = self.groups.get(name)
        if group is None:
            return False
        is_computed = group.converter is None and group.keys[0] in self.checkpoint.computed()
        return is_computed or not torch.equal(self.initial(group, name), tied)

    def first(self, name: str) -> str | None:
        """The name by which the checkpoint has a parameter, or one that it is tied to."""
        parameter = self.parameters.get(name)
        tied = self.names[id(parameter)] if parameter is not None else []
        return next((other for other in (name, *tied) if other in self.groups), None)

    def initial(self, group: KeyGroup, name: str) -> Tensor:
        if group.converter is None:
            return self.checkpoint.view(group.keys[0])  # of one that is computed, without values
        like = group.values(self.shapes)[name]
        return placeholder(like.shape, like.dtype)

    def aliases(self, name: str) -> list[str]:
        """All names of a parameter: of a tied one there are several."""
        return self.names.get(id(self.parameters.get(name)), [name])

    def keys(self, name: str) -> dict[str, KeyGroup]:
        """The groups that hold the values of a parameter, under any of its names."""
        return {other: self.groups[other] for other in self.aliases(name) if other in self.groups}

    def keep(self, names: Iterable[str]) -> None:
        """Puts the present values of some parameters into memory, and drops all views."""
        for name in names:
            self.parameters[name].data = self.parameters[name].data.clone()
            self.own_values.add(id(self.parameters[name]))
        self.checkpoint.forget()

    def unfit(self, reason: str) -> PeftcError:
        kind = type(self.model).__name__
        message = f"the checkpoint in {self.checkpoint.folder} does not make a {kind}"
        return PeftcError(
            Diagnostic("P702", message, notes=(reason,), help="is its config.json that of these weights?")
        )

    @contextmanager
    def loaded(self, names: Iterable[str], part: KeyGroup | None = None) -> Generator[dict[str, Tensor]]:
        """Inside of the block these parameters are in memory. Yields the tensors read, by key.

        `part`: makes slices of the parameters, which are there in place of these.
        """
        read = dict[str, Tensor]()
        before: list[tuple[nn.Parameter, Tensor]] = []
        try:
            for name, parameter in {n: p for n in names if (p := self.parameters.get(n)) is not None}.items():
                first = self.first(name)
                assert first is not None
                group = part or self.groups[first]
                read |= {key: self.checkpoint.read(key) for key in group.keys if key not in read}
                before.append((parameter, parameter.data))
                has_own = id(parameter) in self.own_values
                parameter.data = (parameter.data if has_own else group.values(read)[first]).to(self.device)
            yield read
        finally:
            for parameter, data in before:
                parameter.data = data

    @contextmanager
    def loaded_slices(self, names: Iterable[str], index: int, count: int) -> Generator[dict[str, Tensor]]:
        """As `loaded`, with one of `count` slices of each parameter along its first dimension."""
        read = dict[str, Tensor]()
        before: list[tuple[nn.Parameter, Tensor]] = []
        try:
            for name in names:
                (group,), parameter = self.keys(name).values(), self.parameters[name]
                read[group.keys[0]] = self.checkpoint.read_slice(group.keys[0], index, count)
                before.append((parameter, parameter.data))
                parameter.data = read[group.keys[0]].to(self.device)
            yield read
        finally:
            for parameter, data in before:
                parameter.data = data

    def reversible(self, name: str) -> bool:
        return all(group.converter is None or has_inverse(group, self.shapes) for group in self.keys(name).values())

    def converted_names(self) -> frozenset[str]:
        """The names of parameters without values."""
        computed = self.checkpoint.computed()
        groups = self.groups.items()
        own = (name for name, group in groups if group.converter is not None or group.keys[0] in computed)
        return frozenset(other for name in own for other in self.aliases(name))


class Samples(Mapping[str, Tensor]):
    """The parameters of a base with the entries alone that adapters keep of it."""

    def __init__(self, base: BaseModel, originals: Mapping[str, Tensor]) -> None:
        self.base, self.originals = base, originals

    def __getitem__(self, name: str) -> Tensor:
        first = self.base.first(name)
        if name in self.originals or first is None:
            return self.originals[name]
        return self.base.checkpoint.sample(self.base.groups[first].keys[0])

    def __iter__(self) -> Iterator[str]:
        return iter(self.base.parameters)

    def __len__(self) -> int:
        return len(self.base.parameters)


def open_base(model: str | PathLike[str], trust_remote_code: bool = False, dequantize: bool = False) -> BaseModel:
    """Args: `dequantize`: opens quantised weights as dense ones.

    Raises: P501-P506 (the model), P505 (no weights), P545, P708 (`dequantize`), P701, P702, P707
    (the checkpoint).
    """
    source = resolve(model, trust_remote_code)
    quantization = quantization_of(source)
    if quantization is not None and not dequantize:
        message = f"the weights of {source.id} are quantised ({quantization.get('quant_method')})"
        notes = ("merge into the checkpoint that was quantised, and quantise the result",)
        help_ = "or write them out in full: `dequantize=True`, or `--dequantize`"
        raise PeftcError(Diagnostic("P707", message, notes=notes, help=help_))
    checkpoint, plain = Checkpoint.open(weights_folder(source)), without_quantization(source)
    return BaseModel(plain, open_dense(source, checkpoint) if dequantize else checkpoint)


def load_adapters(base: BaseModel, adapters: Collection[Path], other_weights: bool = False) -> list[str]:
    """Loads adapters onto the base, in order. Returns: the name of each spec.

    Edits get the name of their adapter as a prefix, if another has edits of the same name.
    Raises: as `peftc.load`; P524 for other weights, unless `other_weights`.
    """
    descriptions = [(path_of(path), read_description(path_of(path))) for path in adapters]
    names = list[str]()
    for path, adapter in descriptions:
        check_weights_of(base, adapter, other_weights)
        present = set(installation_edits(base.model))
        own = {edit.name for edit in adapter.plan.edits}
        prefix = unused_prefix(path.resolve().name, present) if own & present else None
        load(path, base.model, prefix=prefix, other_weights=True)
        names.append(installation_of(base.model).specs[-1].name)
    return names


def check_weights_of(base: BaseModel, adapter: Adapter, other_weights: bool) -> None:
    """Raises: P524 where weights of plain keys are not those that the adapter was trained on."""
    if other_weights:
        return
    without = base.converted_names()
    tensors = {name: tensor for name, tensor in adapter.base.tensors.items() if name not in without}
    record = installation_of(base.model) if is_installed(base.model) else None
    originals = record.originals if record is not None else {}
    check_weights(adapter.base, distance(tensors, Samples(base, originals)), strict=True, way_out=_OTHERS)


def installation_edits(model: nn.Module) -> Iterator[str]:
    for spec in installation_of(model).specs if is_installed(model) else ():
        yield from spec.edits


def unused_prefix(name: str, edits: Collection[str]) -> str:
    words = "".join(c if c.isalnum() else "_" for c in name) or "adapter"
    words = words if words[0].isalpha() else f"a_{words}"
    numbered = (words if n == 1 else f"{words}_{n}" for n in range(1, 10_000))
    return next(text for text in numbered if not any(edit.startswith(text) for edit in edits))
