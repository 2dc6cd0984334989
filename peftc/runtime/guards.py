"""Guards of generated forwards, and calls that no variant was traced for."""

from collections.abc import Callable
from typing import Any

from torch import nn

from peftc.diagnostics import Diagnostic, PeftcError
from peftc.tracing.records import structure_of

SMALLER = "edit a smaller part of the layer, so that this code is not entered"
# Keywords that the stacks of transformers pass to every layer, and that most layers only forward.
PASSTHROUGH = frozenset(
    {
        *("use_cache", "cache_position", "position_ids", "output_attentions", "output_hidden_states", "return_dict"),
        *("output_router_logits", "num_items_in_batch", "logits_to_keep", "seq_idx"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    }
)


def recheck_guard(value: Any, kind: str, expected: Any) -> None:
    """Re-evaluates a guard where the model's code takes the branch. Raises: P408 for a change."""
    answers: dict[str, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float, "len": len, "keys": list}
    answers["structure"] = structure_of
    answers["ndim"] = lambda v: "None" if v is None else getattr(v, "ndim", None)
    answer = answers.get(kind, lambda v: v)(value)
    if not isinstance(value, expected) if kind == "type" else answer != expected:
        answer = structure_of(value) if kind in ("is", "type") else answer  # no data of a tensor
        change = f"expected {expected!r}, found {answer!r}"
        message = f"the model's code changed the outcome of a branch while the layer ran: {change}"
        raise PeftcError(Diagnostic("P408", message, help=SMALLER))


def untraced(reason: str) -> PeftcError:
    message = "this call takes a branch of the model's code that could not be traced with the values of an earlier call"
    return PeftcError(Diagnostic("P417", message, notes=(reason,), help=SMALLER))


def respecialize(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a call that no variant holds for: the generated class traces it and adds a variant."""
    cls: Any = type(module)
    return cls._peftc_kind.respecialize(module, *args, **kwargs)
