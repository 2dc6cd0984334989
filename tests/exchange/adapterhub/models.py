"""Small models that AdapterHub's library and peftc build alike, and what they are asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file

FOLDER = Path(__file__).parent / "recorded"
NAMES = "names.json"  # the configurations of the library by its names for them
COUNTS = "counts.json"  # how many parameters the library trains
_ENCODER: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 24,
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "pad_token_id": 1,
    "num_labels": 3,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_SMALL: dict[str, Any] = {"vocab_size": 24, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
# Not `sdpa`: the library reads its Boolean masks the other way, so that no token sees a prefix.
_EAGER: dict[str, Any] = {**_SMALL, "attn_implementation": "eager"}
_T5: dict[str, Any] = {**_SMALL, "d_ff": 24, "decoder_start_token_id": 1}
_QWEN: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
}
MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**_ENCODER)),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**_ENCODER)),
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=16,
            forced_eos_token_id=None,
            decoder_start_token_id=2,
            **_EAGER,
        )
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, n_inner=24, **_EAGER)
    ),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_QWEN, **_EAGER)),  # by an interface of the library
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(d_model=16, d_kv=8, num_layers=2, num_heads=2, **_T5)),
}


def inputs(name: str) -> dict[str, torch.Tensor]:
    """Two examples, one with padding on the right."""
    ids = torch.tensor([[4, 7, 11, 5, 19, 2], [9, 3, 8, 2, 1, 1]])
    own = {"input_ids": ids, "attention_mask": (ids != 1).long()}
    return own | ({"decoder_input_ids": torch.tensor([[2, 6, 13], [2, 21, 10]])} if name in ("bart", "t5") else {})


def base(name: str) -> Any:
    """The model with the recorded weights, in float64."""
    model = MODELS[name]().double().eval()
    model.load_state_dict(load_file(FOLDER / f"{name}.safetensors"), strict=False)
    model.tie_weights()
    return model


def output(name: str, model: Any) -> torch.Tensor:
    with torch.no_grad():
        return _forward(name, model)


def _forward(name: str, model: Any) -> torch.Tensor:
    result = model(**inputs(name))
    return result.last_hidden_state if "logits" not in result else result.logits


def gradients(name: str, model: Any, parameters: dict[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """Of a loss with another weight for each number of the output, by the names of parameters."""
    value = _forward(name, model)
    loss = (value * torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view(value.shape)).sum()
    names = [one for one, parameter in parameters.items() if parameter.requires_grad]
    values: Any = torch.autograd.grad(loss, [parameters[one] for one in names], allow_unused=True)
    return {one: torch.zeros_like(parameters[one]) if g is None else g for one, g in zip(names, values, strict=True)}
