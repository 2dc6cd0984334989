"""Attentions of the same queries to several contexts, whose results are summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peftc
from tests.layers import Network

D, C, H, T = 8, 6, 2, 5
attend: Any = nn.functional.scaled_dot_product_attention


class Attention(nn.Module):
    """To a text and to an image, as image-to-video models do, and IP-Adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.o = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)
        self.norm_k, self.norm_image_k = nn.LayerNorm(D), nn.LayerNorm(D)
        self.k, self.v, self.image_k, self.image_v = (nn.Linear(C, D) for _ in range(4))

    def forward(self, x: Tensor, text: Tensor, image: Tensor) -> Tensor:
        values = (self.q(self.norm(x)), self.norm_image_k(self.image_k(image)), self.image_v(image))
        values = (*values, self.norm_k(self.k(text)), self.v(text))
        q, image_k, image_v, k, v = (value.unflatten(-1, (H, -1)).transpose(1, 2) for value in values)
        out = attend(q, image_k, image_v) + attend(q, k, v)
        return self.o(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.network = Attention(), Network(D)

    def forward(self, x: Tensor, text: Tensor, image: Tensor) -> Tensor:
        x = x + self.attention(x, text, image)
        return x + self.network(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, text: Tensor, image: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, text, image)
        return x


SAMPLE = {"x": torch.randn(2, T, D), "text": torch.randn(2, 4, C), "image": torch.randn(2, 3, C)}


def test_keys_and_values_of_each_context_have_roles() -> None:
    table = peftc.sites(Model(), sample=SAMPLE)
    modules = {site.path: site.module.rpartition(".")[2] for site in table.sites if "layer[0].attn" in site.path}
    roles = {path.partition("cross.")[2]: name for path, name in modules.items() if "cross." in path}
    expected = {"q": "q", "k[0]": "image_k", "k[1]": "k", "v[0]": "image_v", "v[1]": "v", "o": "o"}
    expected |= {"norm": "norm", "k.norm[0]": "norm_image_k", "k.norm[1]": "norm_k"}
    assert {role: name for role, name in roles.items() if role not in ("heads", "add")} == expected
    assert not table.unplaced
    (attention,) = (site for site in table.sites if site.path.endswith("layer[0].attn.cross"))
    assert "c" not in attention.states  # neither context alone


@pytest.mark.parametrize("role", ["k", "v"])
def test_an_edit_of_a_role_acts_on_each_context(role: str) -> None:
    model, reference = Model(), Model()
    peftc.compile(f"peft 1  edit e at layer[*].attn.{role} {{ h += lora(x, r=1) }}", model, seed=0, sample=SAMPLE)
    parameters = peftc.parameters(model)
    assert len(parameters) == 2 * 2 * 2
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
        for name, a in parameters.items():
            if name.endswith("lora.A"):
                layer, number = (int(part.partition("]")[0]) for part in name.split("[")[1:3])
                linear = reference.blocks[layer].get_submodule(f"attention.{'' if number else 'image_'}{role}")
                linear.weight += parameters[name.replace("lora.A", "lora.B")] @ a  # pyright: ignore
        torch.testing.assert_close(model(**SAMPLE), reference(**SAMPLE))


class InARow(nn.Module):
    """MotionBERT in series: joints attend, then frames, with the same Linear for both."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for dims in ((0, 1), (1, 0)):
            q, k, v = self.qkv(y).chunk(3, dim=-1)
            q, k, v = (part.transpose(*dims) for part in (q, k, v))
            y = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(*dims)
        return x + self.o(y)


def test_the_output_projection_of_attentions_in_a_row_is_the_last_one() -> None:
    sites = peftc.sites(nn.Sequential(InARow(), InARow()), sample={"input": torch.randn(2, 5, D)}).sites
    assert [s.module for s in sites if s.path.endswith(".o")] == ["0.o", "1.o"]
