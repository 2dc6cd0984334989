"""Hooks on the modules of forms whose operations stand in the code of an edited module.

That code does not call these modules. Where one has a hook, other code runs, which does.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

from peftc.diagnostics import PeftcError
from peftc.modules.offload import offloaded_error

FORWARD = "forward"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

# Not empty once a form of this process has had a hook. In a generated forward, reading it costs
# less than a look at its forms. `torch.compile` guards on it.
HOOKED_FORMS: list[bool] = []
GLOBAL_HOOKS: dict[str, dict[Any, Any]] = {
    name: vars(torch_module)[f"_global_{name}"]
    for name in ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
}


class Hookable(nn.Module):
    """A module that tells when it gets a hook, or a forward of its own."""

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        notice_hook()
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        notice_hook()
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        notice_hook()
        return super().register_full_backward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> Any:
        notice_hook()
        return super().register_full_backward_pre_hook(*args, **kwargs)

    def register_backward_hook(self, *args: Any, **kwargs: Any) -> Any:
        notice_hook()
        return super().register_backward_hook(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == FORWARD:
            notice_hook()
        super().__setattr__(name, value)

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        if is_hooked(self):
            notice_hook()


def notice_hook() -> None:
    if not HOOKED_FORMS:
        HOOKED_FORMS.append(True)


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward of its own."""
    own = vars(module)
    return FORWARD in own or any(own.get(name) for name in _HOOKS)


def has_hooks(container: nn.Module | None) -> bool:
    """Whether hooks want to see the calls of the forms in the container of an edited module.

    Raises: P566 for parameters that several sites share and a hook of accelerate has offloaded: no
    call of theirs loads them.
    """
    hooked = any(GLOBAL_HOOKS.values())
    for module in () if container is None else container.modules():
        if isinstance(module, Hookable):
            owner: nn.Module | None = getattr(module, "owner_module", None)
            if owner is not None and is_hooked(owner):
                hooked = True
                if names := [name for name, p in owner.named_parameters() if p.is_meta]:
                    why = "several sites share them: dispatch the model first, and compile the edits then"
                    raise PeftcError(offloaded_error(names, why))
            hooked = hooked or is_hooked(module)
    return hooked
