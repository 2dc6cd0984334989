"""Results without data have the layout that PyTorch computes with data."""

import linecache
import random
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from peftc.fakes.shape_mode import ShapeMode
from peftc.fakes.shape_rules import IN_PLACE, META_KERNELS, RULES
from peftc.fakes.tensors import as_fake

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float32, torch.float32, torch.float64, torch.int64, torch.bool)
Draw = random.Random
SEEDS = 150


def tensor(draw: Draw, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Ones in some order of dimensions, sometimes a part of a larger tensor."""
    order = draw.sample(range(len(shape)), len(shape)) if draw.random() < 0.4 else range(len(shape))
    larger = 2 if shape and draw.random() < 0.2 else 1
    sizes = [shape[dim] for dim in order]
    sizes[-1:] = [sizes[-1] * larger] if sizes else []
    data = torch.ones(sizes, dtype=dtype or draw.choice(DTYPES))
    data = data[..., ::larger] if larger > 1 else data
    return data.permute([list(order).index(dim) for dim in range(len(shape))])


def shape_of(draw: Draw, least: int = 0, most: int = 4) -> list[int]:
    return [draw.choice((1, 2, 3, 5)) for _ in range(draw.randint(least, most))]


def broadcast(draw: Draw, shape: list[int]) -> list[int]:
    """A shape that may be repeated to the given one."""
    sizes = [1 if draw.random() < 0.3 else size for size in shape]
    return sizes[draw.randint(0, len(sizes)) :] if draw.random() < 0.5 else sizes


def entrywise(draw: Draw, count: int) -> list[Any]:
    shape = shape_of(draw)
    dtype = draw.choice(DTYPES)
    shapes = [shape, *(broadcast(draw, shape) for _ in range(count - 1))]
    draw.shuffle(shapes)
    return [tensor(draw, s, dtype if draw.random() < 0.8 else None) for s in shapes]


def scalar(draw: Draw) -> float | int:
    return draw.choice((2, 0.5, 1, True))


def arguments(func: Any, draw: Draw) -> list[Any]:
    """Random arguments of an operation, which may not fit together."""
    name, overload = func._schema.name.partition("::")[2].removesuffix("_"), func._overloadname
    x = tensor(draw, shape_of(draw, 1), draw.choice(DTYPES))
    dim = draw.randint(-x.ndim, x.ndim - 1)
    if name in ("mm", "addmm", "bmm"):
        n, m, k, batch = (draw.choice((1, 2, 3)) for _ in range(4))
        lead = [batch] if name == "bmm" else []
        factors = [tensor(draw, [*lead, n, m], torch.float32), tensor(draw, [*lead, m, k], torch.float32)]
        return [tensor(draw, broadcast(draw, [n, k]), torch.float32), *factors] if name == "addmm" else factors
    if name == "_grouped_mm":
        experts, n, m, k = (draw.choice((8, 16)) for _ in range(4))
        factors = [tensor(draw, sizes, torch.bfloat16) for sizes in ([n, m], [experts, m, k])]
        return [*factors, torch.arange(1, experts + 1, dtype=torch.int32)]
    if name == "native_layer_norm":
        shape = list(x.shape)[draw.randrange(x.ndim) :]
        weights = [draw.choice((None, tensor(draw, shape, x.dtype))) for _ in range(2)]
        return [x, shape, *weights, 1e-5]
    if name == "cat":
        others = [tensor(draw, x.shape, x.dtype if draw.random() < 0.9 else None) for _ in range(draw.randint(0, 2))]
        return [[torch.empty(0), x, *others] if draw.random() < 0.3 else [x, *others], dim]
    if name in ("mean", "sum"):
        dims = draw.choice(([dim], [], None, draw.sample(range(x.ndim), draw.randint(1, x.ndim))))
        return [x, dims, draw.random() < 0.5]
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        sizes = [2, 3, 5, 4]
        return [tensor(draw, sizes, torch.float32).transpose(1, 2).contiguous().transpose(1, 2) for _ in range(3)]
    if name == "embedding":
        return [tensor(draw, [7, 3], torch.float32), tensor(draw, shape_of(draw), torch.int64)]
    if name == "index":
        return [x, [None] * draw.randrange(x.ndim) + [tensor(draw, shape_of(draw), torch.int64) * 0]]
    special = {
        "where": lambda: [tensor(draw, shape_of(draw, 0, 2), torch.bool), *entrywise(draw, 2)],
        "view": lambda: [x, [-1] if draw.random() < 0.5 else [*x.shape[:-1], 1, x.shape[-1]]],
        "permute": lambda: [x, draw.sample(range(x.ndim), x.ndim)],
        "transpose": lambda: [x, dim, draw.randrange(x.ndim)],
        "expand": lambda: [x, [2, *x.shape]],
        "slice": lambda: [x, dim, draw.randint(0, 1), draw.choice((None, 2, -1)), draw.randint(1, 2)],
        "select": lambda: [x, dim, 0],
        "t": lambda: [tensor(draw, shape_of(draw, 0, 2))],
        "split": lambda: [x, draw.randint(1, 3), dim],
        "split_with_sizes": lambda: [x, [1, x.shape[dim] - 1], dim],
        "squeeze": lambda: [x] if overload == "default" else [x, dim if overload == "dim" else [dim]],
        "topk": lambda: [x, 1, dim],
        "sort": lambda: [x, dim],
        "_softmax": lambda: [x, dim, False],
        "full_like": lambda: [x, 2],
        "hardtanh": lambda: [x],
        "clamp": lambda: [x, draw.choice((None, 0.5)), 2],
        "pow": lambda: [x, scalar(draw)],
    }
    special["_unsafe_view"] = special["view"]
    if name in special:
        return special[name]()
    if name in ("unsqueeze", "unbind", "cumsum", "clamp_min", "clamp_max"):
        return [x, dim]
    if name in ("new_empty", "new_ones", "new_zeros"):
        return [x, shape_of(draw)]
    if overload == "Tensor" or name in ("minimum", "maximum", "floor_divide"):
        return entrywise(draw, 2)
    return [x, scalar(draw)] if overload == "Scalar" else [x]


def layout(value: Any) -> Any:
    # The stride of a dimension of one has no meaning.
    strides = tuple(step for step, size in zip(value.stride(), value.shape, strict=True) if size > 1)
    return (tuple(value.shape), strides, value.dtype, value.device, value.storage_offset())


def is_view(value: Any, args: Any) -> bool:
    memories = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
    return value.untyped_storage()._cdata in memories


def outcome(function: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The layouts of the results, and which are views of arguments; None without a result."""
    try:
        result = function(*args)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return "error"
    return None if result is None else [(layout(t), is_view(t, args)) for t in tree_leaves(result)]


def fakes(args: Any, mode: FakeTensorMode) -> Any:
    return tree_map(lambda t: as_fake(t, mode) if isinstance(t, Tensor) else t, args)


@pytest.mark.parametrize("func", [*RULES, *IN_PLACE], ids=str)
def test_results_by_rules_have_the_layout_of_those_with_data(func: Any) -> None:
    assert agreements(func, lambda args: outcome(func, args)) > 10


@pytest.mark.parametrize("func", META_KERNELS, ids=str)
def test_kernels_give_the_layout_of_pytorch_s_own_mode(func: Any) -> None:
    def expected(args: Any) -> Any:
        with (mode := FakeTensorMode()):
            return outcome(func, fakes(args, mode))

    assert agreements(func, expected) > 10


def agreements(func: Any, expected: Callable[[Any], Any]) -> int:
    """How many results are as expected: all that the mode computes itself."""
    count = 0
    for seed in range(SEEDS):
        args = arguments(func, Draw(seed))
        mode = ShapeMode()
        own_args = fakes(args, mode)
        with torch.no_grad():
            own = outcome(lambda *a, mode=mode: mode.result(func, a, {}), own_args)
            if own is not None:
                assert own == expected(args), (seed, args)
                count += own != "error"
    return count


def test_a_mode_reads_no_code_before_its_stack_is_printed() -> None:
    extract = traceback.extract_stack
    linecache.clearcache()
    mode = ShapeMode()
    files = [name for name, entry in linecache.cache.items() if len(entry) > 1]  # others are to be read
    assert (files, traceback.extract_stack) == ([], extract)
    assert "mode = ShapeMode()" in mode.stack


def test_new_tensors_have_their_device_and_dtype() -> None:
    mode = ShapeMode()
    with mode:
        tensors = [torch.arange(3), torch.ones(2, dtype=torch.int32), torch.full((2, 1), 1.5), torch.zeros(())]
    assert all(isinstance(t, FakeTensor) for t in tensors)
    expected = [torch.arange(3), torch.ones(2, dtype=torch.int32), torch.full((2, 1), 1.5), torch.zeros(())]
    assert [layout(t) for t in tensors] == [layout(t) for t in expected]


def test_an_entry_is_known_until_it_is_overwritten() -> None:
    with ShapeMode():
        number = torch.tensor(3)
        assert number.item() == 3
        number.add_(1)
        assert number.item() == 4
        with pytest.raises(RuntimeError):
            number.copy_(torch.ones(1, dtype=torch.long)[0]).item()


def test_tensors_of_two_devices_are_refused_as_pytorch_does() -> None:
    mode = ShapeMode()
    x, y = as_fake(torch.ones(2, device="meta"), mode), as_fake(torch.ones(2), mode, device=torch.device("cuda:0"))
    with mode, pytest.raises(RuntimeError, match="device"):
        x + y


def test_results_are_on_the_device_of_their_arguments() -> None:
    mode = ShapeMode()
    x = as_fake(torch.empty(2, 3, device="meta"), mode, device=torch.device("cuda:0"))
    with mode:
        results = x + x, x.mean(1), x.view(6), x.new_zeros(2)
    assert {result.device for result in results} == {torch.device("cuda:0")}
