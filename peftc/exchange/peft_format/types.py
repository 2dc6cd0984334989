"""The types of PEFT adapters as equations: one row for each set of tensors of a module."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from peftc.exchange.peft_format.config import PeftConfig, refusal

_SERIES = (0, 18)  # of PEFT, since when the series of OFT is the present one
Tensors = Mapping[str, Tensor]  # of one module, by the end of their names in PEFT
Numbers = dict[str, Any]  # for the braces of an equation
_LORA_INITS = (True, False, "gaussian", "eva", "orthogonal", "mica", "lora_ga")  # which leave the base as it is


@dataclass(frozen=True)
class PeftRow:
    """What PEFT computes at a module that has these tensors.

    Attributes:
        tensors: the end of PEFT's name, and ours: `form.parameter`.
        equation: at the module, with braces for numbers.
        step: the site below the module's own sub-layer where the equation stands, if it is not the
            module itself.
        config: the keys of PEFT for the arguments of the forms; None where an edit of such an
            equation leaves as another type.
        linear_alone: whether PEFT has it at no other class.
    """

    tensors: Mapping[str, str]
    equation: str
    step: str = ""
    config: Callable[[Mapping[str, Any]], dict[str, Any]] | None = None
    linear_alone: bool = False


@dataclass(frozen=True)
class PeftType:
    """A type of adapters.

    Attributes:
        rows: by the tensors of a module.
        numbers: reads the configuration for a module. Raises: P802.
        ignored: keys that matter for training alone, or together with others.
        flags: keys with which a module has a tensor, and else has none.
    """

    rows: tuple[PeftRow, ...]
    numbers: Callable[[PeftConfig, str, Tensors], Numbers]
    ignored: Collection[str] = field(default=())
    flags: Mapping[str, str] = field(default_factory=dict[str, str])

    def row(self, tensors: Tensors) -> PeftRow | None:
        """The row of a module with these tensors."""
        step = _reads(tensors)
        return next((row for row in self.rows if set(row.tensors) == set(tensors) and row.step == step), None)


def shown(number: float) -> str:
    """A number in the text of a spec, of which all digits are read again."""
    return str(int(number)) if float(number).is_integer() and abs(number) < 2**53 else repr(float(number))


def _lora(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.one_of(
        "init_lora_weights", _LORA_INITS, "PEFT changes the weights of the base when it loads such an adapter"
    )
    rank = config.rank(module)
    alpha = config.number("lora_alpha", 8, module, "alpha_pattern")
    rslora, dropout = config.flag("use_rslora"), config.number("lora_dropout", 0.0)
    if alpha <= 0:
        raise refusal("lora_alpha", alpha, "it is above 0")
    options = f", alpha={shown(alpha)}" if alpha != rank or rslora else ""
    options += ", rslora=true" if rslora else ""
    return {
        "r": rank,
        "options": options,
        "dropout": f", dropout={shown(dropout)}" if dropout else "",
        "scale": shown(alpha / (math.sqrt(rank) if rslora else rank)),
    }


def _loha(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    rank, alpha = config.rank(module), config.number("alpha", 8, module, "alpha_pattern")
    return {"r": rank, "alpha": shown(alpha)}


def _lokr(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    """B is whole where PEFT finds r too large, and the scale is alpha / r all the same."""
    rank, alpha = config.rank(module), config.number("alpha", 8, module, "alpha_pattern")
    rows, columns = tensors["lokr_w1"].shape if "lokr_w1" in tensors else (0, 0)
    return {"rows": rows, "columns": columns, "rank": rank, "alpha": shown(alpha), "scale": shown(alpha / rank)}


def _oft(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.number("r", 0)
    config.number("oft_block_size", 0)  # the tensor tells
    terms = int(config.number("num_cayley_neumann_terms", 5))
    block = (1 + math.isqrt(1 + 8 * tensors["oft_R.weight"].shape[-1])) // 2
    series = config.read("use_cayley_neumann", True)
    release = re.match(r"(\d+)\.(\d+)", str(config.values.get("peft_version")))
    if series and (release is None or tuple(map(int, release.groups())) < _SERIES):
        reason = "before PEFT 0.18 the series of a rotation was another one; load it with PEFT, and save it again"
        raise refusal("peft_version", config.values.get("peft_version"), reason)
    return {"block": block, "neumann": f", neumann={terms}" if series else ""}


def _ia3(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    config.read("feedforward_modules", None)  # the shape tells
    return {}


def _reads(tensors: Tensors) -> str:
    """`hidden` for a vector (1, in) of what a Linear reads; those of outputs are (out, 1)."""
    vector = tensors.get("ia3_l")
    return "hidden" if vector is not None and vector.ndim == 2 and vector.shape[0] == 1 else ""


def _rank_and_alpha(args: Mapping[str, Any]) -> dict[str, Any]:
    rank, alpha = args["r"], args["alpha"] if args["alpha"] is not None else args["r"]
    return {"r": rank, "alpha": int(alpha) if float(alpha).is_integer() else alpha}


def _dora_config(args: Mapping[str, Any]) -> dict[str, Any]:
    own = _rank_and_alpha(args)
    lora = {"r": own["r"], "lora_alpha": own["alpha"], "use_rslora": args["rslora"], "use_dora": True}
    return {**lora, "lora_dropout": 0.0, "bias": "none"}


def _oft_config(args: Mapping[str, Any]) -> dict[str, Any]:
    terms = args["neumann"]
    series: dict[str, Any] = {"use_cayley_neumann": terms is not None, "num_cayley_neumann_terms": terms or 5}
    series["peft_version"] = ".".join(map(str, (*_SERIES, 0)))
    return {"r": 0, "oft_block_size": args["block"], "coft": False, "block_share": False, **series}


_A, _B = "lora_A.weight", "lora_B.weight"
_LORA_ROWS = (
    PeftRow({_A: "lora.A", _B: "lora.B"}, "h += lora(x, r={r}{options}{dropout})"),
    PeftRow(
        {_A: "lowrank.A", _B: "lowrank.B", "lora_magnitude_vector": "magnitude.m"},
        "w = magnitude(w + lowrank(r={r}{options}))",
        config=lambda args: _dora_config(args["lowrank"]),
    ),
    PeftRow(
        {_A: "lora.A", _B: "lora.B", "lora_B.bias": "vector.scale"},
        "h += {scale} * (lora(x, r={r}{dropout}) + vector(init=0))",
    ),
    PeftRow({"lora_embedding_A": "lora.A", "lora_embedding_B": "lora.B"}, "h += lora(x, r={r}{options})"),
)

TYPES: Mapping[str, PeftType] = {
    "IA3": PeftType(
        (
            PeftRow({"ia3_l": "vector.scale"}, "h *= vector(init=1)", config=lambda args: {}),
            PeftRow({"ia3_l": "vector.scale"}, "h *= vector(init=1)", "hidden", lambda args: {}),
        ),
        _ia3,
    ),
    "LN_TUNING": PeftType((), lambda config, module, tensors: {}),
    "LOHA": PeftType(
        (
            PeftRow(
                {
                    "hada_w1_b": "hadamard.A",
                    "hada_w1_a": "hadamard.B",
                    "hada_w2_b": "hadamard.C",
                    "hada_w2_a": "hadamard.D",
                },
                "w += hadamard(r={r}, alpha={alpha})",
                config=lambda args: _rank_and_alpha(args["hadamard"]),
                linear_alone=True,
            ),
        ),
        _loha,
        ("rank_dropout", "module_dropout", "use_effective_conv2d"),
    ),
    "LOKR": PeftType(
        (
            PeftRow(
                {"lokr_w1": "kron.A", "lokr_w2_a": "kron.B_up", "lokr_w2_b": "kron.B_down"},
                "h += kron(x, rows={rows}, columns={columns}, r={rank}, alpha={alpha})",
            ),
            PeftRow(
                {"lokr_w1": "kron.A", "lokr_w2": "kron.B"},
                "h += kron(x, rows={rows}, columns={columns}, alpha={scale})",
            ),
        ),
        _lokr,
        ("rank_dropout", "module_dropout", "rank_dropout_scale", "use_effective_conv2d", "decompose_factor"),
    ),
    "OFT": PeftType(
        (
            PeftRow(
                {"oft_R.weight": "orthogonal.Q"},
                "w = orthogonal(w, block={block}{neumann})",
                config=lambda args: _oft_config(args["orthogonal"]),
                linear_alone=True,
            ),
        ),
        _oft,
        ("module_dropout", "eps"),
    ),
    "LORA": PeftType(
        _LORA_ROWS,
        _lora,
        ("qalora_group_size", "loftq_config", "eva_config", "lora_ga_config"),
        {"use_dora": "lora_magnitude_vector", "lora_bias": "lora_B.bias"},
    ),
}
