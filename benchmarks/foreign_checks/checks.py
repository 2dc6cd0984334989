"""The checks of peftc on one foreign model: its roles, and edits compiled, compared with an
independent reference, folded, copied and removed.

    found = checked(case)
    found["verdict"]    # pass | refused | incomplete | error | wrong
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import peftc
from benchmarks.families.failures import reason_of
from benchmarks.foreign_checks.edits import TRIALS
from benchmarks.foreign_checks.modes import fresh, gap, inputs_of, run
from benchmarks.foreign_checks.roles import Comparison, compared, entries
from benchmarks.foreign_checks.trial import Base, tried
from benchmarks.foreign_models.case import Case

Answer = dict[str, Any]
WORST = ("wrong", "error", "incomplete", "refused", "pass")


def checked(case: Case, edits: str = "abcde", dynamo: bool = True) -> Answer:
    """The verdicts on a case, with their evidence. `built` and `ran` are of the model itself.

    Args: `edits`: the names of the trials. `dynamo`: whether torch.compile is among the checks.
    """
    result: Answer = {"built": False, "ran": False}
    try:
        dtype = _dtype(case, result)
        model, inputs = fresh(case, dtype), inputs_of(case, dtype)
        entries(case, model)
        result |= {"ran": True, "dtype": str(dtype).removeprefix("torch.")}
    except Exception as error:  # any exception of the model's own code, or of its table
        return result | {"why_not": reason_of(error), "missing": isinstance(error, ImportError)}
    try:
        table = peftc.sites(model, sample=inputs)
        comparison = compared(case, model, table)
    except peftc.PeftcError as error:
        return result | {"verdict": "refused", "roles": {"verdict": "refused", "reason": reason_of(error)}}
    except Exception as error:
        return result | {"verdict": "error", "roles": {"verdict": "error", "reason": reason_of(error)}}
    result["roles"] = _roles(comparison) | _opaque(model, table) | _without_q(table)
    base = Base(case, dtype, inputs, dynamo)
    result["edits"] = {name: tried(base, TRIALS[name], comparison) for name in edits}
    return result | {"verdict": _verdict(result)}


def _dtype(case: Case, result: Answer) -> torch.dtype:
    """float64, or float32 where the model's code cannot do with it."""
    torch.manual_seed(0)
    case.build()
    result["built"] = True
    try:
        _require_finite(case, torch.float64)
    except Exception:
        _require_finite(case, torch.float32)
        return torch.float32
    return torch.float64


def _require_finite(case: Case, dtype: torch.dtype) -> None:
    out = run(case, fresh(case, dtype), inputs_of(case, dtype), "eval")
    if not torch.isfinite(out).all():
        raise ValueError("the output is not finite")
    if gap(out, torch.zeros_like(out)) == 0.0:
        raise ValueError("the output is zero")


def _roles(comparison: Comparison) -> Answer:
    lines = {"missing": comparison.missing[:12], "wrong": comparison.wrong[:12]}
    return {"verdict": comparison.verdict, **{name: some for name, some in lines.items() if some}}


def _opaque(model: nn.Module, table: Any) -> Answer:
    """Modules with weights whose code could not be followed."""
    untraced = [(u, model.get_submodule(u.module)) for u in table.untraced]
    lines = [f"{u.module} ({u.type}): {u.reason}" for u, m in untraced if any(True for _ in m.parameters())]
    return {"opaque": lines[:6]} if lines else {}


def _without_q(table: Any) -> Answer:
    paths = {site.path for site in table.sites}
    attentions = [s.path for s in table.sites if "attn" in [name for name, _ in s.steps[-2:]] and _is_attention(s)]
    lines = [path for path in attentions if not any(p.startswith((f"{path}.q", f"{path}.heads")) for p in paths)]
    return {"without_q": lines[:6]} if lines else {}


def _is_attention(site: Any) -> bool:
    return site.steps[-1][0] in ("attn", "self", "cross") and "res" in site.states


def _verdict(result: Answer) -> str:
    roles = result["roles"]
    verdicts = {e["verdict"] for e in result["edits"].values() if e["counts"]}
    verdicts.add({"exact": "pass", "missing": "incomplete", "wrong": "wrong"}[roles["verdict"]])
    if roles.get("opaque") or roles.get("without_q"):
        verdicts.add("incomplete")
    return next(verdict for verdict in WORST if verdict in verdicts)
