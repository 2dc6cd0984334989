"""Whether a module that has a matrix computes one product with it: its own code tells."""

import inspect
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from peftc.dataflow.matrices import matrix_product
from peftc.dataflow.nodes import output_of, shape
from peftc.fakes.tensors import fake_copy
from peftc.tracing.module_calls import bind_arguments
from peftc.tracing.tracer import approximate_trace

_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def has_own_forward(module: nn.Module) -> bool:
    """Whether a module's code is not that of the class of PyTorch's that it is derived from."""
    stock = next((c for c in type(module).__mro__ if c.__module__.startswith("torch.")), nn.Module)
    return inspect.unwrap(type(module).forward) is not inspect.unwrap(stock.forward)


def returns_other_features(call: fx.Node, module: nn.Module) -> bool:
    """Whether code of a module's own multiplies by its weight, and returns other features than
    those of its rows: a gate. False where it cannot be traced, or computes the weight, as that of
    quantized modules.
    """
    # Seen in: no transformers model, but `LinearGEGLU` of k-diffusion
    weight = getattr(module, "weight", None)
    if not has_own_forward(module) or not isinstance(weight, FakeTensor):
        return False
    if module not in _known:
        _known[module] = _returns_other_features(call, module, weight)
    return _known[module]


def _returns_other_features(call: fx.Node, module: nn.Module, weight: FakeTensor) -> bool:
    operands: Any = fx.map_arg((call.args, call.kwargs), lambda n: n.meta.get("example"))
    try:
        arguments = bind_arguments(type(module).forward, module, *operands)
        with weight.fake_mode:
            graph = approximate_trace(module, fake_copy(arguments, weight.fake_mode)).graph
    except Exception:  # of a model's own code
        return False
    products = [p for p in map(matrix_product, graph.nodes) if p is not None and p.weight.parameter == "weight"]
    result = output_of(graph).args[0]
    if not products or not isinstance(result, fx.Node):
        return False
    is_whole = len(products) == 1 and products[0].weight.rows is None
    return not is_whole or shape(result)[-1:] != (products[0].width,)
