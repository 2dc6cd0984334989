"""Evaluates the equation of a form by its text alone, one token at a time.

Nothing of `peftc.equations` is used: neither types nor the code that a form becomes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import product
from math import cos, pi, sqrt
from typing import Any

import torch
from torch import Tensor

from peftc.syntax import ast

TOKENS = ast.Name("tokens")
BELOW = "<below>"  # what the names of sites below are, from the lowest on
SIZES = "<sizes>"  # the features of what `let`s name

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x * (x > 0),
    "gelu": lambda x: x / 2 * (1 + torch.erf(x / sqrt(2))),
    "none": lambda x: x,
    "silu": lambda x: x / (1 + (-x).exp()),
    "tanh": lambda x: (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "exp": lambda x: x.exp(),
    "softplus": lambda x: (1 + x.exp()).log(),
}


def kron(a: Tensor, b: Tensor) -> Tensor:
    (m, n), (p, q) = a.shape, b.shape
    result = a.new_zeros(m * p, n * q)
    for i, j in product(range(m), range(n)):
        result[i * p : (i + 1) * p, j * q : (j + 1) * q] = a[i, j] * b
    return result


def blocks(a: Tensor) -> Tensor:
    count, rows, columns = a.shape
    result = a.new_zeros(count * rows, count * columns)
    for i in range(count):
        result[i * rows : (i + 1) * rows, i * columns : (i + 1) * columns] = a[i]
    return result


def skew(q: Tensor) -> Tensor:
    if q.ndim > 1:
        return torch.stack([skew(one) for one in q])
    n = next(n for n in range(1, 100) if n * (n - 1) // 2 == len(q))
    result, entries = q.new_zeros(n, n), iter(q)
    for i in range(n):
        for j in range(i + 1, n):
            result[i, j] = next(entries)
            result[j, i] = -result[i, j]
    return result


def eye(a: Tensor) -> Tensor:
    return torch.stack([eye(one) for one in a]) if a.ndim > 2 else torch.diag(a.new_ones(len(a)))


def power(a: Tensor, n: float) -> Tensor:
    result = eye(a)
    for _ in range(int(n)):
        result = torch.matmul(result, a)
    return result


def circulant(c: Tensor) -> Tensor:
    if c.ndim == 3:
        return torch.cat([torch.cat([circulant(one) for one in row], 1) for row in c])
    return torch.stack([c.roll(j) for j in range(len(c))], 1)


def fourier(a: Tensor) -> Tensor:
    (n, m), result = a.shape, torch.zeros_like(a)
    for i, j, k, q in product(range(n), range(m), range(n), range(m)):
        result[i, j] += a[k, q] * cos(2 * pi * (i * k / n + j * q / m)) / (n * m)
    return result


def of_rows(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of vectors, of a vector or of each row of a matrix."""
    return lambda x: function(x) if x.ndim == 1 else torch.stack([function(row) for row in x])


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **ACTIVATIONS,
    "softmax": of_rows(lambda x: x.exp() / x.exp().sum()),
    "norm": of_rows(lambda x: (x * x).sum().sqrt().reshape(1)),
    "mean": of_rows(lambda x: (x.sum() / len(x)).reshape(1)),
    "layer_norm": lambda x, e=1e-5: of_rows(lambda v: (v - v.mean()) / ((v - v.mean()).square().mean() + e).sqrt())(x),
    "dropout": lambda x, p: x,
    "frozen": lambda x: x.detach(),
    "t": lambda a: torch.stack([a[:, i] for i in range(a.shape[1])]),
    "kron": kron,
    "blocks": blocks,
    "rms_norm": of_rows(lambda x: x / ((x * x).mean() + torch.finfo(x.dtype).eps).sqrt()),
    "skew": skew,
    "eye": eye,
    "power": power,
    "cayley": lambda q: (eye(q) - q) @ torch.linalg.inv(eye(q) + q),
    "solve": lambda a, b: torch.linalg.inv(a) @ b,
    "circulant": circulant,
    "clamp": lambda x, low, high: torch.where(x < low, low, torch.where(x > high, high, x)),
    "log": lambda x: torch.as_tensor(x, dtype=torch.float64).log(),
    "logistic_noise": lambda x: x,
    "normal_noise": lambda x, s: x,
    "gather": lambda v, places: torch.stack([v[i] for i in places.tolist()]),
    "pruned": lambda v, z, n: v * z,
    "concat": lambda *vectors: torch.stack([entry for vector in vectors for entry in vector]),
    "narrow": lambda v, start, count: torch.stack([v[int(start) + i] for i in range(int(count))]),
    "fourier": fourier,
    "cos": lambda x: ((1j * x).exp() + (-1j * x).exp()).real / 2,
    "sin": lambda x: ((1j * x).exp() - (-1j * x).exp()).imag / 2,
    "inverse": lambda a: torch.linalg.solve(a, torch.eye(a.shape[-1], dtype=a.dtype).expand(a.shape)),
}


def evaluate(form: ast.Form, names: Mapping[str, Any]) -> Tensor:
    """The value of a form, of its numbers, parameters, and an input for one token."""
    return _evaluate(form, dict(names))


def evaluate_sites(form: ast.Form, sites: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    """The values of a form at sites one above the other."""
    below: list[dict[str, Any]] = []
    values: list[Tensor] = []
    for names in sites:
        lets = {**names, BELOW: tuple(below)}
        values.append(_evaluate(form, lets))
        below.append(lets)
    return values


def _evaluate(form: ast.Form, lets: dict[str, Any]) -> Tensor:
    for line in form.body:
        if isinstance(line, ast.Let):
            lets[line.name] = expression(line.value, lets)
        elif isinstance(line, ast.Equation):
            return expression(line.value, lets)
    raise AssertionError


def expression(node: ast.Expr, names: Mapping[str, Any]) -> Any:
    def value(part: ast.Expr) -> Any:
        return expression(part, names)

    match node:
        case ast.Number(number):
            return number
        case ast.Name(name):
            return names.get(name, 0.0)
        case ast.Negative(operand):
            return -value(operand)
        case ast.Binary("@", left, right):
            a, b = value(left), value(right)
            columns = [(a * column).sum(1) for column in (b.T if b.ndim == 2 else [b])]
            return torch.stack(columns, 1) if b.ndim == 2 else columns[0]
        case ast.Binary(op, left, right):
            a, b = value(left), value(right)
            return a + b if op == "+" else a - b if op == "-" else a * b if op == "*" else a / b
        case ast.Item(owner, indices):
            result = value(owner)
            for index in indices:
                result = result[int(value(index))]
            return result
        case ast.Call("sum" | "product" as function, (ast.Binding(name, count), term)):
            terms = [expression(term, {**names, name: i}) for i in range(int(value(count)))]
            return reduce(torch.matmul if function == "product" else torch.add, terms)
        case ast.Call("below", (ast.Name(name), first)):
            return names[BELOW][-1][name] if names[BELOW] else torch.zeros(names[SIZES][name]) + value(first)
        case ast.Call("history", (part,)):
            return torch.stack([*(expression(part, other) for other in names[BELOW]), value(part)])
        case ast.Call(function, args):
            return FUNCTIONS[names.get(function, function)](*map(value, args))
        case _:
            raise AssertionError(node)
