"""Decision Transformer: matrices stored (in, out)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.foreign_models.case import Stack
from benchmarks.foreign_models.tables import hand_written


# decision-transformer: trajectory_gpt2.py
class Conv1D(nn.Module):
    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        w = torch.empty(nx, nf)
        nn.init.normal_(w, std=0.2)
        self.weight = nn.Parameter(w)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        size_out = x.size()[:-1] + (self.nf,)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        x = x.view(*size_out)
        return x


class DTAttention(nn.Module):
    def __init__(self, nx=16, n_ctx=32, n_head=2, scale=True):
        super().__init__()
        n_state = nx
        assert n_state % n_head == 0
        self.register_buffer("bias", torch.tril(torch.ones((n_ctx, n_ctx), dtype=torch.uint8)).view(1, 1, n_ctx, n_ctx))
        self.register_buffer("masked_bias", torch.tensor(-1e4))
        self.n_head = n_head
        self.split_size = n_state
        self.scale = scale
        self.c_attn = Conv1D(3 * n_state, nx)
        self.c_proj = Conv1D(n_state, nx)
        self.attn_dropout = nn.Dropout(0.1)
        self.resid_dropout = nn.Dropout(0.1)

    def _attn(self, q, k, v, attention_mask=None, head_mask=None, output_attentions=False):
        w = torch.matmul(q, k)
        if self.scale:
            w = w / (float(v.size(-1)) ** 0.5)
        nd, ns = w.size(-2), w.size(-1)
        mask = self.bias[:, :, ns - nd : ns, :ns].bool()
        w = torch.where(mask, w, self.masked_bias.to(w.dtype))
        if attention_mask is not None:
            w = w + attention_mask
        w = nn.Softmax(dim=-1)(w)
        w = self.attn_dropout(w)
        if head_mask is not None:
            w = w * head_mask
        outputs = [torch.matmul(w, v)]
        if output_attentions:
            outputs.append(w)
        return outputs

    def merge_heads(self, x):
        x = x.permute(0, 2, 1, 3).contiguous()
        new_x_shape = x.size()[:-2] + (x.size(-2) * x.size(-1),)
        return x.view(*new_x_shape)

    def split_heads(self, x, k=False):
        new_x_shape = x.size()[:-1] + (self.n_head, x.size(-1) // self.n_head)
        x = x.view(*new_x_shape)
        if k:
            return x.permute(0, 2, 3, 1)
        else:
            return x.permute(0, 2, 1, 3)

    def forward(
        self,
        hidden_states,
        layer_past=None,
        attention_mask=None,
        head_mask=None,
        use_cache=False,
        output_attentions=False,
    ):
        query, key, value = self.c_attn(hidden_states).split(self.split_size, dim=2)
        query = self.split_heads(query)
        key = self.split_heads(key, k=True)
        value = self.split_heads(value)
        if layer_past is not None:
            past_key, past_value = layer_past[0].transpose(-2, -1), layer_past[1]
            key = torch.cat((past_key, key), dim=-1)
            value = torch.cat((past_value, value), dim=-2)
        if use_cache is True:
            present = torch.stack((key.transpose(-2, -1), value))
        else:
            present = (None,)
        attn_outputs = self._attn(query, key, value, attention_mask, head_mask, output_attentions)
        a = attn_outputs[0]
        a = self.merge_heads(a)
        a = self.c_proj(a)
        a = self.resid_dropout(a)
        outputs = [a, present] + attn_outputs[1:]
        return outputs


class DTMLP(nn.Module):
    def __init__(self, n_state, nx=16):
        super().__init__()
        self.c_fc = Conv1D(n_state, nx)
        self.c_proj = Conv1D(nx, n_state)
        self.act = F.relu
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        h = self.act(self.c_fc(x))
        h2 = self.c_proj(h)
        return self.dropout(h2)


class DTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(16)
        self.attn = DTAttention()
        self.ln_2 = nn.LayerNorm(16)
        self.mlp = DTMLP(64)

    def forward(
        self,
        hidden_states,
        layer_past=None,
        attention_mask=None,
        head_mask=None,
        use_cache=False,
        output_attentions=False,
    ):
        attn_outputs = self.attn(
            self.ln_1(hidden_states),
            layer_past=layer_past,
            attention_mask=attention_mask,
            head_mask=head_mask,
            use_cache=use_cache,
            output_attentions=output_attentions,
        )
        attn_output = attn_outputs[0]
        outputs = attn_outputs[1:]
        hidden_states = attn_output + hidden_states
        feed_forward_hidden_states = self.mlp(self.ln_2(hidden_states))
        hidden_states = hidden_states + feed_forward_hidden_states
        outputs = [hidden_states] + outputs
        return outputs


class DecisionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden_size = 16
        self.h = nn.ModuleList([DTBlock() for _ in range(2)])
        self.ln_f = nn.LayerNorm(16)
        self.embed_timestep = nn.Embedding(32, 16)
        self.embed_return = nn.Linear(1, 16)
        self.embed_state = nn.Linear(5, 16)
        self.embed_action = nn.Linear(3, 16)
        self.embed_ln = nn.LayerNorm(16)
        self.predict_action = nn.Sequential(*([nn.Linear(16, 3)] + [nn.Tanh()]))

    def forward(self, states, actions, returns_to_go, timesteps, attention_mask=None):
        batch_size, seq_length = states.shape[0], states.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones((batch_size, seq_length), dtype=torch.long)
        time_embeddings = self.embed_timestep(timesteps)
        state_embeddings = self.embed_state(states) + time_embeddings
        action_embeddings = self.embed_action(actions) + time_embeddings
        returns_embeddings = self.embed_return(returns_to_go) + time_embeddings
        stacked_inputs = (
            torch.stack((returns_embeddings, state_embeddings, action_embeddings), dim=1)
            .permute(0, 2, 1, 3)
            .reshape(batch_size, 3 * seq_length, self.hidden_size)
        )
        stacked_inputs = self.embed_ln(stacked_inputs)
        stacked_attention_mask = (
            torch.stack((attention_mask, attention_mask, attention_mask), dim=1)
            .permute(0, 2, 1)
            .reshape(batch_size, 3 * seq_length)
        )
        mask = stacked_attention_mask[:, None, None, :].to(stacked_inputs.dtype)
        mask = (1.0 - mask) * -10000.0
        x = stacked_inputs
        presents = ()
        for i, (block, layer_past) in enumerate(zip(self.h, [None] * len(self.h))):
            outputs = block(x, layer_past=layer_past, attention_mask=mask, use_cache=True)
            x, present = outputs[:2]
            presents = presents + (present,)
        x = self.ln_f(x)
        x = x.reshape(batch_size, seq_length, 3, self.hidden_size).permute(0, 2, 1, 3)
        return self.predict_action(x[:, 1])


def trajectories():
    return {
        "states": torch.randn(2, 4, 5),
        "actions": torch.randn(2, 4, 3),
        "returns_to_go": torch.randn(2, 4, 1),
        "timesteps": torch.randint(0, 32, (2, 4)),
    }


DT = Stack(
    (0, 1),
    {
        "attn.q": "h.{i}.attn.c_attn.weight.T[0:16]",
        "attn.k": "h.{i}.attn.c_attn.weight.T[16:32]",
        "attn.v": "h.{i}.attn.c_attn.weight.T[32:48]",
        "attn.o": "h.{i}.attn.c_proj.weight.T",
        "attn.norm": "h.{i}.ln_1.weight",
        "ffn.up": "h.{i}.mlp.c_fc.weight.T",
        "ffn.down": "h.{i}.mlp.c_proj.weight.T",
        "ffn.norm": "h.{i}.ln_2.weight",
    },
)


CASES = (hand_written("decision_transformer", DecisionTransformer, trajectories, DT),)
