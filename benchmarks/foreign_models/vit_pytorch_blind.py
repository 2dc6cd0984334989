"""vit-pytorch: models whose role tables were written before peftc had seen them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.foreign_models.case import Case, Stack
from benchmarks.foreign_models.tables import Roles, attention, both, feed_forward, ffn, image, packed

IMAGE: dict[str, Any] = {"image_size": 32, "num_classes": 5, "dim": 16, "heads": 2, "mlp_dim": 32}


def from_module(module: str, name: str, **arguments: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from importlib import import_module

        return getattr(import_module(f"vit_pytorch.{module}"), name)(**arguments)

    return build


def case(name: str, build: Callable[[], nn.Module], *stacks: Stack, size: int = 32, argument: str = "img") -> Case:
    return Case(f"vit-pytorch/{name}", "vit-pytorch", build, image(size, argument), stacks)


def attended(at: str, norm: Any = "", width: int = 16) -> Roles:
    return packed(f"{at}.to_qkv", width, o=f"{at}.to_out.0", norm=norm or f"{at}.norm")


def behind(part: str, norm: str, number: int) -> Roles:
    return {f"{part}.norm": (f"{norm}.weight", f"transformer.post_norms.{number}.weight")}


def separate(at: str) -> Roles:
    return attention(**{r: f"{at}.to_{r}" for r in "qkv"}, o=f"{at}.to_out.0", norm=f"{at}.norm.g!")


def convolutional(at: str) -> Roles:
    return ffn(f"{at}.net.1", f"{at}.net.4", f"{at}.net.0.g!")


L = "transformer.layers.{i}"
K = "transformer.layers"
SCALABLE = "layers.0.0.layers.{i}"
SEPARABLE = "layers.0.2.layers.{i}"

CASES = (
    # The class token passes by the ffn, whose norm is of rows of the image.
    case(
        "local_vit",
        from_module("local_vit", "LocalViT", patch_size=2, depth=2, dim_head=8, **IMAGE),
        Stack((0, 1), attended(f"{L}.0.fn") | feed_forward(f"{L}.1.fn.fn.net", 0, 1, 6)),
    ),
    # Two attentions and two ffns a layer; keys of the first are convolutions with stride 2.
    case(
        "scalable_vit",
        from_module(
            "scalable_vit",
            "ScalableViT",
            num_classes=5,
            dim=16,
            depth=(2,),
            heads=2,
            reduction_factor=2,
            window_size=4,
            iwsa_dim_key=8,
            iwsa_dim_value=8,
            ssa_dim_key=8,
            ssa_dim_value=8,
        ),
        Stack(
            (0, 1),
            both(
                separate(f"{SCALABLE}.0"),
                convolutional(f"{SCALABLE}.1"),
                convolutional(f"{SCALABLE}.3"),
                separate(f"{SCALABLE}.4"),
            ),
        ),
    ),
    # Attention in windows, then of the windows' tokens over the windows.
    case(
        "sep_vit",
        from_module("sep_vit", "SepViT", num_classes=5, dim=16, heads=(2,), depth=(2,), window_size=7),
        Stack(
            (0, 1),
            attended(f"{SEPARABLE}.0", f"{SEPARABLE}.0.norm.g!", 64) | convolutional(f"{SEPARABLE}.1"),
            optional={
                "attn.norm": f"{SEPARABLE}.0.window_tokens_to_qk.0.weight",
                "attn.q": f"{SEPARABLE}.0.window_tokens_to_qk.3.weight[0:32, 64:96]",
                "attn.k": f"{SEPARABLE}.0.window_tokens_to_qk.3.weight[32:64, 96:128]",
                "attn.q.norm": f"{SEPARABLE}.0.window_tokens_to_qk.0.weight",
            },
        ),
        size=56,
        argument="x",
    ),
    # Stacks before, in and behind a loop that runs three times.
    case(
        "looped_vit",
        from_module(
            "looped_vit",
            "LoopedViT",
            patch_size=8,
            pre_loop_depth=1,
            num_looped_blocks=2,
            post_loop_depth=1,
            loop_depth=3,
            dim_head=8,
            **IMAGE,
        ),
        *(
            Stack(
                layers,
                attended(f"{name}.layers.{{i}}.0") | feed_forward(f"{name}.layers.{{i}}.1.net", 0, 1, 4),
            )
            for name, layers in (("pre_loop", (0,)), ("looped", (0, 1)), ("post_loop", (0,)))
        ),
        argument="x",
    ),
    # Each sub-layer returns its normed input, too.
    case(
        "decorrelation",
        from_module("vit_with_decorr", "ViT", patch_size=8, depth=2, dim_head=8, **IMAGE),
        Stack((0, 1), attended(f"{L}.0") | ffn(f"{L}.1.net.0", f"{L}.1.net.3", f"{L}.1.norm")),
    ),
    # Attention and ffn in turn in one list; a norm behind each sum but the first.
    case(
        "keel_post_norm",
        from_module("vit_with_keel_post_ln", "ViT", patch_size=8, depth=2, dim_head=8, **IMAGE),
        Stack((0,), attended(f"{K}.0")),
        Stack((1,), feed_forward(f"{K}.1.net", 0, 1, 4) | behind("ffn", f"{K}.1.net.0", 0)),
        Stack((2,), attended(f"{K}.2") | behind("attn", f"{K}.2.norm", 1)),
        Stack((3,), feed_forward(f"{K}.3.net", 0, 1, 4) | behind("ffn", f"{K}.3.net.0", 2)),
    ),
)
