"""Writes bottlenecks for AdapterHub, plain ones and those with Kronecker products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import Any, cast

from torch import Tensor

from peftc.diagnostics import PeftcError
from peftc.exchange.adapterhub.bottlenecks import ACTIVATIONS, FLAGS, GATE, LINEAR, PHM, reading
from peftc.exchange.adapterhub.edit_parts import EditPart, Written, key, left_out
from peftc.exchange.adapterhub.places import HubPlaces
from peftc.exchange.adapterhub.terms import operands, text
from peftc.exchange.peft_format.config import PeftConfig
from peftc.syntax import ast
from peftc.syntax.parser import parse_text

FORMS = frozenset({"adapter", "phm"})
_TRAINED = {"scalar": "learned", "vector": "channel"}
_RULE = "phm.A"
# Every way in which the library reads and adds; the reader says what each is as an equation.
_READINGS = tuple(
    {
        "original_ln_before": before,
        "original_ln_after": after,
        "residual_before_ln": residual,
        "is_parallel": is_parallel,
    }
    for after, is_parallel in product((True, False), (False, True))
    for residual, before in product((True, False, "post_add"), (False, True))
)


def write_bottlenecks(parts: Sequence[EditPart], places: HubPlaces) -> Iterator[Written]:
    """One configuration for all parts that differ in their widths alone. Raises: P801."""
    configs = list[tuple[dict[str, Any], list[EditPart]]]()
    for part in parts:
        config = _config(part, places)
        own = next((own for other, own in configs if other == config), None)
        if own is None:
            configs.append((config, own := list[EditPart]()))
        own.append(part)
    for config, own in configs:
        kinds = {part.site.steps[-1][0] for part in own}
        left = left_out(own, (site for site in places.sublayers if site.steps[-1][0] in kinds), places)
        flags = {flag: kind in kinds for kind, flag in FLAGS.items()}
        tensors = {name: tensor for part in own for name, tensor in _tensors(part, places)}
        yield Written({**config, **flags, "leave_out": left, "reduction_factor": _factors(own, places)}, tensors)


def _config(part: EditPart, places: HubPlaces) -> dict[str, Any]:
    if part.site.path not in {one.path for one in places.sublayers} or len(part.site_edit.assigns) != 1:
        raise part.no_form("the library has one bottleneck there, at attentions and ffns")
    if (sum_ := part.product()) is None or len(own := FORMS & set(sum_[0].calls)) != 1:
        raise part.no_form("it is no sum with a bottleneck")
    factors, rest = sum_
    (form,) = own
    call, scales = factors.calls[form], [name for name in _TRAINED if name in factors.calls]
    args = call.instance.form.fill(call.instance.args)
    act = next((name for name, own in ACTIVATIONS.items() if own == args["act"]), None)
    if act is None or args["dropout"] or (form == "adapter" and not args["bias"]):
        raise part.no_form("the library has other activations, its biases, and dropout in another place")
    config = {
        **_reading(part, places, text(call.inputs[0]), sorted(map(text, rest))),
        "non_linearity": act,
        "scaling": _TRAINED[scales[0]] if scales else factors.number,
        "use_gating": "gate" in factors.calls,
        "ln_before": bool(args.get("norm_in")),
        "ln_after": bool(args.get("norm_out")),
        "phm_layer": form == "phm",
    }
    if form == "phm":
        config |= {"phm_dim": args["n"], "phm_rank": args["rank"], "factorized_phm_W": args["factorised"]}
        config |= {"shared_phm_rule": args["shared"], "phm_bias": args["bias"]}
    return config


def _reading(part: EditPart, places: HubPlaces, read: str, rest: list[str]) -> dict[str, Any]:
    """The options for which the reader has this input, and this sum."""
    for options in _READINGS:
        try:
            value, statement = reading(PeftConfig(options), part.site, places)
        except PeftcError:
            continue
        if text(_equation(f"h = {value}").value) == read and _sum(value, statement) == rest:
            return options
    raise part.no_form("the library's bottlenecks read `h`, `res`, or the sum behind them as the model computes it")


def _sum(value: str, statement: str) -> list[str]:
    """The operands beside the bottleneck, of `h += {a}` and the like."""
    equation = _equation(statement.format(v=value, a="a"))
    terms = [*map(text, operands(equation.value, "+")), *([equation.target] if equation.op == "+=" else [])]
    return sorted(term for term in terms if term != "a")


@cache
def _equation(line: str) -> ast.Equation:
    (edit,) = parse_text(f"peft 2\nedit e at layer[*] {{ {line} }}\n").statements
    return cast(ast.Equation, cast(ast.Edit, edit).body[0])


def _tensors(part: EditPart, places: HubPlaces) -> Iterator[tuple[str, Tensor]]:
    owner = places.owner(part.site)
    named = part.named({**LINEAR, **PHM, **GATE, "scaling": "scalar.scale"}) | part.named({"scaling": "vector.scale"})
    if "adapter_norm_before.weight" in named:  # the norm has the first number, and its name besides
        for end in ("weight", "bias"):
            named[f"adapter_down.1.{end}"] = named[f"adapter_down.0.{end}"]
            named[f"adapter_down.0.{end}"] = named[f"adapter_norm_before.{end}"]
    yield from ((key(owner, "adapters", end), tensor) for end, tensor in named.items())
    if _RULE in part.tensors:
        if not places.prefix or places.prefix not in places.modules:
            raise part.no_form("without a head the library does not save the rule that all projections share")
        yield key(places.prefix, "shared_parameters", "phm_rule"), part.tensors[_RULE]


def _factors(parts: Sequence[EditPart], places: HubPlaces) -> Any:
    """`reduction_factor`: one, or by the number of the layer. Raises: P801."""
    factors = dict[int, float]()
    for part in parts:
        number, factor = places.layer_number(part.site), _factor(part)
        if factors.setdefault(number, factor) != factor:
            raise part.no_form("the library has one width for all bottlenecks of a layer")
    default = Counter(factors.values()).most_common(1)[0][0]
    others = {str(number): factor for number, factor in factors.items() if factor != default}
    return {**others, "default": default} if others else default


def _factor(part: EditPart) -> float:
    width, features = _sizes(part)
    factor = features // width if features % width == 0 else features / width
    if int(features // factor) != width:
        raise part.no_form(f"no `reduction_factor` gives the width {width}")
    return factor


def _sizes(part: EditPart) -> tuple[int, int]:
    """The width of a bottleneck, and the features that it writes."""
    own = part.tensors
    if "adapter.down" in own:
        return len(own["adapter.down"]), len(own["adapter.up"])
    down, up = (own.get(f"phm.{name}_right", own.get(f"phm.{name}_whole")) for name in ("down", "up"))
    assert down is not None
    assert up is not None
    return len(down) * down.shape[-1], len(up) * up.shape[-1]
