"""Joint streams of image and text, with gates, and single streams: SD3, Flux."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.foreign_models.case import Case, Stack


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def thirds(at: str, width: int = 16) -> dict[str, str]:
    return {f"attn.{r}": f"{at}.weight[{width * n}:{width * (n + 1)}]" for n, r in enumerate("qkv")}


class TimmMlp(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


# SD3: two streams with weights of their own attend to both, concatenated.
class QkvPart(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.ln_q = nn.RMSNorm(dim // heads)
        self.ln_k = nn.RMSNorm(dim // heads)

    def pre_attention(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return self.ln_q(q), self.ln_k(k), v


class DismantledBlock(nn.Module):
    def __init__(self, dim: int, heads: int = 2) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.attn = QkvPart(dim, heads)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.mlp = TimmMlp(dim, 32)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def pre_attention(self, x: Tensor, c: Tensor) -> Any:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        qkv = self.attn.pre_attention(modulate(self.norm1(x), shift_msa, scale_msa))
        return qkv, (x, gate_msa, shift_mlp, scale_mlp, gate_mlp)

    def post_attention(self, attn: Tensor, x: Tensor, gate_msa: Any, shift: Any, scale: Any, gate_mlp: Any) -> Tensor:
        x = x + gate_msa.unsqueeze(1) * self.attn.proj(attn)
        return x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift, scale))


class JointBlock(nn.Module):
    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.context_block = DismantledBlock(dim)
        self.x_block = DismantledBlock(dim)

    def forward(self, context: Tensor, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        context_qkv, context_rest = self.context_block.pre_attention(context, c)
        x_qkv, x_rest = self.x_block.pre_attention(x, c)
        q, k, v = (torch.cat(pair, dim=1) for pair in zip(context_qkv, x_qkv))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        attn = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        context_attn, x_attn = attn[:, : context.shape[1]], attn[:, context.shape[1] :]
        context = self.context_block.post_attention(context_attn, *context_rest)
        x = self.x_block.post_attention(x_attn, *x_rest)
        return context, x


class SD3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.joint_blocks = nn.ModuleList([JointBlock() for _ in range(2)])
        self.final = nn.Linear(16, 4)

    def forward(self, x: Tensor, context: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.joint_blocks:
            context, x = block(context, x, c=c)
        return self.final(torch.cat((context, x), 1)), context


STREAMS = ("joint_blocks.{i}.context_block", "joint_blocks.{i}.x_block")


def both(tail: str) -> tuple[str, ...]:
    return tuple(f"{stream}.{tail}" for stream in STREAMS)


JOINT = Stack(
    (0, 1),
    {
        **{f"attn.{r}": both(f"attn.qkv.weight[{16 * n}:{16 * n + 16}]") for n, r in enumerate("qkv")},
        "attn.o": both("attn.proj.weight"),
        "attn.q.norm": both("attn.ln_q.weight"),
        "attn.k.norm": both("attn.ln_k.weight"),
        "ffn.up": both("mlp.fc1.weight"),
        "ffn.down": both("mlp.fc2.weight"),
    },
    {"attn.x": None, "attn.h": None, "ffn.h": None},
)


# Flux: double blocks, then single blocks, whose Linears hold attention and feed-forward in one.
class QKNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query_norm, self.key_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q).to(v), self.key_norm(k).to(v)


class SelfAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int = 2) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, dim * 3)
        self.norm = QKNorm(dim // num_heads)
        self.proj = nn.Linear(dim, dim)


class Modulation(nn.Module):
    def __init__(self, dim: int, double: bool) -> None:
        super().__init__()
        self.multiplier = 6 if double else 3
        self.lin = nn.Linear(dim, self.multiplier * dim)

    def forward(self, vec: Tensor) -> Any:
        out = self.lin(F.silu(vec))[:, None, :].chunk(self.multiplier, dim=-1)
        return out[:3], out[3:] if self.multiplier == 6 else None


def heads_of(qkv: Tensor, heads: int = 2) -> tuple[Tensor, ...]:
    b, n, _ = qkv.shape
    return qkv.view(b, n, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def attention(q: Tensor, k: Tensor, v: Tensor, pe: Tensor) -> Tensor:
    q, k = (t * pe.cos() + torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2) * pe.sin() for t in (q, k))
    x = F.scaled_dot_product_attention(q, k, v)
    return x.permute(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


class DoubleStreamBlock(nn.Module):
    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.img_mod, self.txt_mod = Modulation(hidden, double=True), Modulation(hidden, double=True)
        self.img_norm1, self.img_norm2 = (nn.LayerNorm(hidden, elementwise_affine=False) for _ in range(2))
        self.txt_norm1, self.txt_norm2 = (nn.LayerNorm(hidden, elementwise_affine=False) for _ in range(2))
        self.img_attn, self.txt_attn = SelfAttention(hidden), SelfAttention(hidden)
        self.img_mlp = nn.Sequential(nn.Linear(hidden, 32), nn.GELU(approximate="tanh"), nn.Linear(32, hidden))
        self.txt_mlp = nn.Sequential(nn.Linear(hidden, 32), nn.GELU(approximate="tanh"), nn.Linear(32, hidden))

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor) -> tuple[Tensor, Tensor]:
        (shift1, scale1, gate1), (shift2, scale2, gate2) = self.img_mod(vec)
        (t_shift1, t_scale1, t_gate1), (t_shift2, t_scale2, t_gate2) = self.txt_mod(vec)
        img_q, img_k, img_v = heads_of(self.img_attn.qkv((1 + scale1) * self.img_norm1(img) + shift1))
        img_q, img_k = self.img_attn.norm(img_q, img_k, img_v)
        txt_q, txt_k, txt_v = heads_of(self.txt_attn.qkv((1 + t_scale1) * self.txt_norm1(txt) + t_shift1))
        txt_q, txt_k = self.txt_attn.norm(txt_q, txt_k, txt_v)
        q = torch.cat((txt_q, img_q), dim=2)
        k = torch.cat((txt_k, img_k), dim=2)
        v = torch.cat((txt_v, img_v), dim=2)
        attn = attention(q, k, v, pe=pe)
        txt_attn, img_attn = attn[:, : txt.shape[1]], attn[:, txt.shape[1] :]
        img = img + gate1 * self.img_attn.proj(img_attn)
        img = img + gate2 * self.img_mlp((1 + scale2) * self.img_norm2(img) + shift2)
        txt = txt + t_gate1 * self.txt_attn.proj(txt_attn)
        txt = txt + t_gate2 * self.txt_mlp((1 + t_scale2) * self.txt_norm2(txt) + t_shift2)
        return img, txt


class SingleStreamBlock(nn.Module):
    def __init__(self, hidden: int = 16, mlp: int = 32) -> None:
        super().__init__()
        self.hidden, self.mlp = hidden, mlp
        self.linear1 = nn.Linear(hidden, hidden * 3 + mlp)
        self.linear2 = nn.Linear(hidden + mlp, hidden)
        self.norm = QKNorm(hidden // 2)
        self.pre_norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.mlp_act = nn.GELU(approximate="tanh")
        self.modulation = Modulation(hidden, double=False)

    def forward(self, x: Tensor, vec: Tensor, pe: Tensor) -> Tensor:
        (shift, scale, gate), _ = self.modulation(vec)
        x_mod = (1 + scale) * self.pre_norm(x) + shift
        qkv, mlp = torch.split(self.linear1(x_mod), [3 * self.hidden, self.mlp], dim=-1)
        q, k, v = heads_of(qkv)
        q, k = self.norm(q, k, v)
        attn = attention(q, k, v, pe=pe)
        return x + gate * self.linear2(torch.cat((attn, self.mlp_act(mlp)), 2))


class Flux(nn.Module):
    def __init__(self, single: int = 2) -> None:
        super().__init__()
        self.double_blocks = nn.ModuleList([DoubleStreamBlock() for _ in range(2)])
        self.single_blocks = nn.ModuleList([SingleStreamBlock() for _ in range(single)])
        self.final = nn.Linear(16, 4)

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor) -> Tensor:
        n = img.shape[1] + txt.shape[1]
        pe = torch.arange(n, dtype=img.dtype)[:, None] / math.e ** torch.arange(8)
        for block in self.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe)
        img = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            img = block(img, vec=vec, pe=pe)
        return self.final(img)


def img_txt(tail: str) -> tuple[str, ...]:
    return tuple(f"double_blocks.{{i}}.{stream}_{tail}" for stream in ("img", "txt"))


DOUBLE = Stack(
    (0, 1),
    {
        **{f"attn.{r}": img_txt(f"attn.qkv.weight[{16 * n}:{16 * n + 16}]") for n, r in enumerate("qkv")},
        "attn.o": img_txt("attn.proj.weight"),
        "attn.q.norm": img_txt("attn.norm.query_norm.weight"),
        "attn.k.norm": img_txt("attn.norm.key_norm.weight"),
        "ffn.up": img_txt("mlp.0.weight"),
        "ffn.down": img_txt("mlp.2.weight"),
    },
    {"attn.x": None, "attn.h": None, "ffn.h": None},
)


def joint() -> dict[str, Any]:
    return {"x": torch.randn(2, 5, 16), "context": torch.randn(2, 3, 16), "c": torch.randn(2, 16)}


def flux() -> dict[str, Any]:
    return {"img": torch.randn(2, 5, 16), "txt": torch.randn(2, 3, 16), "vec": torch.randn(2, 16)}


# linear2 reads the attention and the hidden units at once: it is o and down, in one.
SINGLE = Stack(
    (0, 1),
    {
        **thirds("single_blocks.{i}.linear1"),
        "attn.q.norm": "single_blocks.{i}.norm.query_norm.weight",
        "attn.k.norm": "single_blocks.{i}.norm.key_norm.weight",
    },
    {"attn.x": "single_blocks.{i}.linear1", "attn.h": None},
    optional={
        "attn.o": "single_blocks.{i}.linear2.weight",
        "ffn.up": "single_blocks.{i}.linear1.weight[48:80]",
        "ffn.down": "single_blocks.{i}.linear2.weight",
    },
)
CASES = (
    Case("hand-written/sd3_joint", "hand-written", SD3, joint, (JOINT,)),
    Case("hand-written/flux_double", "hand-written", lambda: Flux(single=0), flux, (DOUBLE,)),
    Case("hand-written/flux", "hand-written", Flux, flux, (DOUBLE, SINGLE)),
)
