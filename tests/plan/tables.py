"""Hand-written site tables for BART, BERT, T5, LLaMA and GPT-2: planner tests need no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

from peftc.addressing.sites import ActivationRef, ModuleInfo, Site, SiteTable, Slice, State, WeightRef
from peftc.forms.shapes import Heads, KeyValue, Rows, Shape, Tokens, Vector, Weight

Steps = tuple[tuple[str, int | None], ...]


@dataclass
class Builder:
    """Collects the sites and modules of one model."""

    model_id: str
    model_type: str
    d: int
    heads: int
    kv_heads: int
    d_head: int
    d_ff: int
    bias: bool
    sites: list[Site] = field(default_factory=list)
    modules: list[ModuleInfo] = field(default_factory=list)

    def module(self, name: str, type_: str = "Module", **parameters: tuple[int, ...]) -> None:
        self.modules.append(ModuleInfo(name, type_, parameters, transposed=type_ == "Conv1D"))

    def linear(self, name: str, d_out: int, d_in: int, *, bias: bool | None = None) -> None:
        extra = {"bias": (d_out,)} if (self.bias if bias is None else bias) else {}
        self.module(name, "Linear", weight=(d_out, d_in), **extra)

    def norm(self, name: str) -> None:
        self.module(name, "Norm", weight=(self.d,), **({"bias": (self.d,)} if self.bias else {}))

    def site(self, steps: Steps, module: str, root: str, shapes: dict[str, Shape], group: str = "", **more) -> None:
        path = _path(steps)
        states = {name: State(name, shape, ActivationRef(f"{path}:{name}")) for name, shape in shapes.items()}
        if more.get("linear"):
            states["h"] = replace(states["h"], linear=more["linear"])
        states |= more.get("weights", {})
        kind = ".".join(name for name, _ in steps)
        self.sites.append(
            Site(path, steps, module, root, kind, states, more.get("functions", {}), group or steps[0][0])
        )

    def linear_site(
        self, steps: Steps, name: str, root: str, d_out: int, d_in: int, group: str = "", rows: Slice | None = None
    ) -> None:
        weights = {"w": State("w", Weight(d_out, d_in), weight=WeightRef(name, "weight", rows))}
        if self.bias:
            weights["b"] = State("b", Vector(d_out), weight=WeightRef(name, "bias", rows))
        self.site(steps, name, root, {"x": Tokens(d_in), "h": Tokens(d_out)}, group, weights=weights)

    def norm_site(self, steps: Steps, name: str, root: str, group: str = "") -> None:
        weights = {"w": State("w", Vector(self.d), weight=WeightRef(name, "weight"))}
        if self.bias:
            weights["b"] = State("b", Vector(self.d), weight=WeightRef(name, "bias"))
        self.site(steps, name, root, {"x": Tokens(self.d), "h": Tokens(self.d)}, group, weights=weights)

    def attention(self, steps: Steps, layer: str, module: str, names: dict[str, str], norm: str, group: str) -> None:
        """`names` maps q, k, v and o to module names below `module`; `norm` is the full name of its
        norm.
        """
        width, kv = self.heads * self.d_head, self.kv_heads * self.d_head
        q, k = Rows(self.heads, self.d_head), Rows(self.kv_heads, self.d_head)
        stream = Tokens(self.d)
        shapes: dict[str, Shape] = {"h": stream, "res": stream, "x": stream, "c": stream, "q": q, "k": k, "v": k}
        shapes["kv"] = KeyValue(self.kv_heads, self.d_head)
        self.module(module)
        linear = f"{_path(steps)}.o"
        self.site(steps, module, layer, shapes, group, functions={"norm": norm}, linear=linear)
        for role, d_out, d_in in (("q", width, self.d), ("k", kv, self.d), ("v", kv, self.d), ("o", self.d, width)):
            name = f"{module}.{names[role]}"
            self.linear(name, d_out, d_in)
            self.linear_site((*steps, (role, None)), name, layer, d_out, d_in, group)
        self.site((*steps, ("heads", None)), module, layer, {"h": Heads(self.heads, self.d_head), "q": q}, group)
        self.norm(norm)
        self.norm_site((*steps, ("norm", None)), norm, layer, group)
        self.site((*steps, ("add", None)), layer, layer, {"h": stream}, group)

    def ffn(self, steps: Steps, layer: str, module: str, names: dict[str, str], norm: str) -> None:
        """`names` maps up, down and perhaps gate to full module names; `module` contains them
        all.
        """
        stream, hidden = Tokens(self.d), Tokens(self.d_ff)
        if module != layer:
            self.module(module)
        self.site(
            steps,
            module,
            layer,
            {"h": stream, "res": stream, "x": stream, "z": hidden},
            functions={"norm": norm},
            linear=f"{_path(steps)}.down",
        )
        for role, name in names.items():
            size = (self.d, self.d_ff) if role == "down" else (self.d_ff, self.d)
            self.linear(name, *size)
            self.linear_site((*steps, (role, None)), name, layer, *size)
        same = {"h": State("h", hidden, ActivationRef(f"{_path(steps)}:z"))}  # under another name
        self.site((*steps, ("hidden", None)), names["down"], layer, {"x": stream}, weights=same)
        self.norm(norm)
        self.norm_site((*steps, ("norm", None)), norm, layer)
        self.site((*steps, ("add", None)), layer, layer, {"h": stream})

    def layer(self, stack: str, i: int, module: str) -> Steps:
        steps: Steps = ((stack, None), ("layer", i))
        self.module(module)
        self.site(steps, module, module, {"x": Tokens(self.d), "h": Tokens(self.d)})
        return steps

    def embed(self, steps: Steps, name: str, vocab: int) -> None:
        self.module(name, "Embedding", weight=(vocab, self.d))
        weights = {"w": State("w", Weight(vocab, self.d), weight=WeightRef(name, "weight"))}
        self.site(steps, name, name, {"h": Tokens(self.d)}, weights=weights)

    def head(self, name: str, vocab: int) -> None:
        self.linear(name, vocab, self.d, bias=False)
        weights = {"w": State("w", Weight(vocab, self.d), weight=WeightRef(name, "weight"))}
        self.site((("head", None),), name, name, {"x": Tokens(self.d), "h": Tokens(vocab)}, weights=weights)

    def table(self, tied: tuple[tuple[str, ...], ...] = (), extra: int = 0) -> SiteTable:
        sizes = {f"{m.name}.{a}": _numel(shape) for m in self.modules for a, shape in m.parameters.items()}
        self.modules = list(_with_containers(self.modules))
        repeated = {name for group in tied for name in group[1:]}
        total = sum(size for name, size in sizes.items() if name not in repeated)
        return SiteTable(
            self.model_id,
            self.model_type,
            total + extra,
            self.d,
            f"sha256:{self.model_type}",
            tuple(self.sites),
            tuple(self.modules),
            tied,
        )


def _with_containers(modules: list[ModuleInfo]) -> Iterator[ModuleInfo]:
    """Every module, each after the modules that contain it."""
    own = {module.name: module for module in modules}
    paths: set[str] = set()
    for module in modules:
        for name in ("", *accumulate(module.name.split("."), lambda above, part: f"{above}.{part}")):
            if name not in paths:
                paths.add(name)
                yield own.get(name) or ModuleInfo(name, "Module", {})


def _path(steps: Steps) -> str:
    return ".".join(name if index is None else f"{name}[{index}]" for name, index in steps)


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


QKVO = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}


def bart(
    d: int = 1024, layers: tuple[int, int] = (12, 12), heads: int = 16, d_ff: int = 4096, vocab: int = 50265
) -> SiteTable:
    """facebook/bart-large by default: 406,291,456 parameters."""
    b = Builder("facebook/bart-large", "bart", d, heads, heads, d // heads, d_ff, True)
    b.module("")
    b.module("model")
    b.module("model.shared", "Embedding", weight=(vocab, d))
    for stack, count in zip(("encoder", "decoder"), layers, strict=True):
        b.module(f"model.{stack}")
        b.embed(((stack, None), ("embed", None)), f"model.{stack}.embed_tokens", vocab)
        b.module(f"model.{stack}.embed_positions", "Embedding", weight=(1026, d))
        b.module(f"model.{stack}.layers", "ModuleList")
        for i in range(count):
            layer = f"model.{stack}.layers.{i}"
            steps = b.layer(stack, i, layer)
            own = (*steps, ("attn", None), ("self", None))
            b.attention(own, layer, f"{layer}.self_attn", QKVO, f"{layer}.self_attn_layer_norm", f"{stack}.self")
            if stack == "decoder":
                cross = (*steps, ("attn", None), ("cross", None))
                norm = f"{layer}.encoder_attn_layer_norm"
                b.attention(cross, layer, f"{layer}.encoder_attn", QKVO, norm, "decoder.cross")
            names = {"up": f"{layer}.fc1", "down": f"{layer}.fc2"}
            b.ffn((*steps, ("ffn", None)), layer, layer, names, f"{layer}.final_layer_norm")
        b.norm(f"model.{stack}.layernorm_embedding")
    b.head("lm_head", vocab)
    tied = (
        "model.shared.weight",
        "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.weight",
        "lm_head.weight",
    )
    return b.table((tied,))


def bert(
    d: int = 768, layers: int = 12, heads: int = 12, d_ff: int = 3072, model: str = "bert-base-uncased"
) -> SiteTable:
    """bert-base-uncased without a head, 109,482,240 parameters (its pooler included)."""
    b = Builder(model, "bert", d, heads, heads, d // heads, d_ff, True)
    b.module("")
    b.module("embeddings")
    b.embed((("encoder", None), ("embed", None)), "embeddings.word_embeddings", 30522)
    b.module("embeddings.position_embeddings", "Embedding", weight=(512, d))
    b.module("embeddings.token_type_embeddings", "Embedding", weight=(2, d))
    b.norm("embeddings.LayerNorm")
    b.module("encoder.layer", "ModuleList")
    names = {"q": "self.query", "k": "self.key", "v": "self.value", "o": "output.dense"}
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        steps = b.layer("encoder", i, layer)
        own = (*steps, ("attn", None), ("self", None))
        b.attention(own, layer, f"{layer}.attention", names, f"{layer}.attention.output.LayerNorm", "encoder.self")
        ffn = {"up": f"{layer}.intermediate.dense", "down": f"{layer}.output.dense"}
        b.ffn((*steps, ("ffn", None)), layer, layer, ffn, f"{layer}.output.LayerNorm")
    b.linear("pooler.dense", d, d)
    return b.table()


def t5(
    d: int = 1024, layers: int = 24, heads: int = 16, d_head: int = 64, d_ff: int = 4096, model: str = "t5-large"
) -> SiteTable:
    """t5-large by default: 737,668,096 parameters, with the relative position biases of the two
    first layers.
    """
    b = Builder(model, "t5", d, heads, heads, d_head, d_ff, False)
    b.module("")
    b.module("shared", "Embedding", weight=(32128, d))
    names = {"q": "q", "k": "k", "v": "v", "o": "o"}
    for stack in ("encoder", "decoder"):
        b.module(stack)
        b.embed(((stack, None), ("embed", None)), f"{stack}.embed_tokens", 32128)
        for i in range(layers):
            layer = f"{stack}.block.{i}"
            steps = b.layer(stack, i, layer)
            own = (*steps, ("attn", None), ("self", None))
            b.attention(
                own, layer, f"{layer}.layer.0.SelfAttention", names, f"{layer}.layer.0.layer_norm", f"{stack}.self"
            )
            last = 1
            if stack == "decoder":
                cross, last = (*steps, ("attn", None), ("cross", None)), 2
                module = f"{layer}.layer.1.EncDecAttention"
                b.attention(cross, layer, module, names, f"{layer}.layer.1.layer_norm", "decoder.cross")
            ffn = f"{layer}.layer.{last}.DenseReluDense"
            b.ffn(
                (*steps, ("ffn", None)),
                layer,
                ffn,
                {"up": f"{ffn}.wi", "down": f"{ffn}.wo"},
                f"{layer}.layer.{last}.layer_norm",
            )
        b.norm(f"{stack}.final_layer_norm")
        b.norm_site(((stack, None), ("norm", None)), f"{stack}.final_layer_norm", f"{stack}.final_layer_norm")
    b.head("lm_head", 32128)
    return b.table(
        (("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"),),
        extra=2 * 32 * heads,
    )


def llama(
    d: int = 64, layers: int = 4, heads: int = 8, kv_heads: int = 2, d_ff: int = 128, *, v_missing: tuple[int, ...] = ()
) -> SiteTable:
    """A small LLaMA with grouped queries; layers in `v_missing` have no `v` of their own."""
    b = Builder("tiny-llama", "llama", d, heads, kv_heads, d // heads, d_ff, False)
    b.module("")
    b.embed((("decoder", None), ("embed", None)), "model.embed_tokens", 100)
    for i in range(layers):
        layer = f"model.layers.{i}"
        steps = b.layer("decoder", i, layer)
        own = (*steps, ("attn", None), ("self", None))
        names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
        b.attention(own, layer, f"{layer}.self_attn", names, f"{layer}.input_layernorm", "decoder.self")
        ffn = {"gate": f"{layer}.mlp.gate_proj", "up": f"{layer}.mlp.up_proj", "down": f"{layer}.mlp.down_proj"}
        b.ffn((*steps, ("ffn", None)), layer, f"{layer}.mlp", ffn, f"{layer}.post_attention_layernorm")
    b.norm("model.norm")
    b.norm_site((("decoder", None), ("norm", None)), "model.norm", "model.norm")
    b.head("lm_head", 100)
    b.sites = [site for site in b.sites if not (site.steps[-1][0] == "v" and site.steps[1][1] in v_missing)]
    return b.table()


def gpt2(d: int = 64, layers: int = 2, heads: int = 4, d_ff: int = 256) -> SiteTable:
    """A small GPT-2: one fused projection for q, k and v, stored (in, out)."""
    b = Builder("tiny-gpt2", "gpt2", d, heads, heads, d // heads, d_ff, True)
    b.module("")
    b.embed((("decoder", None), ("embed", None)), "transformer.wte", 100)
    for i in range(layers):
        layer = f"transformer.h.{i}"
        steps = b.layer("decoder", i, layer)
        for site in _fused_attention(b, steps, layer):
            b.site(*site)
        ffn = {"up": f"{layer}.mlp.c_fc", "down": f"{layer}.mlp.c_proj"}
        b.ffn((*steps, ("ffn", None)), layer, f"{layer}.mlp", ffn, f"{layer}.ln_2")
    return b.table()


def _fused_attention(b: Builder, steps: Steps, layer: str) -> Iterator[tuple[Steps, str, str, dict[str, Shape], str]]:
    own, module = (*steps, ("attn", None), ("self", None)), f"{layer}.attn"
    stream, rows = Tokens(b.d), Rows(b.heads, b.d_head)
    b.module(module)
    b.module(f"{module}.c_attn", "Conv1D", weight=(b.d, 3 * b.d), bias=(3 * b.d,))
    shapes: dict[str, Shape] = {"h": stream, "x": stream, "res": stream, "q": rows, "k": rows, "v": rows}
    yield own, module, layer, shapes | {"kv": KeyValue(b.heads, b.d_head)}, "decoder.self"
    for i, role in enumerate("qkv"):
        name, part = f"{module}.c_attn", Slice(i * b.d, (i + 1) * b.d)
        b.linear_site((*own, (role, None)), name, layer, b.d, b.d, "decoder.self", part)
