"""`x` of an attention where queries, keys and values read different tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import peftc
from tests.layers import Layers

D = 8


class Layer(nn.Module):
    """Queries read the residual stream; keys and values read its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def attention(self, h: Tensor) -> Tensor:
        n = self.norm(h)
        keys = self.k(n)  # the first operation of the sub-layer is the norm, not the query projection
        scores = self.q(h) @ keys.transpose(1, 2) / D**0.5
        return self.o(scores.softmax(-1) @ self.v(n))

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.attention(h)
        return h + self.down(self.up(h).relu())


def test_x_of_an_attention_is_the_stream_where_its_queries_read_the_stream() -> None:
    torch.manual_seed(0)
    model, x = Layers(Layer(), Layer()).double(), torch.randn(2, 3, D, dtype=torch.float64)
    peftc.compile("peft 1\nedit e at layer[*].attn { h += lora(x, r=2) }", model, seed=0, sample={"x": x})
    values = [p.data.normal_() for p in peftc.parameters(model).values()]
    got = model(x)
    peftc.remove(model)
    for layer, a, b in zip(model.layers, values[::2], values[1::2], strict=True):
        x = x + layer.attention(x) + x @ a.T @ b.T
        x = x + layer.down(layer.up(x).relu())
    torch.testing.assert_close(got, x, rtol=1e-10, atol=1e-10)
