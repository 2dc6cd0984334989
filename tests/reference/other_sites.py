"""Edits without a paper: other sites, other states, other orders."""

from __future__ import annotations

from tests.reference import forms
from tests.reference.methods import Method, Weights, at_sublayers, linears, sublayers
from tests.reference.reference import Reference, part


def arithmetic(edit: str, which: str) -> Method:
    """h ← 0.5 h − f(x) / 3."""
    return at_sublayers(edit, which, lambda at, w: 0.5 * at.h - forms.adapter(w("adapter"), at.x, "relu") / 3)


def after_sum(edit: str, which: str, act: str = "tanh") -> Method:
    """s ← s + f(s) on the residual sum s = res + h."""

    def apply(ref: Reference, weights: Weights) -> None:
        for site in sublayers(ref, which):
            w = part(weights, edit, f"{site.path}.add", "adapter")
            ref.h(site, lambda at, w=w: at.h + forms.adapter(w, at.res + at.h, act))

    return apply


def whole_layers(edit: str, act: str = "tanh") -> Method:
    """h ← h + f(x) of a whole layer."""

    def apply(ref: Reference, weights: Weights) -> None:
        for layer in ref.layers:
            w = part(weights, edit, layer.path, "adapter")
            ref.output(layer.module, lambda h, x, w=w: h + forms.adapter(w, x, act))

    return apply


def hidden_adapter(edit: str, act: str = "tanh") -> Method:
    """z ← z + f(z): what `down` reads."""

    def apply(ref: Reference, weights: Weights) -> None:
        for ffn in ref.ffns:
            w = part(weights, edit, f"{ffn.path}.hidden", "adapter")
            ref.input(ffn.down, lambda z, w=w: z + forms.adapter(w, z, act))

    return apply


def norm_weight(edit: str) -> Method:
    """w ← w + t of the ffn's norm: its output gains t ⊙ (h − b) / w."""

    def apply(ref: Reference, weights: Weights) -> None:
        for ffn in ref.ffns:
            t = part(weights, edit, f"{ffn.path}.norm", "vector")["scale"]
            norm = ref.model.get_submodule(ffn.norm)
            w, b = norm.weight.detach(), getattr(norm, "bias", None)
            shift = 0.0 if b is None else b.detach()
            ref.output(ffn.norm, lambda h, x, t=t, w=w, b=shift: h + t * (h - b) / w)

    return apply


def embeddings(edit: str) -> Method:
    """h ← l ⊙ h of the token embeddings, each stack's own."""

    def apply(ref: Reference, weights: Weights) -> None:
        modules = {
            "bart": {"encoder": "model.encoder.embed_tokens", "decoder": "model.decoder.embed_tokens"},
            "bert": {"encoder": "bert.embeddings.word_embeddings"},
            "gpt2": {"decoder": "transformer.wte"},
            "llama": {"decoder": "model.embed_tokens"},
        }
        for stack, module in modules[ref.name].items():
            w = part(weights, edit, f"{stack}.embed", "vector")
            ref.model.get_submodule(module).register_forward_hook(lambda _, args, out, w=w: out * w["scale"])

    return apply


def head_of_changed(edit: str, act: str = "tanh") -> Method:
    """h ← ½ h + ½ head(x + f(x)), and then γ h: the frozen head applied to another value."""

    def apply(ref: Reference, weights: Weights) -> None:
        head = ref.model.get_output_embeddings()
        name = next(n for n, m in ref.model.named_modules() if m is head)
        w, s = part(weights, edit, "head", "adapter"), part(weights, "s", "head", "scalar")["scale"]
        own = type(head).forward
        ref.output(name, lambda h, x: s * (0.5 * h + 0.5 * own(head, x + forms.adapter(w, x, act))))

    return apply


def scaled_heads(edit: str) -> Method:
    """head ← l ⊙ head, l (heads, d_head)."""

    def apply(ref: Reference, weights: Weights) -> None:
        for site in ref.attentions:
            w = part(weights, edit, f"{site.path}.heads", "vector")
            ref.heads(site, lambda h, q, w=w: h * w["scale"])

    return apply


def query_bottleneck(edit: str) -> Method:
    """q ← q + relu(q P_kᵀ) P_v, as attention sees q."""

    def apply(ref: Reference, weights: Weights) -> None:
        for site in ref.attentions:
            w = part(weights, edit, site.path, "bottleneck")
            ref.inside(site).q.append(lambda q, w=w: q + forms.bottleneck(w, q.transpose(1, 2)).transpose(1, 2))

    return apply


def linear_act(edit: str, roles: str, act: str = "relu") -> Method:
    """h ← h + f(h) on the outputs of linears."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w = part(weights, edit, path, "adapter")
            ref.linear(rows, lambda h, x, w=w: h + forms.adapter(w, h, act))

    return apply


def linear_parallel(edit: str, roles: str, act: str = "relu") -> Method:
    """h ← h + f(x) on the outputs of linears."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w = part(weights, edit, path, "adapter")
            ref.linear(rows, lambda h, x, w=w: h + forms.adapter(w, x, act))

    return apply


def linear_adapter(edit: str, roles: str, s: float) -> Method:
    """h ← h + s (h W_downᵀ + b_down) W_upᵀ + s b_up on the outputs of linears."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w = part(weights, edit, path, "adapter")
            ref.linear(rows, lambda h, x, w=w: h + s * forms.adapter(w, h, "none"))

    return apply


def biased(edit: str, roles: str) -> Method:
    """b ← b + t."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w = part(weights, edit, path, "vector")
            ref.linear(rows, lambda h, x, w=w: h + w["scale"])

    return apply


def ordered(edit: str, which: str) -> Method:
    """h ← h + f(·) with tanh, f reading x, h, res or norm(h + res): edits named x, h, r, n."""
    reads = {"x": lambda at: at.x, "h": lambda at: at.h, "r": lambda at: at.res, "n": lambda at: at.norm(at.h + at.res)}
    return at_sublayers(edit, which, lambda at, w: at.h + forms.adapter(w("adapter"), reads[edit](at), "tanh"))
