"""Weights that a module computes from other parameters, and what these must be for a new weight.

A parametrisation says so by its right inverse: of weight norm, W = g v / |v|, it is g = |W| and
v = W. Where it has none, or one that gives another weight (spectral norm, whose matrices have the
norm 1), the folded module has a plain weight in place of the parametrisation, as after PyTorch's
`remove_parametrizations(..., leave_parametrized=True)`. A norm with a state, that of its power
iteration, is folded as it is in evaluation.

Source: `torch.nn.utils.parametrize`; the hooks of `torch.nn.utils.weight_norm` and `spectral_norm`
are older.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from peftc.folding.own_forward import is_close
from peftc.installation.journal import Journal


def is_computed(module: nn.Module, attribute: str) -> bool:
    """Whether a parametrisation, or the hook of a norm, computes a tensor of a module."""
    return is_parametrized(module, attribute) or _hook(module, attribute) is not None


def has_value_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks besides those of norms, which compute its weight alone."""
    before = cast(Iterator[Any], iter(vars(module)["_forward_pre_hooks"].values()))
    return bool(vars(module)["_forward_hooks"]) or any(not isinstance(h, (WeightNorm, SpectralNorm)) for h in before)


def evaluated(module: nn.Module, attribute: str) -> Tensor:
    """A tensor of a module as it is in evaluation, where no power iteration goes on."""
    hook = _hook(module, attribute)
    if isinstance(hook, SpectralNorm):
        with torch.no_grad():
            return hook.compute_weight(module, do_power_iteration=False)
    if not is_parametrized(module, attribute):
        return getattr(module, attribute)
    steps: Any = cast(Any, module.parametrizations)[attribute]
    flags = [(step, step.training) for step in steps.modules()]
    try:
        steps.eval()
        return getattr(module, attribute)
    finally:
        for step, flag in flags:
            step.training = flag


def has_plain_form(module: nn.Module, attribute: str) -> bool:
    """Whether a plain parameter can take the place of what computes a tensor."""
    if not is_parametrized(module):
        return isinstance(_hook(module, attribute), SpectralNorm)
    return list(cast(Any, module.parametrizations)) == [attribute]


def make_plain(journal: Journal, module: nn.Module, attribute: str, value: Tensor) -> None:
    """Puts a parameter in the place of what computes a tensor."""
    journal.keep(module)
    state, prefix = vars(module), f"{attribute}_"
    if is_parametrized(module):
        trained = any(p.requires_grad for p in cast(Any, module.parametrizations).parameters())
        del state["_modules"]["parametrizations"]
        module.__class__ = type(module).__bases__[0]  # other copies may share the class that reads the parametrisation
    else:
        trained = state["_parameters"].pop(f"{prefix}orig").requires_grad
        for name in ("u", "v"):
            del state["_buffers"][prefix + name]
        state.pop(attribute, None)
        for hooks in (state["_forward_pre_hooks"], state["_state_dict_hooks"], state["_load_state_dict_pre_hooks"]):
            for key in [key for key, hook in hooks.items() if _is_of(hook, attribute)]:
                del hooks[key]
    module.register_parameter(attribute, nn.Parameter(value, trained))


def _is_of(hook: Any, attribute: str) -> bool:
    """Whether a hook is one of spectral norm's, which computes, saves and loads a tensor."""
    hook = getattr(hook, "hook", hook)  # that of `_load_state_dict_pre_hooks` is wrapped
    own = hook if isinstance(hook, SpectralNorm) else getattr(hook, "fn", None)
    return isinstance(own, SpectralNorm) and own.name == attribute


def stored_values(module: nn.Module, attribute: str, value: Tensor) -> Mapping[str, Tensor] | None:
    """The parameters of a module, by name, from which it computes `value`; None without such."""
    by = _by_parametrisation if is_parametrized(module, attribute) else _by_hook
    compute, values = by(module, attribute, value)
    own = dict(module.named_parameters())
    if not values or any(name not in own or own[name].shape != new.shape for name, new in values.items()):
        return None
    rounded = {name: new.to(own[name].dtype) for name, new in values.items()}
    return rounded if is_close(compute(*rounded.values()), value) else None


def _hook(module: nn.Module, attribute: str) -> WeightNorm | SpectralNorm | None:
    hooks = cast(Iterator[Any], iter(vars(module)["_forward_pre_hooks"].values()))
    norms = (hook for hook in hooks if isinstance(hook, (WeightNorm, SpectralNorm)))
    return next((hook for hook in norms if hook.name == attribute), None)


def _by_hook(module: nn.Module, attribute: str, value: Tensor) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    hook = _hook(module, attribute)
    if not isinstance(hook, WeightNorm):
        return lambda: value, {}
    dim = hook.dim
    scale = torch.norm_except_dim(value, 2, dim)
    values = {f"{attribute}_g": scale, f"{attribute}_v": value}
    return lambda g, v: v * (g / torch.norm_except_dim(v, 2, dim)), values


def _by_parametrisation(
    module: nn.Module, attribute: str, value: Tensor
) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    steps = copy.deepcopy(cast(Any, module.parametrizations)[attribute]).eval()  # some keep what they compute

    def compute(*originals: Tensor) -> Tensor:
        first, *others = steps
        result = first(*originals)
        for step in others:
            result = step(result)
        return result

    original: Any = value
    for step in reversed(steps):
        if not hasattr(step, "right_inverse"):
            return compute, {}
        original = step.right_inverse(original)
    prefix = f"parametrizations.{attribute}.original"
    if isinstance(original, Tensor):
        return compute, {prefix: original}
    return compute, {f"{prefix}{i}": one for i, one in enumerate(original)}
