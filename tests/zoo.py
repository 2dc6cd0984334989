"""Tiny seeded models of every architecture under test, with every parameter away from its default.

A bias that is zero or a norm that is one would hide mistakes, so all parameters are drawn again:
matrices with a gain near one, biases ~ 0.1·N, norm weights ~ 1 + 0.1·N. No hub, no tokenizer; the
same call gives the same bits.

    model = zoo.build("bart", torch.float64)
    out = model(**zoo.inputs("bart", model, padding="left"))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import nn

VOCAB, PAD, BOS, EOS = 61, 1, 0, 2
Padding = Literal["left", "right"]


@dataclass(frozen=True)
class Species:
    """A model class with the smallest config that has every part of its architecture."""

    model: str
    config: str
    values: Mapping[str, Any]
    dropout: tuple[str, ...]  # config fields that `dropout=` sets
    labels: Literal["tokens", "class"] | None = "tokens"
    input: Literal["ids", "pixels"] = "ids"


_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": EOS,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}
_BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}
_T5 = {
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "num_heads": 4,
    "num_layers": 3,  # transformers' generate() sizes the decoder's cache by the encoder's depth
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "decoder_start_token_id": BOS,
}
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 48, "n_positions": 64}
_LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_OPT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 64,
}
_MIXTRAL = {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 5,
}
_BART_DROPOUT = ("dropout", "attention_dropout", "activation_dropout")
_BERT_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")

SPECIES: dict[str, Species] = {
    "bart": Species("BartForConditionalGeneration", "BartConfig", _BART, _BART_DROPOUT),
    "mbart": Species("MBartForConditionalGeneration", "MBartConfig", _BART, _BART_DROPOUT),
    "bert": Species("BertForMaskedLM", "BertConfig", _BERT, _BERT_DROPOUT),
    "bert-base": Species("BertModel", "BertConfig", _BERT, _BERT_DROPOUT, labels=None),
    "bert-classifier": Species("BertForSequenceClassification", "BertConfig", _BERT, _BERT_DROPOUT, labels="class"),
    "roberta": Species("RobertaForMaskedLM", "RobertaConfig", _BERT, _BERT_DROPOUT),
    "t5": Species("T5ForConditionalGeneration", "T5Config", _T5, ("dropout_rate",)),
    "t5-gated": Species(
        "T5ForConditionalGeneration", "T5Config", {**_T5, "feed_forward_proj": "gated-gelu"}, ("dropout_rate",)
    ),
    "gpt2": Species("GPT2LMHeadModel", "GPT2Config", _GPT2, ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "llama": Species("LlamaForCausalLM", "LlamaConfig", _LLAMA, ("attention_dropout",)),
    "qwen2": Species("Qwen2ForCausalLM", "Qwen2Config", _LLAMA, ("attention_dropout",)),
    "qwen3": Species("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 12}, ("attention_dropout",)),
    "mistral": Species(
        "MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": None}, ("attention_dropout",)
    ),
    "opt": Species("OPTForCausalLM", "OPTConfig", _OPT, ("dropout", "attention_dropout")),
    "mixtral": Species("MixtralForCausalLM", "MixtralConfig", _MIXTRAL, ("attention_dropout",)),
    "vit": Species("ViTForImageClassification", "ViTConfig", _VIT, _BERT_DROPOUT, labels="class", input="pixels"),
}

ARCHITECTURES = ("bart", "bert", "roberta", "t5", "gpt2", "llama", "qwen3", "opt")
FURTHER = ("mixtral", "vit")  # not in the laws over all edits: experts, and images
ALL = tuple(name for name in SPECIES if name not in FURTHER)
GENERATING = tuple(name for name in ALL if "bert" not in name)


def config(name: str, *, dropout: float = 0.0, **overrides: Any) -> transformers.PretrainedConfig:
    """The config of a species; `overrides` are its fields."""
    species = SPECIES[name]
    tokens = {"vocab_size": VOCAB, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    rates = dict.fromkeys(species.dropout, dropout)
    settings = getattr(transformers, species.config)(
        **{**(tokens if species.input == "ids" else {}), **species.values, **rates, **overrides}
    )
    settings.architectures = [species.model]
    return settings


def build(
    name: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, dropout: float = 0.0, **overrides: Any
) -> nn.Module:
    """A model in eval mode with random parameters.

    In float64, norms and routers that transformers computes in float32 whatever the input are
    computed in float64: otherwise a difference of 1e-16 comes out as 1e-8 and no law can be stated
    at 1e-10.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, SPECIES[name].model)(config(name, dropout=dropout, **overrides))
    model.to(dtype)
    randomise(model, generator)
    if dtype == torch.float64:
        _exact_norms(model)
        if hasattr(model.config, "num_local_experts"):
            model.set_experts_implementation("batched_mm")  # the default multiplies no float64
    return model.eval()


