"""The modeling file of an edited model: generated forwards, and the class that installs them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from peftc.equation_code.cross_layer_module import CrossLayerModule
from peftc.equation_code.module import EquationModule
from peftc.forms.member_module import Member
from peftc.forms.module import FormModule
from peftc.installation.record import Installation
from peftc.rewriting.edits import CONTAINER, SHARED, Container
from peftc.runtime import respecialize
from peftc.specialization.expressions import indented
from peftc.specialization.generated_class import GeneratedClass
from peftc.specialization.visible_children import child_members
from peftc.standalone.source_closure import SourceClosure, import_of, refusal
from peftc.task_modules.tasked_module import Tasked

MODELING = "modeling_edited"  # the name of the file, without its suffix

CLASSES = '''
class Parameters(nn.Module):
    """The parameters and fixed values of a form at one site."""

    def __init__(self, parameters, buffers):
        super().__init__()
        for name, (size, dtype) in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=dtype)))
        for name, (size, dtype) in buffers.items():
            self.register_buffer(name, torch.zeros(size, dtype=dtype))


def child(module, name):
    """The module of that name in a module, which is made where there is none."""
    if name not in module._modules:
        module.add_module(name, nn.Module())
    return module._modules[name]


def edited_class(base, forward, classes={}):
    """A subclass with another forward, one for each pair."""
    if (base, forward) not in classes:
        members = {"forward": forward, "__module__": __name__, "__qualname__": base.__qualname__}
        classes[base, forward] = type(base.__name__, (base,), members)
    return classes[base, forward]


def install(model):
    """Adds the parameters of the edits, and exchanges the forwards of the edited modules."""
    shared = {}
    for name, (parameters, buffers) in SHARED.items():
        shared[name] = Parameters(parameters, buffers)
        child(model, "peftc_shared").add_module(name, shared[name])
    for name, (forward, forms) in EDITED.items():
        module = model.get_submodule(name)
        for path, (parameters, buffers, owner) in forms.items():
            *parents, last = path.split(".")
            container = child(module, "peftc")
            for parent in parents:
                container = child(container, parent)
            container.add_module(last, Parameters(parameters, buffers))
            if owner is not None:  # held without being registered, since the model has it
                container._modules[last].__dict__["owner_module"] = shared[owner]
        module.__class__ = edited_class(type(module), forward)
'''


class ModelingFile:
    """The text of a modeling file.

    Args:
        spec: the text of the edits, for the docstring.

    Raises: P570 for what needs peftc.
    """

    def __init__(self, model: nn.Module, record: Installation, spec: str) -> None:
        self.model, self.spec, self.base = model, spec, own_class(model)
        self.name = f"Edited{self.base.__name__}"
        self.closure = SourceClosure()
        self.closure.values |= {"torch": torch, "nn": nn}
        shared: Any = vars(model)["_modules"].get(SHARED)
        self.shared: dict[str, nn.Module] = {} if shared is None else dict(shared.named_children())
        self.owners = {id(form): name for name, form in self.shared.items()}
        self.functions: dict[int, str] = {}  # by the id of a generated class
        self.forwards: list[str] = []
        self.edited: list[str] = []
        for region, kind in record.regions:
            module: Any = model.get_submodule(region)
            forms = ", ".join(f"{path!r}: {text}" for path, text in self._forms(region, module.peftc))
            self.edited.append(f"    {region!r}: ({self._function(kind)}, {{{forms}}}),")

    @property
    def text(self) -> str:
        spec = self.spec.replace("\\", "\\\\").replace('"', '\\"')
        shared = [f"    {name!r}: ({_sizes(form)})," for name, form in self.shared.items()]
        head = [
            '"""A model with edits that peftc has made. It needs torch and transformers alone.',
            "",
            spec.rstrip(),
            '"""',
        ]
        own_imports = {"import torch", "from torch import nn", import_of(self.base.__name__, self.base)}
        imports = sorted(
            {*own_imports, *self.closure.imports.values()}, key=lambda line: (line.startswith("from"), line)
        )
        tables = ["SHARED = {", *shared, "}", "EDITED = {", *self.edited, "}"]
        own = [
            f"class {self.name}({self.base.__name__}):",
            f"    _keep_in_fp32_modules_strict = {self._float32_modules()!r}",
            "",
            "    def __init__(self, config, *args, **kwargs):",
            "        super().__init__(config, *args, **kwargs)",
            "        install(self)",
            "        self.post_init()",
        ]
        definitions = self.closure.definitions.values()
        parts = [*definitions, *self.forwards, "\n".join(tables), CLASSES.strip(), "\n".join(own)]
        return "\n\n\n".join(["\n".join([*head, "", *imports]), *parts]) + "\n"

    def _function(self, kind: GeneratedClass) -> str:
        """The name of the function that is the forward of a generated class."""
        if id(kind) not in self.functions:
            words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.name)
            name = f"{re.sub(r'[^A-Za-z0-9_]', '_', words).lower()}_{len(self.functions) + 1}"
            self.functions[id(kind)] = name
            self.forwards.append(self._forward(kind, name))
        return self.functions[id(kind)]

    def _forward(self, kind: GeneratedClass, name: str) -> str:
        """The text of a generated forward, in a function that imports what its code uses."""
        if set(child_members(kind.base)) != {CONTAINER}:
            raise refusal(f"the code of {kind.name} runs all children of its module")
        if not kind.variants:
            raise refusal(f"no ordinary call of the model reaches the code of {kind.name}")
        source = kind.source
        imports: list[str] = []
        for used, value in kind.names.values.items():
            if used in ("torch", "nn") or not re.search(rf"\b{re.escape(used)}\b", source):
                continue
            if getattr(value, "__module__", "").startswith("peftc.") or not hasattr(value, "__qualname__"):
                self.closure.add(used, value)
            else:
                imports.append(f"    {import_of(used, value)}")
        if kind.inline:
            self.closure.add("respecialize", respecialize)
        result = "dispatch" if kind.inline else kind.variants[0].name
        head = [f"def make_{name}():", *imports, *([""] if imports else [])]
        lines = [*head, *indented(source.split("\n")), "", f"    return {result}"]
        return "\n".join([*(line.rstrip() for line in lines), "", "", f"{name} = make_{name}()"])

    def _forms(self, region: str, container: nn.Module) -> Iterator[tuple[str, str]]:
        """The forms of a region by their paths, with their parameters and their owners as code."""
        for path, form in container.named_modules():
            if isinstance(form, Container):
                continue
            if isinstance(form, Tasked):
                raise refusal(f"the edits of `{region}` have parameters for each task")
            if not isinstance(form, FormModule) or is_parametrized(form):
                raise refusal(f"a form at `{region}` has parametrizations, or modules of its own")
            owner = form.owner_module
            equation = form.shared_form if isinstance(form, Member) else form
            if not isinstance(equation, EquationModule):
                what = f"`{path.rpartition('.')[2]}` at `{region}` is a Python form"
                raise refusal(f"{what}: its code is that of a module of peftc")
            if isinstance(equation, CrossLayerModule):
                what = f"`{path.rpartition('.')[2]}` at `{region}` reads values of other layers"
                raise refusal(f"{what}: its code is that of a module of peftc")
            if equation.differs_by_site:
                what = f"`{path.rpartition('.')[2]}` at `{region}` makes the values of several sites"
                raise refusal(f"{what}: save and load the adapter, which has them one by one")
            if equation.place.selection is not None or equation.place.pruning is not None:
                what = f"`{path.rpartition('.')[2]}` at `{region}` selects what it trains"
                raise refusal(f"{what}: fold it, and save the model")
            yield path, f"({_sizes(form)}, {None if owner is None else self.owners[id(owner)]!r})"

    def _float32_modules(self) -> list[str]:
        """The parts of names of what stays float32 in a model of half precision."""
        own = set(getattr(self.base, "_keep_in_fp32_modules_strict", None) or ())
        forms = [m for m in self.model.modules() if isinstance(m, EquationModule)]
        dtypes = {p.dtype for form in forms for p in form.parameters() if p.is_floating_point()}
        return sorted(own | ({CONTAINER, SHARED} if dtypes == {torch.float32} else set()))


def own_class(model: nn.Module) -> type[nn.Module]:
    """The class of a model without those of peftc."""
    return next(cls for cls in type(model).__mro__ if "_peftc_kind" not in vars(cls) and "_peftc_over" not in vars(cls))


def _sizes(form: nn.Module) -> str:
    """The sizes and dtypes of parameters and buffers, as code."""
    tables = (vars(form)["_parameters"], vars(form)["_buffers"])
    return ", ".join(map(_tensors, tables))


def _tensors(tensors: Mapping[str, torch.Tensor | None]) -> str:
    items = (f"{name!r}: ({tuple(t.shape)}, {t.dtype})" for name, t in tensors.items() if t is not None)
    return f"{{{', '.join(items)}}}"
