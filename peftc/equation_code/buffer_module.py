"""The module of a form with tensors that a command fills."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.equation_code.module import EquationModule
from peftc.forms.module import has_values

FILLED = "filled"


class BufferModule(EquationModule):
    """A form with lines `fixed … = buffer`: tensors that are saved, and never trained.

    The first dimension of each is that of the adapters that `peftc.fuse` reads. `filled`: whether
    they are there; before, the buffers are zero.
    Raises: P544 while training, where they are not.
    """

    def setup(self) -> None:
        super().setup()
        self.state(FILLED, torch.zeros((), dtype=torch.bool))
        self.is_known = False  # to be filled

    def adapter(self) -> tuple[str, ...]:
        """The names of the tensors of an adapter that are here, and not those of several sites."""
        return tuple(name for name in self.place.buffers if name in self._buffers)

    def filling(self, adapters: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each tensor of the form that adapters fill, and its values from n adapters."""
        for i, tensors in enumerate(adapters):
            yield from ((self.get_buffer(name)[i], tensors[name]) for name in self.adapter())
        yield self.get_buffer(FILLED), torch.tensor(True)

    def after_load(self) -> None:
        self.is_known = False

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.after_load()

    def require_ready(self) -> None:
        """Raises: P544 where there are no adapters."""
        if not self.is_known and self.adapter():
            filled = self.get_buffer(FILLED)
            if has_values(filled) and not bool(filled):
                count = len(self.get_buffer(self.adapter()[0]))
                message = f"`{self.definition.name}` has none of the {count} adapters that it mixes"
                help_ = "peftc.fuse(model, directories) reads those of `fusion`; a program sets others, and `filled`"
                raise PeftcError(Diagnostic("P544", message, help=help_))
            self.is_known = True
