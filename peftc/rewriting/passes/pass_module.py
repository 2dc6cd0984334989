"""The parameters, buffers and modules of a pass at one site."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.forms.module import FormModule, Generators, draw_of, fill_values, has_values, seeded
from peftc.planning.pass_form import PassForm, PassMember


class PassModule(FormModule):
    """The members of a pass at one site. It computes nothing itself: the graph calls its parts."""

    definition: PassForm

    def setup(self) -> None:
        dtype, device = self._options
        for member in self.definition.members:
            if member.kind == "module":
                self.add_module(member.name, self.new_module(member, seeded(member.name)))
                continue
            value = torch.empty(member.shape, dtype=dtype, device=device)
            if member.kind == "parameter":
                self.register_parameter(member.name, nn.Parameter(value))
            else:
                self.register_buffer(member.name, value)

    def new_module(self, member: PassMember, generator: torch.Generator) -> nn.Module:
        dtype, device = self._options
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator.initial_seed())
            module = copy.deepcopy(member.make) if isinstance(member.make, nn.Module) else member.make()
        return module.to(device=device, dtype=dtype)

    def initialise(self, generator: Generators, base: Mapping[str, Tensor]) -> None:
        """First values of all members, drawn on the CPU."""
        for member in self.definition.members:
            if member.kind == "module":
                module = self.get_submodule(member.name)
                if all(has_values(t) for t in (*module.parameters(), *module.buffers())):
                    values = self.new_module(member, generator(member.name)).state_dict()
                    module.load_state_dict(values)
            else:
                _fill(member, cast(Tensor, getattr(self, member.name)), generator(member.name))

    def sets_values(self) -> bool:
        return bool(self.definition.members)

    def states(self) -> tuple[str, ...]:
        """The persistent buffers."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        return tuple(name for name in self.state_dict(keep_vars=True) if name not in parameters)

    def copier(self) -> Callable[[], FormModule] | None:
        return None

    def forward(self, *inputs: Tensor) -> Tensor:
        message = f"`{self.definition.name}` is a pass: it has no value of its own"
        raise PeftcError(Diagnostic("P446", message))


def _fill(member: PassMember, tensor: Tensor, generator: torch.Generator) -> None:
    if not has_values(tensor):
        return
    make = member.make
    with torch.no_grad():
        if isinstance(make, Tensor):
            tensor.copy_(make)
        elif callable(make):
            values = torch.empty(tensor.shape, dtype=torch.float32)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(generator.initial_seed())
                make(values)
            tensor.copy_(values)
        else:
            fill_values(tensor, draw_of(make, member.shape), generator)
