"""The place of a site among those that share all the parameters of a form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peftc.forms.form import Args
from peftc.forms.module import FormModule, Pair
from peftc.modules.form_hooks import Hookable

if TYPE_CHECKING:
    from peftc.forms.affine_module import Affine


class Member(Hookable, FormModule):
    """The place of one site, numbered `index`, among those that share all the parameters of `owner`.

    Its arguments may differ from those of `owner` in what the value alone depends on.
    """

    owner_module: FormModule  # pyright: ignore[reportIncompatibleVariableOverride]  # a member always has one

    def __init__(self, owner: FormModule, index: int, args: Args | None = None) -> None:
        super().__init__(
            owner.definition, owner.form_args if args is None else args, owner.form_dims, (), torch.float32, None
        )
        self.join(owner, index)

    def forward(self, like: Tensor) -> Tensor | Pair:
        return self.shared_form.value_at(self.index, like)

    def prepare(self) -> None:
        self.shared_form.prepare()

    def collapsed(self) -> Mapping[str, Tensor]:
        return self.shared_form.collapsed_at(self.index)

    def fold(self, value: Affine) -> Affine:
        return self.shared_form.fold_at(self.index, value)

    @property
    def shared_form(self) -> FormModule:
        """The form of all members, with the arguments of this one."""
        owner = self.owner_module
        return owner if self.form_args == owner.form_args else owner.with_arguments(self.form_args)

    def extra_repr(self) -> str:
        return f"index={self.index}, of {type(self.owner_module).__name__}"
