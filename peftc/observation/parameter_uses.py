"""Finds modules that compute with parameters of others: a head that holds the input embedding in a
list, a model that multiplies by an embedding's weight itself.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from peftc.dataflow.operations import OF_FIRST, Op, op_named
from peftc.diagnostics.model_line import ModelLine, running_line
from peftc.fakes.data_answers import tensors_in
from peftc.forms.module import has_values
from peftc.modules.memory import storage_id
from peftc.modules.walk import Named, all_named_parameters, modules_outside

_TOKEN_PRODUCTS = frozenset({Op.ATTENTION, Op.SOFTMAX, Op.MATMUL})


class ParameterUses(TorchFunctionMode):
    """Notes which module computes with which parameter inside the block.

    Attributes:
        running: the names of the modules that are being called, the innermost last.
        closure_reads: modules that compute with a parameter of no module, by its storage: in a
            skeleton that of the original, which a closure still holds.
        token_products: the modules that run an attention, a softmax or a product of matrices.
        weight_products: the modules that multiply by a weight of their own.
        lines: where code first computes with a parameter of another module, or of none, by its
            storage.
    """

    def __init__(self, model: nn.Module, running: list[str]) -> None:
        super().__init__()
        self.running = running
        self.names: dict[int, list[str]] = defaultdict(list)  # of parameters, by storage
        self.add(modules_outside(model, duplicates=True))
        self.readers: dict[int, dict[str, None]] = defaultdict(dict)
        self.closure_reads: dict[int, str] = {}
        self.lines: dict[int, ModelLine | None] = {}
        self.token_products: dict[Op, set[str]] = defaultdict(set)
        self.weight_products: set[str] = set()

    def add(self, modules: Named) -> None:
        """Adds modules whose parameters are followed, under all their names."""
        for name, parameter in all_named_parameters(modules):
            self.names[storage_id(parameter)].append(name)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if (op := op_named(name)) in _TOKEN_PRODUCTS and self.running:
            self.token_products[op].add(self.running[-1])
        if not name.startswith("new_") and not name.endswith("_like") and next(tensors_in(result), None) is not None:
            reader = self.running[-1] if self.running else ""
            for value in tensors_in(args[:1] if op in OF_FIRST else (args, kwargs)):
                key = storage_id(value)
                if key in self.names:
                    self.readers[key][reader] = None
                    if key not in self.lines and all(_owner(name) != reader for name in self.names[key]):
                        self.lines[key] = running_line()
                    if op in (Op.MATMUL, Op.LINEAR) and f"{reader}.weight".lstrip(".") in self.names[key]:
                        self.weight_products.add(reader)
                elif isinstance(value, nn.Parameter):
                    self.closure_reads[key] = reader
                    self.lines.setdefault(key, running_line())
        return result

    def external_reads(self, layers: Collection[str]) -> dict[str, tuple[str, ...]]:
        """The modules that compute with a parameter besides its owner, by the parameter's name. In
        one of the `layers`, a module may compute with the parameters of its children.
        """
        uses: dict[str, tuple[str, ...]] = {}
        for key, readers in self.readers.items():
            owners = {_owner(name) for name in self.names[key]}
            for name in self.names[key]:
                owner = _owner(name)
                layer = next((n for n in layers if f"{owner}.".startswith(f"{n}.")), None)
                others = tuple(r for r in readers if r not in owners and not _contains(r, owner, layer))
                if others and owners.intersection(readers):
                    uses[name] = others
        return uses

    def lines_by_name(self) -> dict[str, ModelLine]:
        """`lines`, by the names of the parameters."""
        lines = ((key, line) for key, line in self.lines.items() if line is not None and key in self.names)
        return {name: line for key, line in lines for name in self.names[key]}

    def closure_lines(self) -> dict[int, ModelLine]:
        """`lines` of parameters of no module."""
        return {key: line for key in self.closure_reads if (line := self.lines[key]) is not None}


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _contains(reader: str, owner: str, layer: str | None) -> bool:
    """Whether a reader in the layer contains the owner."""
    return layer is not None and f"{owner}.".startswith(f"{reader}.") and f"{reader}.".startswith(f"{layer}.")


def parameter_views(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The modules that hold a view of a parameter as a plain attribute, by the parameter's name."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if has_values(parameter):
            names[storage_id(parameter)].append(name)
    holders: dict[str, tuple[str, ...]] = {}
    for holder, module in model.named_modules():
        plain = [v for name, v in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")]
        for value in tensors_in(plain):
            for name in names.get(storage_id(value), ()):
                if not isinstance(value, nn.Parameter) and name.rpartition(".")[0] != holder:
                    holders[name] = (*holders.get(name, ()), holder)
    return holders
