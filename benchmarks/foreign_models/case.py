"""One model of the second coverage benchmark, with the role table that its source code has.

The table is written by reading the model's code, never by running peftc.

A *reference* names a parameter and how it is read as nn.Linear stores a weight, (out, in):

    blocks.{i}.mlp.fc1.weight               the whole parameter, in the layer `i`
    blocks.{i}.attn.qkv.weight[0:32]        rows, that is output features, 0 to 31
    h.{i}.qkv.weight[0:8, 24:32]            several blocks of rows (heads that are interleaved)
    h.{i}.c_attn.weight.T[0:32]             stored as (in, out); rows of the transposed matrix
    layers.{i}.w_q(d h k -> h k | d)        any other layout: rows before `|`, columns behind it
    layers.{i}.moe.w1@3                     the fourth of several matrices in one parameter
    layers.{i}.experts.{0..3}.w1.weight     short for a tuple of four references

`@` comes first, then the layout (for the matrix that `@` selects), then rows. A convolution
(out, in, …) is (out, everything else). A norm's parameter is its `weight`, whatever its name;
a norm without parameters is not listed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Stack:
    """Layers with one role table.

    Attributes:
        layers: what `{i}` stands for, in running order: `tuple(range(2))`, or names.
        roles: the path of a site below its layer, without numbers -> its references. One layer may
            have several sites of a role (image and text in a joint stream, experts): a tuple. The
            paths are those of docs/language.md: `attn.self.q`, `attn.cross.k`, `attn.o`,
            `attn.norm`, `attn.q.norm`, `ffn.up`, `ffn.gate`, `ffn.down`, `ffn.norm`, `ffn.router`,
            `ffn.experts.up`, `ffn.shared.up`. `attn.q` is `attn.self.q` or `attn.cross.q`.
            All q, k, v, o, up, gate, down and norms of the source are listed. A key and value
            from one Linear (multi-query, `to_kv`) have rows each; where one weight is both (a
            shared `kv`), both roles have the same reference.
        states: where `x` and `h` of a sub-layer are not at the border of a module of the table:
            `attn.x`, `attn.h`, `ffn.x`, `ffn.h` (with `self` or `cross` as in the roles) -> the
            module, with `{i}`, whose input (`x`) or output (`h`) it is, or for an `x` that is the
            output of a module, "blocks.{i}.norm1:out"; "…:nchw" for an image with its features in
            the second dimension, at a module that is no convolution; None where no module has it.
            By default `x` is the input of q or up, and `h` the output of o or down. Needed where a
            gate, a scale (`LayerScale`), or a norm stands behind o or down, before the sum.
        optional: roles where the code can be read in two ways: a site is right, and none is, too.
        biases: role -> the parameter, with `{i}`, that is its bias, where it does not stand beside
            the weight under a name like it.
    """

    layers: tuple[str | int, ...]
    roles: Mapping[str, str | tuple[str, ...]]
    states: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    optional: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict[str, str | tuple[str, ...]])
    biases: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Case:
    """A tiny model, the arguments of one forward, and its role table.

    Attributes:
        name: unique: "timm/vit_tiny".
        library: the distribution on PyPI, "torch", or "hand-written".
        build: the model, with random weights; the seed is set by the caller. Imports the library.
        inputs: the keyword arguments of one forward, which are peftc's `sample`, too.
        stacks: the expected role table; empty where no layer has attention or a feed-forward part.
        output: picks a tensor of the result, where it is not the first floating one.
        source: where the code that was read stands, and what is odd about it.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]
    stacks: tuple[Stack, ...]
    output: Callable[[Any], Tensor] | None = None
    source: str = ""