@torch.no_grad()
def randomise(model: nn.Module, generator: torch.Generator) -> None:
    """Draws every parameter again (tied ones once): gain ~1 matrices, biases ~0.1·N, norm weights
    ~1 + 0.1·N.
    """
    done = set[nn.Parameter]()
    for owner, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower() or "layer_norm" in owner
        for key, parameter in module.named_parameters(recurse=False):
            if parameter in done:
                continue
            done.add(parameter)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim == 1:
                value = 0.1 * noise + (1.0 if norm and key == "weight" else 0.0)
            elif isinstance(module, nn.Embedding):
                value = 0.3 * noise
            else:
                value = noise * min(0.3, 1.2 * parameter.shape[-1] ** -0.5)
            parameter.copy_(value)


def inputs(
    name: str,
    model: nn.Module,
    batch: int = 2,
    tokens: int = 7,
    padding: Padding | None = None,
    labels: bool = False,
    *,
    decoder_tokens: int = 5,
    seed: int = 1,
) -> dict[str, torch.Tensor]:
    """Token ids (never a special one) and, with `padding`, a mask in which example i lacks i tokens
    on that side.

    Encoder-decoder models get `decoder_input_ids` too; drop it (and `labels`) for `generate`.
    Models of images get images, and neither mask nor tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    if SPECIES[name].input == "pixels":
        return _images(model, batch, labels, generator)

    def draw(length: int) -> torch.Tensor:
        return torch.randint(EOS + 1, VOCAB, (batch, length), generator=generator)

    tensors = {"input_ids": draw(tokens)}
    if padding:
        columns = torch.arange(tokens)
        missing = torch.arange(batch)[:, None]
        tensors["attention_mask"] = (columns >= missing if padding == "left" else columns < tokens - missing).long()
        tensors["input_ids"] = tensors["input_ids"].masked_fill(tensors["attention_mask"] == 0, PAD)
    encoder_decoder = getattr(model.config, "is_encoder_decoder", False)
    if encoder_decoder:
        tensors["decoder_input_ids"] = draw(decoder_tokens)
    if labels:
        tensors["labels"] = _labels(name, model, tensors, draw, decoder_tokens if encoder_decoder else tokens)
    return tensors


def _images(model: nn.Module, batch: int, labels: bool, generator: torch.Generator) -> dict[str, torch.Tensor]:
    config: Any = model.config
    shape = (batch, config.num_channels, config.image_size, config.image_size)
    images = {"pixel_values": torch.randn(shape, generator=generator, dtype=next(model.parameters()).dtype)}
    return images | ({"labels": torch.arange(batch) % config.num_labels} if labels else {})


def _labels(
    name: str,
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    draw: Callable[[int], torch.Tensor],
    length: int,
) -> torch.Tensor:
    kind = SPECIES[name].labels
    if kind is None:
        raise ValueError(f"{name} has no loss")
    if kind == "class":
        return inputs["input_ids"].sum(-1) % model.config.num_labels
    ids = draw(length)
    if "attention_mask" in inputs and length == inputs["attention_mask"].shape[1]:
        ids = ids.masked_fill(inputs["attention_mask"] == 0, -100)
    return ids


def _exact_norms(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon") and hasattr(module, "weight"):
            module.__class__ = _exact(type(module), _rms_norm)
        elif type(module).__name__.endswith("TopKRouter"):
            module.__class__ = _exact(type(module), _top_k_router)


def _exact(cls: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    """A subclass that keeps the dtype of the input; registered by name, so that it pickles."""
    name = cls.__name__
    if name not in globals():
        globals()[name] = type(name, (cls,), {"__module__": __name__, "forward": forward})
    return globals()[name]


def _rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))


def _top_k_router(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = nn.functional.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight)
    values, indices = torch.topk(logits.softmax(-1), self.top_k, dim=-1)
    return logits, values / values.sum(-1, keepdim=True), indices
