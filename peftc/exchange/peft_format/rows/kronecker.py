"""LoKr: a Kronecker product, whose factors PEFT makes as large as the divisors that it finds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from peftc.exchange.low_rank_changes.lora_weights import alphas
from peftc.exchange.peft_format.config import PeftConfig
from peftc.exchange.peft_format.names import pattern_of
from peftc.exchange.peft_format.types import NoConfig, Numbers, PeftRow, PeftType, Tensors, shown, whole

_BOTH = """
# A Kronecker product of two matrices of which the first is a low-rank product, and the second is one if it is large.
# Yeh et al. 2023, arXiv:2309.14859 (LoKr)
form lokr_both(
    x,
    rows,  # of the first matrix, a divisor of the features written
    columns,  # of the first matrix, a divisor of the features read
    r,  # rank of the products
    alpha,  # numerator of the scale
    second = true,  # whether the second matrix is a low-rank product, too
) {
    param A_up[rows, r] = 0
    param A_down[r, columns] = kaiming
    param B[d(out) / rows, d(x) / columns] = kaiming if second == false
    param B_up[d(out) / rows, r] = kaiming if second
    param B_down[r, d(x) / columns] = kaiming if second
    let b = B if second == false
    let b = B_up @ B_down if second
    f = alpha / r * kron(A_up @ A_down, b) @ x
}
"""


def _lokr(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    """B is whole where PEFT finds r too large, and the scale is alpha / r all the same."""
    config.flag("decompose_both")  # the tensors tell
    rank, alpha = config.rank(module), config.number("alpha", 8, module, "alpha_pattern")
    rows, columns = _size(tensors, "lokr_w1")
    numbers = {"rows": rows, "columns": columns, "rank": rank}
    return {**numbers, "alpha": shown(alpha), "scale": shown(alpha / rank)}


def _size(tensors: Tensors, name: str) -> tuple[int, int]:
    """Of a matrix, or of the product of two."""
    if name in tensors:
        return tensors[name].shape[0], tensors[name].shape[-1]
    return tensors[f"{name}_a"].shape[0], tensors[f"{name}_b"].shape[-1]


def _config(args: Mapping[str, Any]) -> dict[str, Any]:
    (own,) = args.values()
    return {"r": own["r"], "alpha": own["alpha"], "both": "kron" not in args}


def factorization(dimension: int, factor: int) -> tuple[int, int]:
    """The two divisors of a number that PEFT takes for `decompose_factor`."""
    if factor > 0 and dimension % factor == 0:
        return factor, dimension // factor
    most = dimension if factor == -1 else factor
    m, n = 1, dimension
    length = m + n
    while m < n:
        new = next(one for one in range(m + 1, dimension + 1) if dimension % one == 0)
        if new + dimension // new > length or new > most:
            break
        m, n = new, dimension // new
    return min(m, n), max(m, n)


def _of_all(numbers: Mapping[str, dict[str, Any]], tensors: Mapping[str, Tensors]) -> dict[str, Any]:
    """`decompose_factor`, from which PEFT has the sizes of all modules, and ranks and alphas."""
    sizes = {m: (_size(own, "lokr_w1"), _size(own, "lokr_w2")) for m, own in tensors.items()}
    both = {own["both"] for own in numbers.values()}
    if len(both) > 1:
        raise NoConfig("PEFT makes a product of the first matrix at all modules, or at none")
    factor = next((one for one in _factors(sizes) if _has_sizes(one, sizes)), None)
    if factor is None:
        module, ((rows, columns), _) = next(iter(sizes.items()))
        message = f"no `decompose_factor` gives the sizes of first matrices, such as {rows} × {columns} of `{module}`"
        raise NoConfig(message)
    ranks, scales = dict[str, int](), dict[str, float]()
    for module, own in numbers.items():
        first, second = sizes[module]
        rank, is_whole = own["r"], "lokr_w2" in tensors[module]
        alpha = own["alpha"]
        if rank is None:  # B is whole, and `alpha` of the form the scale
            rank = max(*second, 1)
            own_alphas = alphas([(1.0 if alpha is None else float(alpha), rank)], rslora=False)
            if own_alphas is None:
                raise NoConfig(f"no alpha gives the scale {alpha} of `{module}`")
            (alpha,) = own_alphas
        elif alpha is None:
            alpha = rank
        if is_whole != (rank >= max(second) / 2) or (own["both"] and rank >= max(first) / 2):
            raise NoConfig(f"PEFT has a whole matrix in the place of a product of rank {rank} at `{module}`")
        ranks[module], scales[module] = rank, whole(alpha)
    r, rank_pattern = pattern_of(ranks)
    alpha, alpha_pattern = pattern_of(scales)
    patterns = {"rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern}
    return {"r": r, "alpha": alpha, **patterns, "decompose_factor": factor, "decompose_both": both.pop()}


def _factors(sizes: Mapping[str, tuple[tuple[int, int], tuple[int, int]]]) -> Iterator[int]:
    yield -1
    yield from sorted({size for first, _ in sizes.values() for size in first if size > 0})


def _has_sizes(factor: int, sizes: Mapping[str, tuple[tuple[int, int], tuple[int, int]]]) -> bool:
    return all(
        factorization(one * two, factor) == (one, two)
        for first, second in sizes.values()
        for one, two in zip(first, second, strict=True)
    )


_A, _WHOLE = {"lokr_w1": "kron.A"}, {"lokr_w2": "kron.B"}
_ROWS = (
    PeftRow(
        {**_A, "lokr_w2_a": "kron.B_up", "lokr_w2_b": "kron.B_down"},
        "h += kron(x, rows={rows}, columns={columns}, r={rank}, alpha={alpha})",
        config=_config,
        linear_alone=True,
    ),
    PeftRow(
        {**_A, **_WHOLE},
        "h += kron(x, rows={rows}, columns={columns}, alpha={scale})",
        config=_config,
        linear_alone=True,
    ),
    PeftRow(
        {
            "lokr_w1_a": "lokr_both.A_up",
            "lokr_w1_b": "lokr_both.A_down",
            "lokr_w2_a": "lokr_both.B_up",
            "lokr_w2_b": "lokr_both.B_down",
        },
        "h += lokr_both(x, rows={rows}, columns={columns}, r={rank}, alpha={alpha})",
        _BOTH,
        config=_config,
        linear_alone=True,
    ),
    PeftRow(
        {"lokr_w1_a": "lokr_both.A_up", "lokr_w1_b": "lokr_both.A_down", "lokr_w2": "lokr_both.B"},
        "h += lokr_both(x, rows={rows}, columns={columns}, r={rank}, alpha={alpha}, second=false)",
        _BOTH,
        config=_config,
        linear_alone=True,
    ),
)
LOKR = PeftType(
    _ROWS,
    _lokr,
    ("rank_dropout", "module_dropout", "rank_dropout_scale", "use_effective_conv2d", "decompose_factor"),
    settle=_of_all,
)
