"""Attached adapters as one: weighted sums and merges of their changes of low rank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from torch import Tensor, nn

from peftc.adapters.saving import save_as
from peftc.attachment.attach import attach, free_adapter
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.diagnostics.suggestions import did_you_mean, join_names
from peftc.exchange.adapter_import import write_adapter
from peftc.exchange.conversion import lora_part
from peftc.exchange.edited_model import bare_copy, edited, open_model
from peftc.exchange.lora_export import LoraAdapter, lora_of, no_product
from peftc.exchange.low_rank_changes.approximation import nearest_product
from peftc.exchange.low_rank_changes.lora_weights import LoraWeights
from peftc.exchange.peft_format.reading import Incoming
from peftc.folding.weights import Folding
from peftc.installation.compiled_model import CompiledModel
from peftc.installation.completeness import active_installation
from peftc.installation.edited_classes import true_parameter
from peftc.installation.record import Installation, place_of_values

Method = Literal["linear", "cat", "svd", "ties", "dare"]
METHODS: tuple[Method, ...] = ("linear", "cat", "svd", "ties", "dare")


def combine(
    model: nn.Module,
    weights: Mapping[str, float],
    *,
    method: Method = "linear",
    name: str | None = None,
    rank: int | None = None,
    density: float = 0.5,
    seed: int = 0,
) -> nn.Module:
    """Attaches an adapter that is made of attached ones: LoRA at each Linear that one of them has.

    Each adapter has the change Δᵢ = sᵢ Bᵢ Aᵢ of a Linear, evaluated from its equations, and the
    weight wᵢ. The methods compute as `add_weighted_adapter` of PEFT:

    - `cat` is exact: Σ wᵢ Δᵢ, of the sum of the ranks.
    - `linear` adds the factors: A = Σ √|wᵢ sᵢ| Aᵢ with the sign of wᵢ sᵢ, B = Σ √|wᵢ sᵢ| Bᵢ. Its
      rank is that of each, and its change has products Bᵢ Aⱼ of different adapters, too.
    - `svd` is the nearest change to Σ wᵢ Δᵢ of a rank.
    - `ties` leaves in each Aᵢ and Bᵢ the entries of largest magnitude, and averages those that have
      the sign of their sum, with the numbers of `linear`.
    - `dare` leaves random entries of each, divided by the density, and adds them as `linear` does.

    A parameter of the base that adapters train, as θᵢ in the place of θ, is θ + Σ wᵢ (θᵢ − θ) in
    the new one: with weights of the sum 1, the mean. `ties` and `dare` refuse it.

    Args:
        model: with attached adapters.
        weights: of each adapter, by name.
        method: see above.
        name: of the new adapter; by default those of its parts with `-` between them.
        rank: of `svd`, by default the largest of the adapters.
        density: of `ties` and `dare`, the share of entries that stay, above 0 and at most 1.
        seed: of `dare`.

    Returns:
        The model. The new adapter acts when it is chosen, and is independent of its parts.

    Raises:
        PeftcError: P410 (not compiled), P436 (an edited module was replaced), P529 (switched off),
            P545 (arguments; adapters of different ranks, for other methods than `cat` and `svd`;
            trained parameters of the base with `ties` and `dare`),
            P547 (no adapter of that name), P548 (the name), P801 (an edit that is no product of low
            rank). After an error the model is unchanged.

    Sources: TIES, Yadav et al. 2023, arXiv:2306.01708; DARE, Yu et al. 2023, arXiv:2311.03099.
    """
    record = active_installation(model)
    check_arguments(weights, method, rank, density)
    for adapter in weights:
        record.group(adapter)
    saved = combined_values(model, record, weights, method)
    new = free_adapter(CompiledModel.active(model), name or "-".join(weights), Path("combination"))
    with TemporaryDirectory() as folder:
        adapters = {adapter: lora_alone(model, adapter, Path(folder) / adapter) for adapter in weights}
        modules = dict.fromkeys(module for adapter in adapters.values() for module in adapter.weights)
        generator = torch.Generator().manual_seed(seed)
        result = LoraAdapter(tables=set[str]().union(*(adapter.tables for adapter in adapters.values())))
        for module in modules:
            own = [(adapters[a].weights[module], w) for a, w in weights.items() if module in adapters[a].weights]
            result.weights[module] = combined(module, own, method, rank, density, generator)
        base = open_model(bare_copy(model))
        target = Path(folder) / "combination"
        write_adapter(base, Incoming("lora", [lora_part(module, result) for module in modules], saved), target, new)
        return attach(target, model, name=new, other_weights=True)


def check_arguments(weights: Mapping[str, float], method: str, rank: int | None, density: float) -> None:
    """Raises: P545."""
    numbers = list(weights.values()) if isinstance(weights, Mapping) else []  # pyright: ignore[reportUnnecessaryIsInstance]  # for untyped callers
    if not numbers or not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):  # pyright: ignore[reportUnnecessaryIsInstance]
        message = f"`weights` has a number for each adapter, by name; it is {weights!r}"
        raise PeftcError(Diagnostic("P545", message, help='{"A": 0.3, "B": 0.7}'))
    if method not in METHODS:
        help_ = did_you_mean(method, METHODS) or f"the methods are {join_names(METHODS)}"
        raise PeftcError(Diagnostic("P545", f"`{method}` is no method of combination", help=help_))
    if rank is not None and (method != "svd" or not isinstance(rank, int) or rank < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PeftcError(Diagnostic("P545", f"`rank` is of the method `svd`, 1 or more; it is {rank!r}"))
    if not 0 < density <= 1:
        raise PeftcError(
            Diagnostic("P545", f"`density` is a share of entries, above 0 and at most 1; it is {density!r}")
        )


@torch.no_grad()
def combined_values(
    model: nn.Module, record: Installation, weights: Mapping[str, float], method: Method
) -> dict[str, Tensor]:
    """The parameters of the base that the combination trains, by dotted name. Raises: P545."""
    changes: dict[str, list[Tensor]] = {}
    for adapter, weight in weights.items():
        edits, own = record.group(adapter).edits, record.adapter_parameters.items()
        for saved, name in ((saved, name) for saved, name in own if saved.partition("/")[0] in edits):
            value = model.get_submodule(place_of_values(saved)).get_parameter(adapter)
            changes.setdefault(name, []).append(weight * (value.double() - true_parameter(model, name).double()))
    if changes and method in ("ties", "dare"):
        message = f"`{method}` is for changes of low rank, and `{next(iter(changes))}` is trained as a whole"
        raise PeftcError(Diagnostic("P545", message, help="combine by `linear`, `cat` or `svd`"))
    bases = {name: true_parameter(model, name) for name in changes}
    return {name: (base.double() + sum(changes[name])).to(base.dtype) for name, base in bases.items()}


def lora_alone(model: nn.Module, name: str, folder: Path) -> LoraAdapter:
    """An attached adapter as LoRA. Raises: P801."""
    save_as(model, folder, name)
    with edited(folder, model, other_weights=True) as base:
        folding = Folding(base.module, None, None, None)
        try:
            adapter = lora_of(base, folding)
        except PeftcError as error:
            raise PeftcError(replace(d, message=f"adapter `{name}`: {d.message}") for d in error.diagnostics) from error
        if adapter.stacked:
            reason = "weights of experts are one parameter, which is not combined"
            raise no_product(", ".join(folding.names), reason)
        return adapter


def combined(
    module: str,
    own: Sequence[tuple[LoraWeights, float]],
    method: Method,
    rank: int | None,
    density: float,
    generator: torch.Generator,
) -> LoraWeights:
    """The LoRA of a module that has these, each with its weight. Raises: P545."""
    if method in ("cat", "svd"):
        a = torch.cat([lora.a for lora, _ in own])
        b = torch.cat([lora.b * (weight * lora.scale) for lora, weight in own], 1)
        whole = LoraWeights(a, b, 1.0)
        return whole if method == "cat" else nearest_product(whole, rank or max(lora.rank for lora, _ in own))[0]
    if len(ranks := {lora.rank for lora, _ in own}) > 1:
        message = f"`{module}` has adapters of the ranks {', '.join(map(str, sorted(ranks)))}"
        raise PeftcError(Diagnostic("P545", message, help=f"`{method}` needs one rank: `cat` and `svd` take several"))
    numbers = [weight * lora.scale for lora, weight in own]
    roots = [math.sqrt(abs(number)) for number in numbers]
    signed = [math.copysign(root, number) for root, number in zip(roots, numbers, strict=True)]

    def merged(tensors: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
        if method == "ties":
            return ties([largest(tensor, density) for tensor in tensors], factors)
        if method == "dare":
            tensors = [t * torch.empty_like(t).bernoulli_(density, generator=generator) / density for t in tensors]
        return torch.stack([tensor * factor for tensor, factor in zip(tensors, factors, strict=True)]).sum(0)

    return LoraWeights(merged([lora.a for lora, _ in own], signed), merged([lora.b for lora, _ in own], roots), 1.0)


def largest(tensor: Tensor, density: float) -> Tensor:
    """The entries of largest magnitude; zeros in the place of the others."""
    places = tensor.abs().flatten().topk(int(density * tensor.numel())).indices
    return torch.zeros_like(tensor).flatten().index_fill(0, places, 1.0).view_as(tensor) * tensor


def ties(tensors: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """The mean of the entries that have the sign of their sum, each times its factor."""
    stacked = torch.stack(tuple(tensors))
    agree = stacked.sign() == torch.where(stacked.sum(0) >= 0, 1, -1)
    weighted = stacked * torch.tensor(factors, dtype=stacked.dtype).view(-1, *[1] * (stacked.ndim - 1))
    return (weighted * agree).sum(0) / agree.sum(0).clamp(min=1)
