"""Types of PEFT that put rows before the tokens of the input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from peftc.exchange.peft_format.config import PeftConfig, refusal
from peftc.exchange.peft_format.types import Numbers, PeftRow, PeftType, Tensors
from peftc.semantics.recipes import form_text

PROMPT = "prompt_embeddings"
_MULTITASK = form_text("multitask_prompt")
TASKS = {False: "CAUSAL_LM", True: "SEQ_2_SEQ_LM"}  # by whether a model has an encoder and a decoder
# PEFT takes them from the configuration of the base.
OF_BASE = ("token_dim", "num_attention_heads", "num_layers", "num_transformer_submodules")


def _prompt(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    task, rows = config.values.get("task_type"), config.whole("num_virtual_tokens", 0)
    if task not in TASKS.values():
        raise refusal("task_type", task, "PEFT reads the result at the place of a prompt's row, or cuts it")
    if tensors[PROMPT].shape[0] % rows:
        raise refusal("num_virtual_tokens", rows, f"there are {tensors[PROMPT].shape[0]} rows")
    return {"rows": rows}


def _multitask(config: PeftConfig, module: str, tensors: Tensors) -> Numbers:
    numbers = _prompt(config, module, tensors)
    if tensors[PROMPT].shape[0] != numbers["rows"]:
        raise refusal("num_transformer_submodules", 2, "PEFT puts rows before the tokens of the decoder, too")
    return {**numbers, "r": config.whole("num_ranks", 1), "tasks": config.whole("num_tasks", 1)}


def rows_of_encoder(config: PeftConfig, tensors: Tensors) -> dict[str, Tensor]:
    """For the decoder PEFT has as many rows again, and does not read them."""
    return {PROMPT: tensors[PROMPT][: config.whole("num_virtual_tokens", 0)]}


def prompt_config(rows: int, is_encoder_decoder: bool) -> dict[str, Any]:
    # One submodule: a second one would have rows that PEFT does not read
    keys = {"num_virtual_tokens": rows, "num_transformer_submodules": 1, "task_type": TASKS[is_encoder_decoder]}
    return {"peft_type": "PROMPT_TUNING", "prompt_tuning_init": "RANDOM", **keys}


def _type(*ignored: str, row: PeftRow) -> PeftType:
    return PeftType((row,), _prompt, (*OF_BASE, *ignored), place="input.embed", chosen=rows_of_encoder)


_ROW = {PROMPT: "prompt.tokens"}
_EQUATION = "h = concat(prompt(len={rows}), h)"
_INIT = ("prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs")
_ENCODER = ("reparameterization_type", "hidden_size", "num_layers", "dropout")

TYPES: Mapping[str, PeftType] = {
    "PROMPT_TUNING": _type(*_INIT, row=PeftRow(_ROW, _EQUATION, config=lambda args: {})),
    "P_TUNING": _type(*(f"encoder_{key}" for key in _ENCODER), row=PeftRow(_ROW, _EQUATION)),
    "MULTITASK_PROMPT_TUNING": PeftType(
        (
            PeftRow(
                {
                    PROMPT: "multitask_prompt.tokens",
                    "prefix_task_cols": "multitask_prompt.columns",
                    "prefix_task_rows": "multitask_prompt.rows",
                },
                "h = concat(multitask_prompt(len={rows}, r={r}), h)",
                _MULTITASK,
                by_task=("multitask_prompt.columns", "multitask_prompt.rows"),
            ),
        ),
        _multitask,
        (*OF_BASE, *_INIT, "prompt_tuning_init_state_dict_path", "prompt_tuning_init_task"),
        place="input.embed",
        dimensions=3,
    ),
    "CPT": _type(
        *("cpt_token_ids", "cpt_mask", "cpt_tokens_type_mask", "cpt_prompt_init", "tokenizer_name_or_path"),
        *("opt_weighted_loss_type", "opt_loss_decay_factor", "opt_projection_epsilon"),
        *("opt_projection_format_epsilon", "tokenizer_kwargs"),
        row=PeftRow(_ROW, _EQUATION),
    ),
}
