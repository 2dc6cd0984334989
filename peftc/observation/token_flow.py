"""Which modules take the tokens of an embedding, and whether they need more of a token than its embedding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from peftc.fakes.data_answers import fake_data_answers
from peftc.fakes.tensors import fake_copy
from peftc.observation.repeated_layers import Repeats, repeated
from peftc.observation.sample_forward import SampleForward, structure
from peftc.tracing.module_calls import bind_arguments, forward_signature

IDS, EMBEDS = "input_ids", "inputs_embeds"
aten = torch.ops.aten
COPIES = frozenset({aten.clone, aten._to_copy, aten.cat})


@dataclass
class TokenFlow:
    """The modules that take the tokens of one embedding in a sample forward, as ids or embedded.

    `takers`: their arguments, in the order in which they run. `results`: what they return. `needs`: of these, those that compute
    something else with embedded tokens than with their ids, and how that shows.
    """

    takers: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    results: dict[str, Any] = field(default_factory=dict[str, Any])
    needs: dict[str, str] = field(default_factory=dict[str, str])


@dataclass
class Sample:
    """A model of fake tensors, and the arguments of one forward. `layers`: those that need not all run."""

    model: nn.Module
    mode: FakeTensorMode
    arguments: Mapping[str, Any]
    layers: Collection[str]

    def run(self, call: Callable[[], Any], watch: AbstractContextManager[Any]) -> Any:
        """One call. Layers that are like another run only where they have to."""
        try:
            return self._run(call, watch, [self.model.get_submodule(name) for name in self.layers])
        except Exception:  # a layer may need what another one that was left out does
            return self._run(call, watch, [])

    def _run(self, call: Callable[[], Any], watch: AbstractContextManager[Any], alike: list[nn.Module]) -> Any:
        names = {id(m): n for n, m in self.model.named_modules()}
        repeats = Repeats(names, SampleForward(), structure)
        with self.mode, fake_data_answers(), torch.no_grad(), watch, repeated(alike, repeats):
            return call()


def token_flow(embedding: str, modules: Collection[str], sample: Sample) -> TokenFlow:
    """Follows the tokens of an embedding to those of `modules` that take them.

    A stack may do more with ids than to embed them: look up something else, scale, choose experts. Of a row that is joined to the
    embedded tokens it has no id, so with what the embedding makes of the ids it must compute the same floating tensors. Integers may
    differ: positions are counted from ids that are no padding, or from their number.
    """
    flow = takers(embedding, modules, sample)
    for name, arguments in flow.takers.items():
        if arguments.get(EMBEDS) is None and (reason := need(name, embedding, arguments, sample)) is not None:
            flow.needs[name] = reason
    return flow


def takers(embedding: str, modules: Collection[str], sample: Sample) -> TokenFlow:
    """The modules that call the embedding on their ids, or are called with what is made of its result."""
    flow, labels, running = TokenFlow(), Labels(), dict[str, dict[str, Any]]()

    def before(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = plain_arguments(module, args, kwargs)
            if labels.within(arguments.get(EMBEDS)):
                flow.takers.setdefault(name, fake_copy(arguments, sample.mode))
            elif arguments.get(IDS) is not None:
                running[name] = fake_copy(arguments, sample.mode)

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            running.pop(name, None)
            flow.results.setdefault(name, result)

        return hook

    def embeds(module: nn.Module, args: Any, result: Any) -> None:
        labels.add(result)
        for name, arguments in running.items():
            flow.takers.setdefault(name, arguments)

    model = sample.model
    handles = [model.get_submodule(embedding).register_forward_hook(embeds)]
    for name in modules:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(before(name), with_kwargs=True))
        handles.append(module.register_forward_hook(after(name)))
    try:
        sample.run(lambda: model(**sample.arguments), labels)
    finally:
        for handle in handles:
            handle.remove()
    return flow


def need(name: str, embedding: str, arguments: Mapping[str, Any], sample: Sample) -> str | None:
    """What a module needs of tokens besides their embedding; None where it computes the same without their ids."""
    module, embed = sample.model.get_submodule(name), sample.model.get_submodule(embedding)
    with sample.mode, torch.no_grad():
        embedded = {IDS: None, EMBEDS: embed(arguments[IDS])}

    def watched(operations: FloatOperations, given: dict[str, Any]) -> None:
        handles = [embed.register_forward_pre_hook(operations.pause), embed.register_forward_hook(operations.resume)]
        try:
            sample.run(lambda: module(**fake_copy(given, sample.mode)), operations)
        finally:
            for handle in handles:
                handle.remove()

    of_ids, of_embedded = (FloatOperations() for _ in range(2))
    watched(of_ids, dict(arguments))
    try:
        watched(of_embedded, {**arguments, **embedded})
    except Exception as error:  # whatever the model's own code raises
        text = str(error).strip().splitlines()
        return f"without them it raises {type(error).__name__}{': ' + text[0] if text else ''}"
    return None if of_ids.done == of_embedded.done else "without them it computes something else"


def plain_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, those of `**` among them."""
    bound = bind_arguments(type(module).forward, module, args, kwargs)
    parameters = forward_signature(module).parameters.values()
    rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "")
    return {**bound, **bound.pop(rest, {})}


class Labels(TorchDispatchMode):
    """Inside of the block, what is computed from labelled tensors is labelled. Tensors that share memory are one."""

    def __init__(self) -> None:
        super().__init__()
        self.known = dict[int, torch.Tensor]()  # by their memory, which is theirs as long as they are here

    def add(self, value: Any) -> None:
        self.known.update((memory(tensor), tensor) for tensor in tensors(value))

    def within(self, value: Any) -> bool:
        return any(memory(tensor) in self.known for tensor in tensors(value))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.known and self.within((args, kwargs)):
            self.add((result, args[:1] if func.overloadpacket.__name__.endswith("_") else ()))
        return result


class FloatOperations(TorchDispatchMode):
    """The operations in the block that compute floating tensors, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []
        self.paused = False

    def pause(self, *_: Any) -> None:
        self.paused = True

    def resume(self, *_: Any) -> None:
        self.paused = False

    def __enter__(self) -> Any:
        self.done.clear()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.paused and not copies(func, args) and any(t.is_floating_point() for t in tensors(result)):
            self.done.append(str(func))
        return result


def copies(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the values of an operation's result are those of its operand: a view, a copy, values beside others, a product with 1."""
    if func.overloadpacket in COPIES:
        return True
    if func.overloadpacket in (aten.mul, aten.div) and not isinstance(args[1], torch.Tensor):
        return args[1] == 1
    aliases = [returned.alias_info for returned in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def memory(tensor: torch.Tensor) -> int:
    """The storage of a tensor, which has no address where there is no data."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
