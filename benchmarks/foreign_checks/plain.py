"""The reference: what an edit computes, by plain arithmetic on weights and by forward hooks, where
the expected role table says. Nothing here uses peftc.

    reference = Plain(model)
    reference.add(e.reference, 2 * B @ A)          # LoRA
    reference.scale_rows(e.reference, vector)      # h *= vector
    out = reference.call(run)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize, remove_weight_norm
from torch.nn.utils.parametrize import remove_parametrizations

from benchmarks.foreign_checks.references import Reference

Form = Callable[[Tensor, Tensor], Tensor]  # of x and h


class Plain(nn.Module):
    """A model whose weights are changed, and whose modules have hooks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        _strip(model)
        self.base = model.requires_grad_(False)
        self.weights: dict[str, Tensor] = {}
        self.unreached: list[str] = []
        self.calls: list[list[None]] = []  # so far, of the modules whose outputs are changed
        first: dict[int, str] = {}
        names = model.named_parameters(remove_duplicate=False)
        self.canonical = {name: first.setdefault(id(p), name) for name, p in names}

    def forward(self, **inputs: Any) -> Any:
        for calls in self.calls:
            calls.clear()
        return functional_call(self.base, self.weights, (), dict(inputs))

    def add(self, reference: Reference, delta: Tensor) -> None:
        """W += delta, at the entries of the reference; h += x delta' where W is not the matrix."""
        if is_tied(self.base, reference) or computes_matrix(self.base, reference):
            self.insert(reference.module, reference.module, lambda x, h: h + x @ delta.T)
            return
        weight, positions = self._weight(reference.name), reference.matrix(self.base)
        if positions.shape != delta.shape:
            raise ValueError(f"{reference.name}: the edit is {tuple(delta.shape)}, expected {tuple(positions.shape)}")
        self._set(reference.name, weight.flatten().index_add(0, positions.flatten(), delta.flatten()).view_as(weight))

    def scale_rows(self, reference: Reference, vector: Tensor, bias_name: str = "") -> None:
        """The output features times a vector: rows of the weight and entries of the bias."""
        if is_tied(self.base, reference) or computes_matrix(self.base, reference):
            self.insert(reference.module, reference.module, lambda x, h: h * vector)
            return
        positions = reference.matrix(self.base)
        self._scale(reference.name, positions, vector[:, None].expand(positions.shape))
        if bias_name:
            self._scale(bias_name, torch.arange(len(vector)), vector)
        elif (bias := bias_of(self.base, reference)) is not None:
            name, places = bias
            self._scale(name, places, vector)

    def scale_columns(self, reference: Reference, vector: Tensor) -> None:
        """The input features times a vector."""
        if computes_matrix(self.base, reference):
            module = self.base.get_submodule(reference.module)
            module.register_forward_pre_hook(lambda _, args: (args[0] * vector, *args[1:]))
            return
        positions = reference.matrix(self.base)
        repeated = vector.repeat_interleave(positions.shape[1] // len(vector))
        self._scale(reference.name, positions, repeated[None].expand(positions.shape))

    def insert(self, x: str, h: str, form: Form, call: int | None = None) -> None:
        """h = form(x, h): x is the input of a module (`:out`: its output), h the output of one.
        Either may be `:nchw`, an image with its features in the second dimension. `call`: which of
        the calls of h's module in a forward; None for each.
        """
        seen: dict[str, Tensor] = {}
        calls: list[None] = []
        self.calls.append(calls)
        (x, *x_flags), (h, *h_flags) = x.split(":"), h.split(":")
        source, target = attention_module(self.base, x), attention_module(self.base, h)
        axes = [
            1 if "nchw" in flags or isinstance(module, _CONVOLUTIONS) else -1
            for module, flags in ((source, x_flags), (target, h_flags))
        ]

        def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen["x"] = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))

        def change(module: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
            calls.append(None)
            if call is not None and len(calls) != call + 1:
                return out
            if "x" not in seen:
                raise ValueError(f"the table's module {x} is not called before {h}")
            self.unreached = [one for one in self.unreached if one != h]
            value = out[0] if isinstance(out, tuple) else out
            tokens = [t.movedim(axis, -1) for t, axis in zip((seen["x"], value), axes, strict=True)]
            changed = form(*tokens).movedim(-1, axes[1])
            return (changed, *out[1:]) if isinstance(out, tuple) else changed

        self.unreached.append(h)
        if "out" in x_flags:
            source.register_forward_hook(lambda module, args, out: remember(module, (out,), {}))
        else:
            source.register_forward_pre_hook(remember, with_kwargs=True)
        target.register_forward_hook(change, with_kwargs=True)

    def _weight(self, name: str) -> Tensor:
        name = self.canonical.get(name, name)
        return self.weights[name] if name in self.weights else self.base.get_parameter(name)

    def _set(self, name: str, value: Tensor) -> None:
        self.weights[self.canonical.get(name, name)] = value

    def _scale(self, name: str, positions: Tensor, factors: Tensor) -> None:
        weight = self._weight(name)
        factor = torch.ones(weight.numel(), dtype=weight.dtype)
        factor = factor.index_put((positions.flatten(),), factors.flatten())
        self._set(name, weight * factor.view_as(weight))


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def is_tied(model: nn.Module, reference: Reference) -> bool:
    """Whether several modules have a whole weight: an edit of what one computes is none of it."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    own = parameters.get(reference.name) if not reference.rows else None
    owners = [name.rpartition(".")[0] for name, p in parameters.items() if p is own]
    return own is not None and len({model.get_submodule(name) for name in owners}) > 1


@torch.no_grad()
def computes_matrix(model: nn.Module, reference: Reference) -> bool:
    """Whether the code of a class derived from nn.Linear multiplies by another matrix than the
    whole weight, such as a rounded one: what an edit adds is no part of that.
    """
    module = model.get_submodule(reference.module)
    if reference.rows or not isinstance(module, nn.Linear) or type(module).forward is nn.Linear.forward:
        return False
    x = torch.linspace(-1, 1, module.in_features, dtype=module.weight.dtype)[None]
    out = module(x)
    return out.shape[-1] == module.out_features and not torch.allclose(out, nn.Linear.forward(module, x))


def attention_module(model: nn.Module, name: str) -> nn.Module:
    """The module of a weight; nn.MultiheadAttention for its `out_proj`, which is never called."""
    module, parent = model.get_submodule(name), model.get_submodule(name.rpartition(".")[0])
    return parent if isinstance(parent, nn.MultiheadAttention) else module


def bias_of(model: nn.Module, reference: Reference) -> tuple[str, Tensor] | None:
    """The bias beside a weight, and the positions of the reference's features in it."""
    sizes = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False)}
    head, _, last = reference.name.rpartition(".")
    prefix = f"{head}." if head else ""
    if last in _SEPARATE and f"{prefix}in_proj_bias" in sizes:  # nn.MultiheadAttention with kdim or vdim
        third = sizes[f"{prefix}in_proj_bias"] // 3
        start = third * _SEPARATE.index(last)
        return f"{prefix}in_proj_bias", torch.arange(start, start + third)
    rows = Reference(reference.name, reference.index, reference.layout).matrix(model).shape[0]
    for name in (last.replace("weight", "bias"), last.replace("w", "b", 1)):
        size = sizes.get(prefix + name, 0)
        if name != last and size and size % rows == 0:
            places = torch.arange(size)[(reference.index or 0) * rows :][:rows]
            blocks = [places[start:stop] for start, stop in reference.rows]
            return prefix + name, torch.cat(blocks) if blocks else places
    return None


_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def _strip(model: nn.Module) -> None:
    """Plain weights in the place of parametrised ones."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            for name in list(module.parametrizations):  # type: ignore[union-attr]
                remove_parametrizations(module, name, leave_parametrized=True)
        for name in [n.removesuffix("_g") for n in module._parameters if n.endswith("_g")]:
            if f"{name}_v" in module._parameters:
                remove_weight_norm(module, name)
        for key, hook in list(module._forward_pre_hooks.items()):
            if hasattr(hook, "n_power_iterations"):  # the old spectral_norm
                hook.remove(module)
                del module._forward_pre_hooks[key]


def lora(parameters: Mapping[str, Tensor], scale: float) -> Tensor:
    """ΔW = scale · B A."""
    return scale * parameters["B"] @ parameters["A"]


def adapter(parameters: Mapping[str, Tensor], value: Tensor) -> Tensor:
    """W_up relu(W_down v + b) + b'."""
    inner = value @ parameters["down"].T + parameters["down_bias"]
    return inner.relu() @ parameters["up"].T + parameters["up_bias"]
