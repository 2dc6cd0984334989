"""What generated forwards call: all that they import from peftc."""

from peftc.runtime.attention import attention_with_rows, extend_mask, rows_like_operand, scores_like, sdpa_with_rows
from peftc.runtime.guards import PASSTHROUGH, recheck_guard, respecialize, untraced
from peftc.runtime.layouts import (
    as_before,
    features_last,
    image_patches,
    image_to_tokens,
    replace_part,
    tokens_to_image,
    unflatten_tokens,
)
from peftc.runtime.parameters import (
    ModuleView,
    as_matrix,
    as_stored,
    full_precision,
    rows_of,
    stacked_slice,
    stored_as,
    with_rows,
    with_stacked_slices,
)
from peftc.runtime.positions import forward_with_positions
from peftc.runtime.prompts import batch_like, forward_with_prompt
from peftc.tracing.operations import attention, autograd_function, model_function, script_function

__all__ = [
    "PASSTHROUGH",
    "ModuleView",
    "as_before",
    "as_matrix",
    "as_stored",
    "attention",
    "attention_with_rows",
    "autograd_function",
    "batch_like",
    "extend_mask",
    "features_last",
    "forward_with_positions",
    "forward_with_prompt",
    "full_precision",
    "image_patches",
    "image_to_tokens",
    "model_function",
    "recheck_guard",
    "replace_part",
    "respecialize",
    "rows_like_operand",
    "rows_of",
    "scores_like",
    "script_function",
    "sdpa_with_rows",
    "stacked_slice",
    "stored_as",
    "tokens_to_image",
    "unflatten_tokens",
    "untraced",
    "with_rows",
    "with_stacked_slices",
]
