"""Types of PEFT whose rows of keys and values are in a cache: positions count them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peftc.addressing.sites import Site, SiteTable
from peftc.diagnostics import Diagnostic, PeftcError
from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.folder import damaged
from peftc.exchange.peft_format.rows.prompts import OF_BASE, PROMPT
from peftc.exchange.peft_format.types import Numbers, PeftRow, PeftType, Tensors
from peftc.exchange.spec_text import ModulePart, unfit

PREFIX_FORM = """
# Trained keys and values before those of the text, whose positions count them.
# Li and Liang 2021, arXiv:2101.00190
form cached_prefix(
    len,  # rows added to the keys and to the values, in tokens
) {
    param key[heads(out), len, d_head(out)] = normal
    param value[heads(out), len, d_value(out)] = normal
    f = (counted(key), value)
}
"""
SINK_FORM = """
# Keys and values before those of the text, which an adapter keeps and nothing trains.
# Eyuboglu et al. 2025, arXiv:2506.06266 (Cartridges)
form cached_sink(
    len,  # rows added to the keys and to the values, in tokens
) {
    fixed key[heads(out), len, d_head(out)] = buffer
    fixed value[heads(out), len, d_value(out)] = buffer
    f = (counted(key), value)
}
"""
SINK, CACHED = _NAMES = ("cached_sink", "cached_prefix")
TASK = "CAUSAL_LM"
PLACE = "layer[*].attn"
_PREFIX, _SINK = "cached_prefix(len={rows})", "cached_sink(len={frozen})"


def _numbers(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    rows = config.whole("num_virtual_tokens", 0)
    frozen = int(config.number("num_frozen_tokens", 1)) if config.type == "CARTRIDGE" else 0
    if not 0 <= frozen <= rows:
        raise refusal("num_frozen_tokens", frozen, f"there are {rows} rows")
    return {"rows": rows - frozen, "frozen": frozen}


def attentions(table: SiteTable) -> list[Site]:
    """The attentions of a model that has one stack of layers, in their order."""
    return [site for site in table.sites if site.steps_in_layer and site.steps[-1][0] in ("self", "cross")]


def positions_refusal(model: nn.Module) -> str | None:
    """Why more than position ids and a mask counts the rows that PEFT has in a cache."""
    config: Any = getattr(model, "config", None)
    kinds = getattr(config, "layer_types", None)
    windows = [kind for kind in kinds if "full" not in kind] if kinds else getattr(config, "sliding_window", None)
    reasons = {
        "a decoder that attends to an encoder counts positions itself": getattr(config, "is_encoder_decoder", False),
        "the scores of the rows have ALiBi's bias by their distance": getattr(config, "alibi", False),
        "a sliding window hides the rows from later tokens": windows,
    }
    reason = next((reason for reason, is_there in reasons.items() if is_there), None)
    return None if reason is None else f"PEFT has its rows in a cache, and {reason}"


def _parts(config: PeftConfig, tensors: Tensors, table: SiteTable, model: nn.Module) -> list[ModulePart]:
    """Raises: P802, P803, P804."""
    if set(tensors) != {PROMPT}:
        raise damaged(f"the adapter has the tensors {', '.join(sorted(tensors))}, and not `{PROMPT}` alone")
    config.one_of("task_type", (TASK,), "PEFT reads the result of a language model alone behind such rows")
    if reason := positions_refusal(model):
        raise PeftcError(Diagnostic("P802", f"{reason}, which no equation says"))
    numbers, sites = _numbers(config, "", tensors), attentions(table)
    count, frozen = numbers["rows"] + numbers["frozen"], numbers["frozen"]
    equations = ([_SINK] if frozen else []) + ([_PREFIX] if numbers["rows"] else [])
    if any(site.steps[-1][0] == "cross" for site in sites) or not sites:
        raise unfit("the adapter has rows for the self-attentions of one stack of layers, and the model has others")
    by_site = {site.path: _rows(tensors[PROMPT], count, sites, i) for i, site in enumerate(sites)}
    filled = {f"{_NAMES[0]}.filled": torch.tensor(True)} if frozen else {}
    tensors_of = {
        path: filled
        | {
            f"{form}.{name}": part
            for name, rows in own.items()
            for form, part in zip(_NAMES, (rows[:, :frozen], rows[:, frozen:]), strict=True)
            if part.shape[1]
        }
        for path, own in by_site.items()
    }
    equation = f"kv = concat({', '.join(equations)}, kv)".format(**numbers)
    form = "\n".join(text for text, size in ((SINK_FORM, frozen), (PREFIX_FORM, numbers["rows"])) if size)
    return [ModulePart("", equation, {}, form=form, place=PLACE, by_site=tensors_of)]


def _rows(pool: Tensor, count: int, sites: Sequence[Site], number: int) -> dict[str, Tensor]:
    """(heads, rows, features) each, of (rows, layers · keys and values · heads · features)."""
    heads = getattr(sites[number].states["k"].shape, "heads", None)
    if heads is None or pool.ndim != 2 or len(pool) != count or pool.numel() % (count * len(sites) * 2 * heads):
        raise unfit(f"`{PROMPT}` {list(pool.shape)} does not fit {len(sites)} attentions and {count} rows")
    rows = pool.reshape(count, len(sites), 2, heads, -1)[:, number].permute(1, 2, 0, 3)
    return {"key": rows[0], "value": rows[1]}


def pool_of(sites: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The inverse, of the keys and values of each attention."""
    stacked = torch.stack([torch.stack(pair) for pair in sites])  # layers, keys and values, heads, rows, features
    return stacked.permute(3, 0, 1, 2, 4).flatten(1).contiguous()


def cached_config(rows: int, frozen: int | None) -> dict[str, Any]:
    """The keys of PEFT. Args: `frozen`: rows that nothing trains; None for a prefix."""
    own = {"peft_type": "PREFIX_TUNING"} if frozen is None else {"peft_type": "CARTRIDGE", "num_frozen_tokens": frozen}
    return {**own, "num_virtual_tokens": rows, "num_transformer_submodules": 1, "task_type": TASK}


def _type(equation: str, form: str, *ignored: str) -> PeftType:
    # Which forms there are, the numbers say.
    row = PeftRow({PROMPT: "cached_prefix.key"}, equation, form, config=lambda args: {})
    return PeftType((row,), _numbers, (*OF_BASE, *ignored), sites=_parts)


TYPES: Mapping[str, PeftType] = {
    "PREFIX_TUNING": _type(
        f"kv = concat({_PREFIX}, kv)", PREFIX_FORM, "encoder_hidden_size", "prefix_projection", "init_weights"
    ),
    "CARTRIDGE": _type(f"kv = concat({_SINK}, {_PREFIX}, kv)", SINK_FORM),
}
