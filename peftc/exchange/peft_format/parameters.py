"""LoRA of parameters that comes in: PEFT's `target_parameters`, as `w += lowrank(…)`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from peftc.addressing.sites import Site, SiteTable, WeightRef, parameter_name
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.folder import damaged
from peftc.exchange.peft_format.types import PeftType, shown
from peftc.exchange.selector_text import is_whole
from peftc.exchange.spec_text import ModulePart, unfit
from peftc.exchange.stacked_export import tensor_prefixes

ENDS = ("lora_A.weight", "lora_B.weight")
_OF_LINEARS = ("use_dora", "lora_bias", "lora_dropout", "fan_in_fan_out")  # PEFT has none at parameters


@dataclass(frozen=True, eq=False)
class ParameterLora:
    """W_e + scale · B_e A_e for each expert e of a parameter (experts, m, n), or of one (m, n).

    Shapes: A (experts, r, n), B (experts, m, r). `is_transposed`: what is added is (B_e A_e)ᵀ,
    and n and m are exchanged.
    """

    parameter: str
    equation: str
    a: Tensor
    b: Tensor
    is_transposed: bool

    def oriented(self, ref: WeightRef) -> tuple[Tensor, Tensor]:
        """A and B of the matrix (out, in) of which `ref` is, or has rows."""
        index = 0 if ref.stacked_slice is None else ref.stacked_slice.index
        a, b = self.a[index], self.b[index]
        return (a, b) if ref.transposed == self.is_transposed else (b.t(), a.t())  # Δᵀ = Aᵀ Bᵀ

    def rows(self, ref: WeightRef) -> list[int]:
        """The rows of that matrix that are those of `ref`."""
        if ref.rows is None:
            return list(range(len(self.oriented(ref)[1])))
        return [row for block in ref.rows.blocks() for row in range(*block)]

    def factors(self, ref: WeightRef) -> dict[str, Tensor]:
        a, b = self.oriented(ref)
        return {"lowrank.A": a, "lowrank.B": b[self.rows(ref)]}


def target_parameters(config: PeftConfig, model: nn.Module) -> dict[str, str]:
    """The parameters that PEFT wraps, by what stands before `lora_A` in the names of their tensors.

    Raises: P802 for a value that is no array of names.
    """
    value = config.read("target_parameters", [])
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in cast(list[Any], value)):
        raise refusal("target_parameters", value, "it is an array of names")
    ends = cast(list[str], value)
    names = [n for n, _ in model.named_parameters() if any(n == end or n.endswith(f".{end}") for end in ends)]
    return {prefix: name for name, prefix in tensor_prefixes(model, names).items()}


def parameter_loras(
    config: PeftConfig, peft_type: PeftType, tensors: Mapping[str, Mapping[str, Tensor]], model: nn.Module
) -> list[ParameterLora]:
    """`tensors`: by parameter and end. Raises: P802, P803, P804."""
    for key in _OF_LINEARS if tensors else ():
        if value := config.read(key, None):
            raise refusal(key, value, "PEFT has none at a parameter (`target_parameters`)")
    return [_parameter_lora(config, peft_type, name, own, model) for name, own in tensors.items()]


def _parameter_lora(
    config: PeftConfig, peft_type: PeftType, name: str, tensors: Mapping[str, Tensor], model: nn.Module
) -> ParameterLora:
    if lack := [end for end in ENDS if end not in tensors]:
        raise damaged(f"`{name}` has no {lack[0]}")
    a, b = (tensors[end] for end in ENDS)
    numbers, shapes = peft_type.numbers(config, name, tensors), parameter_shapes(config, name, model)
    rank, shape = numbers["r"], model.get_parameter(name).shape
    if (a.shape, b.shape) != shapes:
        message = f"`{name}` {list(shape)} has the rank {rank} by the configuration, and A {list(a.shape)}"
        raise unfit(f"{message} and B {list(b.shape)}")
    experts = (1, *shape)[-3]
    a, b = a.unflatten(0, (experts, rank)), b.unflatten(1, (rank, experts)).permute(2, 0, 1)
    equation = f"w += lowrank(r={shown(rank)}{numbers['options']})"
    return ParameterLora(name, equation, a, b, _is_transposed(name, model))


def parameter_shapes(config: PeftConfig, name: str, model: nn.Module) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of A and B in a file. Raises: P802."""
    shape, rank = model.get_parameter(name).shape, config.rank(name)
    if len(shape) not in (2, 3):
        raise refusal("target_parameters", name, f"it has {len(shape)} dimensions")
    experts, rows, columns = (1, *shape)[-3:]
    if _is_transposed(name, model):
        rows, columns = columns, rows
    return (experts * rank, columns), (rows, rank * experts)


def _is_transposed(name: str, model: nn.Module) -> bool:
    """As PEFT asks."""
    owner, shape = model.get_submodule(name.rpartition(".")[0]), model.get_parameter(name).shape
    return len(shape) == 3 and shape[0] > 1 and bool(getattr(owner, "is_transposed", False))


def parameter_parts(loras: Sequence[ParameterLora], table: SiteTable) -> Iterator[ModulePart]:
    """By the sites that read each parameter. Raises: P802 where a part of one is no site's."""
    sites: dict[str, list[tuple[Site, WeightRef]]] = {}
    for site in table.sites:
        state = site.states.get("w")
        if state is not None and state.weight is not None and state.weight.layout is None:
            sites.setdefault(parameter_name(state.weight), []).append((site, state.weight))
    for lora in loras:
        own = sites.get(lora.parameter, [])
        whole = [(site, ref) for site, ref in own if is_whole(site)]
        if whole and len(lora.a) == 1:
            site, ref = whole[0]
            yield ModulePart(site.module, lora.equation, lora.factors(ref))
            continue
        _check_cover(lora, [ref for _, ref in own])
        steps: dict[tuple[str, str], dict[str, Mapping[str, Tensor]]] = {}
        for site, ref in own:
            steps.setdefault((site.module, site.steps[-1][0]), {})[site.path] = lora.factors(ref)
        for (module, step), by_site in steps.items():
            yield ModulePart(module, lora.equation, {}, step, by_site=by_site)


def _check_cover(lora: ParameterLora, refs: list[WeightRef]) -> None:
    """Raises: P802 unless each row of each matrix is that of one site."""
    rows: dict[int, list[int]] = {index: [] for index in range(len(lora.a))}
    for ref in refs:
        if ref.stacked_slice is not None and ref.stacked_slice.count == len(rows):
            rows[ref.stacked_slice.index] += lora.rows(ref)
    height = len(lora.oriented(refs[0])[1]) if refs else 0
    if not height or any(sorted(own) != list(range(height)) for own in rows.values()):
        reason = "its matrices, or some of their rows, are no sites of the model"
        raise PeftcError(Diagnostic("P802", f"the adapter has a LoRA of the parameter `{lora.parameter}`: {reason}"))
