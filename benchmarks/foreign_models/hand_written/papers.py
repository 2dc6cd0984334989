"""What papers change: two softmaxes, none, no norms, scaled residuals, skips, masked patches."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import Roles, attention, ffn, packed, sequence


def four(at: str, norm: str = "") -> Roles:
    return attention(norm=norm, **{role: f"{at}.{role}_proj" for role in "qkv"}, o=f"{at}.out_proj")


class Stacked(nn.Module):
    """Layers, one after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# Differential transformer: two maps of attention, the second taken from the first; a norm of heads.
class DiffAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scaling = 2, 4, 4**-0.5
        self.q_proj, self.k_proj = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.v_proj, self.out_proj = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.lambda_q1, self.lambda_k1 = nn.Parameter(torch.randn(4) * 0.1), nn.Parameter(torch.randn(4) * 0.1)
        self.lambda_q2, self.lambda_k2 = nn.Parameter(torch.randn(4) * 0.1), nn.Parameter(torch.randn(4) * 0.1)
        self.lambda_init = 0.2
        self.subln = nn.RMSNorm(8, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        bsz, n, d = x.size()
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q = q.view(bsz, n, 2 * self.num_heads, self.head_dim).transpose(1, 2)
        k = k.view(bsz, n, 2 * self.num_heads, self.head_dim).transpose(1, 2)
        v = v.view(bsz, n, self.num_heads, 2 * self.head_dim).transpose(1, 2)
        attn_weights = torch.matmul(q * self.scaling, k.transpose(-1, -2))
        mask = torch.triu(torch.zeros([n, n]).float().fill_(float("-inf")).type_as(attn_weights), 1)
        attn_weights = F.softmax(torch.nan_to_num(attn_weights) + mask, dim=-1, dtype=attn_weights.dtype)
        lambda_1 = torch.exp(torch.sum(self.lambda_q1 * self.lambda_k1, dim=-1)).type_as(q)
        lambda_2 = torch.exp(torch.sum(self.lambda_q2 * self.lambda_k2, dim=-1)).type_as(q)
        lambda_full = lambda_1 - lambda_2 + self.lambda_init
        attn_weights = attn_weights.view(bsz, self.num_heads, 2, n, n)
        attn_weights = attn_weights[:, :, 0] - lambda_full * attn_weights[:, :, 1]
        attn = self.subln(torch.matmul(attn_weights, v)) * (1 - self.lambda_init)
        return self.out_proj(attn.transpose(1, 2).reshape(bsz, n, d))


class DiffLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm1, self.norm2 = DiffAttention(), nn.RMSNorm(16), nn.RMSNorm(16)
        self.w12, self.w3 = nn.Linear(16, 48), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        gate, up = self.w12(self.norm2(x)).chunk(2, dim=-1)
        return x + self.w3(F.silu(gate) * up)


DIFF = four("layers.{i}.attn", ("layers.{i}.norm1", "layers.{i}.attn.subln")) | ffn(
    "layers.{i}.w12[24:48]", "layers.{i}.w3", "layers.{i}.norm2", "layers.{i}.w12[0:24]"
)


# Linear attention: elu(q) + 1, elu(k) + 1, and a cumulative sum of their products for causality.
class LinearAttentionLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(16, 16) for _ in range(4))
        self.ff1, self.ff2, self.norm1, self.norm2 = (
            nn.Linear(16, 32),
            nn.Linear(32, 16),
            nn.LayerNorm(16),
            nn.LayerNorm(16),
        )

    def mixed(self, x: Tensor) -> Tensor:
        N, L, _ = x.shape
        Q = F.elu(self.q_proj(x).view(N, L, 2, -1)) + 1
        K = F.elu(self.k_proj(x).view(N, L, 2, -1)) + 1
        V = self.v_proj(x).view(N, L, 2, -1)
        KV = torch.einsum("nshd,nshm->nshmd", K, V).cumsum(1)
        Z = 1 / (torch.einsum("nlhd,nlhd->nlh", Q, K.cumsum(1)) + 1e-6)
        out = torch.einsum("nlhd,nlhmd,nlh->nlhm", Q, KV, Z)
        return self.out_proj(out.contiguous().view(N, L, -1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.mixed(x))
        return self.norm2(x + self.ff2(F.relu(self.ff1(x))))


LINEAR = four("layers.{i}", "layers.{i}.norm1") | ffn("layers.{i}.ff1", "layers.{i}.ff2", "layers.{i}.norm2")


# softmax1 ("attention is off by one"), weights of the residual that are learned (ReZero), no norms.
def softmax_one(x: Tensor) -> Tensor:
    x = x - x.max(dim=-1, keepdim=True).values.clamp(min=0)
    exp_x = torch.exp(x)
    return exp_x / (1 + exp_x.sum(dim=-1, keepdim=True))


class ReZeroLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(16, 16) for _ in range(4))
        self.linear1, self.linear2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.resweight = nn.Parameter(torch.full((1,), 0.1))

    def attend(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = (f(x).view(b, n, 2, d // 2).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        y = softmax_one(q @ k.mT / math.sqrt(d // 2)) @ v
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def forward(self, src: Tensor) -> Tensor:
        src2 = self.attend(src)
        src2 = src2 * self.resweight
        src = src + src2
        src2 = self.linear2(F.relu(self.linear1(src)))
        src2 = src2 * self.resweight
        return src + src2


REZERO = Stack(
    (0, 1),
    four("layers.{i}") | ffn("layers.{i}.linear1", "layers.{i}.linear2"),
    {"attn.h": None, "ffn.h": None},
)


# DeepNorm: the stream is scaled before the sum, which a norm takes; GeGLU with two Linears.
class DeepNormLayer(nn.Module):
    def __init__(self, alpha: float = 1.5) -> None:
        super().__init__()
        self.alpha, self.attn = alpha, nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.wi_0, self.wi_1, self.wo = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.alpha * x + self.attn(x, x, x, need_weights=False)[0])
        return self.norm2(torch.add(self.wo(F.gelu(self.wi_0(x)) * self.wi_1(x)), x, alpha=self.alpha))


DEEP_NORM = packed("layers.{i}.attn.in_proj_weight!", 16, o="layers.{i}.attn.out_proj", norm="layers.{i}.norm1") | ffn(
    "layers.{i}.wi_1", "layers.{i}.wo", "layers.{i}.norm2", "layers.{i}.wi_0"
)


# U-ViT: the second half of the layers reads, beside its input, what the first half gave.
class UViTBlock(nn.Module):
    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.proj = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)
        self.skip_linear = nn.Linear(32, 16) if skip else None

    def attn(self, x: Tensor) -> Tensor:
        B, L, C = x.shape
        qkv = self.qkv(x).view(B, L, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.permute(0, 2, 1, 3).reshape(B, L, C))

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class UViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_blocks = nn.ModuleList([UViTBlock(skip=False) for _ in range(2)])
        self.mid_block = UViTBlock(skip=False)
        self.out_blocks = nn.ModuleList([UViTBlock(skip=True) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for blk in self.in_blocks:
            x = blk(x)
            skips.append(x)
        x = self.mid_block(x)
        for blk in self.out_blocks:
            x = blk(x, skips.pop())
        return x


U_VIT = Stack(
    ("in_blocks.0", "in_blocks.1", "mid_block", "out_blocks.0", "out_blocks.1"),
    packed("{i}.qkv", 16, o="{i}.proj", norm="{i}.norm1") | ffn("{i}.fc1", "{i}.fc2", "{i}.norm2"),
)


# MAE: an encoder over the patches that are kept, a decoder over all; indices from sorted noise.
class MaskedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([UViTBlock(skip=False) for _ in range(2)])
        self.norm, self.decoder_embed = nn.LayerNorm(16), nn.Linear(16, 16)
        self.mask_token = nn.Parameter(torch.randn(1, 1, 16))
        self.decoder_blocks = nn.ModuleList([UViTBlock(skip=False) for _ in range(1)])
        self.decoder_pred = nn.Linear(16, 12)

    def forward(self, imgs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        N, L, D = imgs.shape
        len_keep = int(L * 0.5)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :len_keep]
        x = torch.gather(imgs, dim=1, index=ids_keep.unsqueeze(-1).repeat(1, 1, D))
        for blk in self.blocks:
            x = blk(x)
        x = self.decoder_embed(self.norm(x))
        mask_tokens = self.mask_token.repeat(N, L - len_keep, 1)
        x = torch.cat([x, mask_tokens], dim=1)
        x = torch.gather(x, dim=1, index=ids_restore.unsqueeze(-1).repeat(1, 1, D))
        for blk in self.decoder_blocks:
            x = blk(x)
        return self.decoder_pred(x), ids_restore


def mae(at: str) -> Roles:
    return packed(f"{at}.{{i}}.qkv", 16, o=f"{at}.{{i}}.proj", norm=f"{at}.{{i}}.norm1") | ffn(
        f"{at}.{{i}}.fc1", f"{at}.{{i}}.fc2", f"{at}.{{i}}.norm2"
    )


CASES = (
    Case(
        "hand-written/diff_transformer",
        "hand-written",
        lambda: Stacked([DiffLayer() for _ in range(2)]),
        sequence(),
        (Stack((0, 1), DIFF),),
    ),
    Case(
        "hand-written/linear_attention",
        "hand-written",
        lambda: Stacked([LinearAttentionLayer() for _ in range(2)]),
        sequence(),
        (Stack((0, 1), LINEAR),),
    ),
    Case(
        "hand-written/rezero",
        "hand-written",
        lambda: Stacked([ReZeroLayer() for _ in range(2)]),
        sequence(),
        (REZERO,),
    ),
    Case(
        "hand-written/deep_norm",
        "hand-written",
        lambda: Stacked([DeepNormLayer() for _ in range(2)]),
        sequence(),
        (Stack((0, 1), DEEP_NORM),),
    ),
    Case("hand-written/u_vit", "hand-written", UViT, sequence(), (U_VIT,)),
    Case(
        "hand-written/mae",
        "hand-written",
        MaskedAutoencoder,
        lambda: {"imgs": torch.randn(2, 8, 16), "noise": torch.rand(2, 8)},
        (Stack((0, 1), mae("blocks")), Stack((0,), mae("decoder_blocks"))),
    ),
)
