"""The names of modules and parameters of which a model has several."""

from __future__ import annotations

from torch import nn


def places(model: nn.Module, module: nn.Module) -> list[str]:
    """A name for each attribute that holds a module.

    A module below a shared one has one place: whoever replaces it there, replaces it for all.
    """
    owners = model.named_modules()
    return [
        f"{owner}.{name}".lstrip(".")
        for owner, one in owners
        for name, child in one._modules.items()  # pyright: ignore[reportPrivateUsage]  # `named_children` leaves out a second name
        if child is module
    ]


def aliases(model: nn.Module, name: str) -> list[str]:
    """The names of a parameter, tied ones too; one for each module that holds it."""
    parameter = model.get_parameter(name)
    owners = model.named_modules()
    return [
        f"{owner}.{key}".lstrip(".")
        for owner, one in owners
        for key, own in one.named_parameters(recurse=False, remove_duplicate=False)
        if own is parameter
    ]
