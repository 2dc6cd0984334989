"""The modules of layers of one kind are described once, unless numbers or calls differ."""

import torch
from torch import Tensor, nn

import peftc
from peftc.addressing.module_infos import infos_of
from tests import zoo


class Block(nn.Module):
    def __init__(self, dilation: int, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    def __init__(self, *dilations: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Block, dilations))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_convolution_has_its_own_dilation_in_layers_of_one_structure() -> None:
    dilations = (1, 2, 1, 4)
    modules = infos_of(peftc.sites(Blocks(*dilations), sample={"x": torch.zeros(2, 5, 8)}))
    kernels = [modules.find(f"layers.{i}.conv") for i in range(4)]
    assert [info and info.kernel and info.kernel.dilation for info in kernels] == [(d,) for d in dilations]
    assert len({id(block.template) for block in modules.blocks if block.layer}) == 3


def test_layers_of_one_kind_have_one_template() -> None:
    modules = infos_of(peftc.sites(zoo.build("llama", num_hidden_layers=6)))
    layers = [block for block in modules.blocks if block.layer]
    assert [block.layer for block in layers] == [f"model.layers.{i}" for i in range(6)]
    assert len({id(block.template) for block in layers}) == 1
    assert [info.name for info in modules] == [n for n, _ in zoo.build("llama", num_hidden_layers=6).named_modules()]
