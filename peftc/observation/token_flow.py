"""Finds the modules that consume the tokens of an embedding, and whether they need ids."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from peftc.fakes.data_answers import fake_data_answers, tensors_in
from peftc.fakes.tensors import fake_copy
from peftc.models.names import error_summary
from peftc.modules.memory import storage_id
from peftc.observation.sample_forward import skip_repeated
from peftc.tracing.module_calls import bind_arguments, forward_signature

IDS, EMBEDS = "input_ids", "inputs_embeds"
aten = torch.ops.aten
_COPIES = frozenset({aten.clone, aten._to_copy, aten.cat})


@dataclass
class TokenFlow:
    """The modules that consume the tokens of one embedding in a sample forward, as ids or embedded.

    `arguments`: of their calls, in order. `results`: what they return. `id_dependence`: of modules
    that need the ids besides the embeddings, how that shows.
    """

    arguments: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    results: dict[str, Any] = field(default_factory=dict[str, Any])
    id_dependence: dict[str, str] = field(default_factory=dict[str, str])


@dataclass
class SampleRun:
    """A model of fake tensors and the arguments of a forward. `layers`: skipped if repeated."""

    model: nn.Module
    mode: FakeTensorMode
    arguments: Mapping[str, Any]
    layers: Collection[str]

    def run(self, call: Callable[[], Any], observer: AbstractContextManager[Any]) -> None:
        layers = [self.model.get_submodule(name) for name in self.layers]
        try:
            with self.mode, fake_data_answers(), torch.no_grad(), observer, skip_repeated(self.model, layers):
                call()
        except Exception:  # a layer may need what a skipped layer does
            with self.mode, fake_data_answers(), torch.no_grad(), observer:
                call()


def token_flow(embedding: str, modules: Collection[str], sample: SampleRun) -> TokenFlow:
    """Follows the tokens of an embedding to those of `modules` that consume them.

    The rows of a prompt have no ids, but a stack may use ids for more than their embedding: another
    table, a scale, a choice of experts. So it must compute the same floating tensors from
    embeddings as from ids. Integers may differ: some stacks count positions from the ids.
    """
    flow = consumers(embedding, modules, sample)
    for name, arguments in flow.arguments.items():
        if arguments.get(EMBEDS) is None and (reason := id_dependence(name, embedding, arguments, sample)) is not None:
            flow.id_dependence[name] = reason
    return flow


def consumers(embedding: str, modules: Collection[str], sample: SampleRun) -> TokenFlow:
    """The modules that call the embedding, or whose `inputs_embeds` come from its result."""
    flow, embedded, running = TokenFlow(), DerivedTensors(), dict[str, dict[str, Any]]()

    def enter(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = bind_arguments(type(module).forward, module, args, kwargs)
        rest = [p.name for p in forward_signature(module).parameters.values() if p.kind is p.VAR_KEYWORD]
        for parameter in rest:
            arguments |= arguments.pop(parameter, {})
        if embedded.intersects(arguments.get(EMBEDS)):
            flow.arguments.setdefault(name, fake_copy(arguments, sample.mode))
        elif arguments.get(IDS) is not None:
            running[name] = fake_copy(arguments, sample.mode)

    def leave(name: str, module: nn.Module, args: Any, result: Any) -> None:
        running.pop(name, None)
        flow.results.setdefault(name, result)

    def embed(module: nn.Module, args: Any, result: Any) -> None:
        embedded.add(result)
        for name, arguments in running.items():
            flow.arguments.setdefault(name, arguments)

    with ExitStack() as hooks:
        hooks.enter_context(sample.model.get_submodule(embedding).register_forward_hook(embed))
        for name in modules:
            module = sample.model.get_submodule(name)
            hooks.enter_context(module.register_forward_pre_hook(partial(enter, name), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(leave, name)))
        sample.run(lambda: sample.model(**sample.arguments), embedded)
    return flow


def id_dependence(name: str, embedding: str, arguments: Mapping[str, Any], sample: SampleRun) -> str | None:
    """What a module loses when it is called with embeddings instead of ids; None if nothing."""
    module, embed = sample.model.get_submodule(name), sample.model.get_submodule(embedding)

    def operations(arguments: Mapping[str, Any]) -> list[str]:
        record = FloatOperations()
        with embed.register_forward_pre_hook(record.pause), embed.register_forward_hook(record.resume):
            sample.run(lambda: module(**fake_copy(dict(arguments), sample.mode)), record)
        return record.operations

    with sample.mode, torch.no_grad():
        embedded = {**arguments, IDS: None, EMBEDS: embed(arguments[IDS])}
    with_ids = operations(arguments)
    try:
        return None if operations(embedded) == with_ids else "without them it computes something else"
    except Exception as error:  # whatever the model's own code raises
        return f"without them it raises {error_summary(error)}"


class DerivedTensors(TorchDispatchMode):
    """Follows the tensors that are computed from those added; views count as one."""

    def __init__(self) -> None:
        super().__init__()
        self.members = dict[int, torch.Tensor]()  # by storage, which stays theirs while they are here

    def add(self, value: Any) -> None:
        self.members.update((storage_id(tensor), tensor) for tensor in tensors_in(value))

    def intersects(self, value: Any) -> bool:
        return any(storage_id(tensor) in self.members for tensor in tensors_in(value))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.members and self.intersects((args, kwargs)):
            self.add((result, args[:1] if func.overloadpacket.__name__.endswith("_") else ()))
        return result


class FloatOperations(TorchDispatchMode):
    """Records the operations in the block that compute floating tensors, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []
        self.paused = False

    def pause(self, *_: Any) -> None:
        self.paused = True

    def resume(self, *_: Any) -> None:
        self.paused = False

    def __enter__(self) -> Any:
        self.operations.clear()  # a run that failed is repeated
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused and not keeps_values(func, args) and any(t.is_floating_point() for t in tensors_in(result)):
            self.operations.append(str(func))
        return result


def keeps_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation only moves values: a view, a copy, a concatenation, a product with 1."""
    if func.overloadpacket in _COPIES:
        return True
    if func.overloadpacket in (aten.mul, aten.div) and not isinstance(args[1], torch.Tensor):
        return args[1] == 1
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)
