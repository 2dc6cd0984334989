"""The layers of each architecture, hand-written, with a call that edits each sub-layer's h just
before the residual sum.

Each forward below is the one of the modeling file with its calls inlined: `apply_edits(self, slot,
h, x, res, norm)` returns the edited h. Without edits every one reproduces the original bit for bit,
in training too (`test_layers.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers.models.bart import modeling_bart as bart
from transformers.models.bert import modeling_bert as bert
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.llama import modeling_llama as llama
from transformers.models.mbart import modeling_mbart as mbart
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.opt import modeling_opt as opt
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.roberta import modeling_roberta as roberta
from transformers.models.t5 import modeling_t5 as t5


@dataclass(frozen=True)
class At:
    """What an equation can read at a sub-layer: all (batch, tokens, d); `norm` is the frozen norm
    that belongs to it.
    """

    h: Tensor
    x: Tensor
    res: Tensor
    norm: Callable[[Tensor], Tensor]


Edit = Callable[[At], Tensor]


def apply_edits(
    module: nn.Module, slot: str, h: Tensor, x: Tensor, res: Tensor, norm: Callable[[Tensor], Tensor]
) -> Tensor:
    for edit in module.__dict__.get("edits", {}).get(slot, ()):
        h = edit(At(h, x, res, norm))
    return h


def open_up(module: nn.Module) -> None:
    """Gives a layer its hand-written class (once)."""
    if not hasattr(type(module), "is_opened"):
        module.__class__ = next(new for old, new in OPENED.items() if type(module) is old)
        module.__dict__["edits"] = {}


class Opened:
    is_opened = True


# Post-norm encoder-decoder: out = norm(res + h), x = res
# ---------------------------------------------------------------


class BartEncoderLayer(Opened, bart.BartEncoderLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        u = hidden_states
        h, _ = self.self_attn(u, attention_mask=attention_mask, **kwargs)
        h = dropout(h, self.dropout, self.training)
        u = self.self_attn_layer_norm(u + apply_edits(self, "self", h, u, u, self.self_attn_layer_norm))
        h = dropout(self.activation_fn(self.fc1(u)), self.activation_dropout, self.training)
        h = dropout(self.fc2(h), self.dropout, self.training)
        return self.final_layer_norm(u + apply_edits(self, "ffn", h, u, u, self.final_layer_norm))


class BartDecoderLayer(Opened, bart.BartDecoderLayer):
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = True,
        **kwargs: Any,
    ) -> Tensor:
        u = hidden_states
        h, _ = self.self_attn(u, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs)
        h = dropout(h, self.dropout, self.training)
        u = self.self_attn_layer_norm(u + apply_edits(self, "self", h, u, u, self.self_attn_layer_norm))
        h, _ = self.encoder_attn(
            u,
            key_value_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        h = dropout(h, self.dropout, self.training)
        u = self.encoder_attn_layer_norm(u + apply_edits(self, "cross", h, u, u, self.encoder_attn_layer_norm))
        h = dropout(self.activation_fn(self.fc1(u)), self.activation_dropout, self.training)
        h = dropout(self.fc2(h), self.dropout, self.training)
        return self.final_layer_norm(u + apply_edits(self, "ffn", h, u, u, self.final_layer_norm))


# Pre-norm encoder-decoder: x = norm(res), out = res + h
# ----------------------------------------------------------------


class MBartEncoderLayer(Opened, mbart.MBartEncoderLayer):
    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Tensor:
        u = hidden_states
        x = self.self_attn_layer_norm(u)
        h, _ = self.self_attn(hidden_states=x, attention_mask=attention_mask, **kwargs)
        h = dropout(h, self.dropout, self.training)
        u = u + apply_edits(self, "self", h, x, u, self.self_attn_layer_norm)
        x = self.final_layer_norm(u)
        h = dropout(self.activation_fn(self.fc1(x)), self.activation_dropout, self.training)
        h = dropout(self.fc2(h), self.dropout, self.training)
        return u + apply_edits(self, "ffn", h, x, u, self.final_layer_norm)


class MBartDecoderLayer(Opened, mbart.MBartDecoderLayer):
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = True,
        **kwargs: Any,
    ) -> Tensor:
        u = hidden_states
        x = self.self_attn_layer_norm(u)
        h, _ = self.self_attn(hidden_states=x, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs)
        h = dropout(h, self.dropout, self.training)
        u = u + apply_edits(self, "self", h, x, u, self.self_attn_layer_norm)
        x = self.encoder_attn_layer_norm(u)
        h, _ = self.encoder_attn(
            hidden_states=x,
            key_value_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            **kwargs,
        )
        h = dropout(h, self.dropout, self.training)
        u = u + apply_edits(self, "cross", h, x, u, self.encoder_attn_layer_norm)
        x = self.final_layer_norm(u)
        h = dropout(self.activation_fn(self.fc1(x)), self.activation_dropout, self.training)
        h = dropout(self.fc2(h), self.dropout, self.training)
        return u + apply_edits(self, "ffn", h, x, u, self.final_layer_norm)


# BERT: the sum and the norm live in the two "output" modules, x = res
# ---------------------------------------------------


class _BertSum(Opened):
    slot: str

    def forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        h = self.dropout(self.dense(hidden_states))
        h = apply_edits(self, self.slot, h, input_tensor, input_tensor, self.LayerNorm)
        return self.LayerNorm(h + input_tensor)


class BertSelfOutput(_BertSum, bert.BertSelfOutput):
    slot = "self"


class BertOutput(_BertSum, bert.BertOutput):
    slot = "ffn"


class RobertaSelfOutput(_BertSum, roberta.RobertaSelfOutput):
    slot = "self"


class RobertaOutput(_BertSum, roberta.RobertaOutput):
    slot = "ffn"


# T5: a module for each sub-layer, pre-norm
# -----------------------------------------------------------------------------


class T5LayerSelfAttention(Opened, t5.T5LayerSelfAttention):
    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = self.layer_norm(hidden_states)
        h, bias, weights = self.SelfAttention(
            x, mask=attention_mask, position_bias=position_bias, past_key_values=past_key_values, **kwargs
        )
        h = apply_edits(self, "self", self.dropout(h), x, hidden_states, self.layer_norm)
        return hidden_states + h, bias, weights


class T5LayerCrossAttention(Opened, t5.T5LayerCrossAttention):
    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x = self.layer_norm(hidden_states)
        h, bias, weights = self.EncDecAttention(
            x,
            mask=attention_mask,
            key_value_states=key_value_states,
            position_bias=position_bias,
            past_key_values=past_key_values,
            **kwargs,
        )
        h = apply_edits(self, "cross", self.dropout(h), x, hidden_states, self.layer_norm)
        return hidden_states + h, bias, weights


class T5LayerFF(Opened, t5.T5LayerFF):
    def forward(self, hidden_states: Tensor) -> Tensor:
        x = self.layer_norm(hidden_states)
        h = self.dropout(self.DenseReluDense(x))
        return hidden_states + apply_edits(self, "ffn", h, x, hidden_states, self.layer_norm)


# Decoders, pre-norm
# --------------------------------------------------------------------------------------------------


class GPT2Block(Opened, gpt2.GPT2Block):
    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        use_cache: bool | None = False,
        **kwargs: Any,
    ) -> Tensor:
        u = hidden_states
        x = self.ln_1(u)
        h, _ = self.attn(
            x, past_key_values=past_key_values, attention_mask=attention_mask, use_cache=use_cache, **kwargs
        )
        u = apply_edits(self, "self", h, x, u, self.ln_1) + u
        x = self.ln_2(u)
        return u + apply_edits(self, "ffn", self.mlp(x), x, u, self.ln_2)


def _llama_like(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    use_cache: bool | None = False,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Tensor:
    u = hidden_states
    x = self.input_layernorm(u)
    h, _ = self.self_attn(
        hidden_states=x,
        attention_mask=attention_mask,
        position_ids=position_ids,
        past_key_values=past_key_values,
        use_cache=use_cache,
        position_embeddings=position_embeddings,
        **kwargs,
    )
    u = u + apply_edits(self, "self", h, x, u, self.input_layernorm)
    x = self.post_attention_layernorm(u)
    return u + apply_edits(self, "ffn", self.mlp(x), x, u, self.post_attention_layernorm)


class LlamaDecoderLayer(Opened, llama.LlamaDecoderLayer):
    forward = _llama_like


class Qwen2DecoderLayer(Opened, qwen2.Qwen2DecoderLayer):
    forward = _llama_like


class Qwen3DecoderLayer(Opened, qwen3.Qwen3DecoderLayer):
    forward = _llama_like


class MistralDecoderLayer(Opened, mistral.MistralDecoderLayer):
    forward = _llama_like


class OPTDecoderLayer(Opened, opt.OPTDecoderLayer):
    """Pre-norm, or post-norm (the 350m) where not `do_layer_norm_before`.

    Its ffn runs on (batch · tokens, d); the equations are on (batch, tokens, d).
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        pre = self.do_layer_norm_before
        u = hidden_states
        x = self.self_attn_layer_norm(u) if pre else u
        h, _ = self.self_attn(
            hidden_states=x,
            past_key_values=past_key_values,
            position_ids=position_ids,
            attention_mask=attention_mask,
            **kwargs,
        )
        h = dropout(h, self.dropout, self.training)
        u = u + apply_edits(self, "self", h, x, u, self.self_attn_layer_norm)
        u = u if pre else self.self_attn_layer_norm(u)
        flat = u.reshape(-1, u.size(-1))
        flat = self.final_layer_norm(flat) if pre else flat
        h = dropout(self.fc2(self.activation_fn(self.fc1(flat))), self.dropout, self.training)
        h, x = h.view(u.shape), flat.view(u.shape)
        u = u + apply_edits(self, "ffn", h, x, u, self.final_layer_norm)
        return u if pre else self.final_layer_norm(u)


OPENED: dict[type[nn.Module], type[nn.Module]] = {
    bart.BartEncoderLayer: BartEncoderLayer,
    bart.BartDecoderLayer: BartDecoderLayer,
    mbart.MBartEncoderLayer: MBartEncoderLayer,
    mbart.MBartDecoderLayer: MBartDecoderLayer,
    bert.BertSelfOutput: BertSelfOutput,
    bert.BertOutput: BertOutput,
    roberta.RobertaSelfOutput: RobertaSelfOutput,
    roberta.RobertaOutput: RobertaOutput,
    t5.T5LayerSelfAttention: T5LayerSelfAttention,
    t5.T5LayerCrossAttention: T5LayerCrossAttention,
    t5.T5LayerFF: T5LayerFF,
    gpt2.GPT2Block: GPT2Block,
    llama.LlamaDecoderLayer: LlamaDecoderLayer,
    qwen2.Qwen2DecoderLayer: Qwen2DecoderLayer,
    qwen3.Qwen3DecoderLayer: Qwen3DecoderLayer,
    mistral.MistralDecoderLayer: MistralDecoderLayer,
    opt.OPTDecoderLayer: OPTDecoderLayer,
}
