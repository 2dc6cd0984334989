"""The modules of forms on a compiled model, by edit, site and key, from the record of its installation."""

from __future__ import annotations

from typing import cast

from torch import nn

from peftc.forms.module import FormModule, member
from peftc.forms.tasked_module import Tasked
from peftc.installation.record import Installation
from peftc.planning import ir


class Forms:
    """Finds the form of an instance; one that shares all its parameters is made anew around them."""

    def __init__(self, model: nn.Module, record: Installation) -> None:
        self.model, self.record = model, record
        self.owners = {name.split("/")[1]: place for name, place in record.form_modules.items()}
        self.known: dict[int, FormModule] = {}

    def of(self, placed: ir.SiteEdit, instance: ir.FormInstance) -> FormModule:
        if id(instance) not in self.known:
            self.known[id(instance)] = self._module(placed, instance)
        form = self.known[id(instance)]
        return form if form.training == self.model.training else form.train(self.model.training)

    def _module(self, placed: ir.SiteEdit, instance: ir.FormInstance) -> FormModule:
        if instance.has_site_parameters:
            place = self.record.form_modules[f"{placed.edit}/{placed.owner_path}/{instance.key}"]
            return cast(FormModule, self.model.get_submodule(place))
        if not instance.tasks:
            return self._member(instance, None)
        return Tasked(self.record.task, {task: self._member(instance, task) for task in instance.tasks})

    def _member(self, instance: ir.FormInstance, task: str | None) -> FormModule:
        owner = instance.owner_of(task)
        assert owner is not None
        return member(cast(FormModule, self.model.get_submodule(self.owners[owner])), instance.index)
