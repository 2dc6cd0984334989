"""Each method as code: `method(ref, weights)` edits a reference model with these weights.

Edit names, site paths and form names are those of the specs in `tests/laws/recipes.py`, which state
the same equations in the language. Sources: see `forms.py`, and for the `*_bn` family the
configurations of AdapterHub (Pfeiffer et al. 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor, nn

from tests.reference import forms
from tests.reference.attention import Prefix
from tests.reference.layers import At
from tests.reference.reference import Reference, part
from tests.reference.table import Attention, Rows, Sublayer

Weights = Mapping[str, Tensor]
Method = Callable[[Reference, Weights], None]
HEAD_DIM_NAMES = ("head_dim", "key_value_proj_dim", "attention_head_size")


def sublayers(ref: Reference, which: str) -> Iterable[Sublayer]:
    """`attn`, `self`, `cross`, `ffn` or several joined by spaces, in model order."""
    for layer in ref.layers:
        for a in layer.attentions:
            if "attn" in which.split() or a.slot in which.split():
                yield a
        if "ffn" in which.split():
            yield layer.ffn


def linears(ref: Reference, roles: str) -> Iterable[tuple[str, Rows]]:
    """(site path, where) of the linears in these roles: "q v", "up down"."""
    for layer in ref.layers:
        for site in (*layer.attentions, layer.ffn):
            for role in roles.split():
                rows = getattr(site, role, None)
                if rows is not None:
                    yield f"{site.path}.{role}", rows


# Linears
# --------------------------------------------------------------------------------------------------


def lora(edit: str, roles: str, alpha: float, rslora: bool = False) -> Method:
    """h ← h + (α/r) B A x."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w = part(weights, edit, path, "lora")
            ref.linear(rows, lambda h, x, w=w: h + forms.lora(w, x, alpha, rslora))

    return apply


def lowrank(edit: str, roles: str, alpha: float) -> Method:
    """w ← w + (α/r) B A."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w = part(weights, edit, path, "lowrank")
            ref.weight(rows, lambda base, w=w: base + forms.lowrank(w, alpha))

    return apply


def dora(edit: str, roles: str, alpha: float) -> Method:
    """w ← m ⊙ (w + (α/r) B A) / ‖w + (α/r) B A‖."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w, m = part(weights, edit, path, "lowrank"), part(weights, edit, path, "magnitude")
            ref.weight(rows, lambda base, w=w, m=m: forms.magnitude(m, base + forms.lowrank(w, alpha)))

    return apply


def scaled(edit: str, roles: str) -> Method:
    """h ← l ⊙ h of linears."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w = part(weights, edit, path, "vector")
            ref.linear(rows, lambda h, x, w=w: h * w["scale"])

    return apply


def scaled_hidden(edit: str) -> Method:
    """z ← l ⊙ z: what `down` reads."""

    def apply(ref: Reference, weights: Weights) -> None:
        for ffn in ref.ffns:
            w = part(weights, edit, f"{ffn.path}.hidden", "vector")
            ref.input(ffn.down, lambda z, w=w: z * w["scale"])

    return apply


# Sub-layers
# --------------------------------------------------------------------------------------------------

Equation = Callable[[At, Callable[[str], dict[str, Tensor]]], Tensor]


def at_sublayers(edit: str, which: str, equation: Equation, only: Callable[[int], bool] = lambda i: True) -> Method:
    """h ← equation(at, w), w(form) the tensors of a form at that site."""

    def apply(ref: Reference, weights: Weights) -> None:
        for layer in ref.layers:
            for site in (*layer.attentions, layer.ffn):
                if site in tuple(sublayers(ref, which)) and only(layer.index):

                    def get(form: str, path: str = site.path) -> dict[str, Tensor]:
                        return part(weights, edit, path, form)

                    ref.h(site, lambda at, get=get: equation(at, get))

    return apply


def sequential(edit: str, which: str, act: str = "relu", s: float = 1.0) -> Method:
    """h ← h + s f(h) (Houlsby; AdapterHub `double_seq_bn`)."""
    return at_sublayers(edit, which, lambda at, w: at.h + s * forms.adapter(w("adapter"), at.h, act))


def parallel(edit: str, which: str, act: str = "relu", s: float = 1.0) -> Method:
    """h ← h + s f(x) (He et al.; AdapterHub `par_bn` with s = 4)."""
    return at_sublayers(edit, which, lambda at, w: at.h + s * forms.adapter(w("adapter"), at.x, act))


def parallel_residual(edit: str, which: str, act: str = "relu", s: float = 1.0) -> Method:
    """h ← h + s f(res): what the authors' mBART code and AdapterHub read in pre-norm models."""
    return at_sublayers(edit, which, lambda at, w: at.h + s * forms.adapter(w("adapter"), at.res, act))


def seq_bn(edit: str, which: str, act: str = "relu") -> Method:
    """AdapterHub `seq_bn`: z = LN(h + res), h ← h + f(z); in post-norm models out = LN(f(z) + h +
    res).
    """
    return at_sublayers(edit, which, lambda at, w: at.h + forms.adapter(w("adapter"), at.norm(at.h + at.res), act))


def seq_bn_without_norm(edit: str, which: str, act: str = "relu") -> Method:
    """AdapterHub `seq_bn` in pre-norm models: h ← h + f(h + res)."""
    return at_sublayers(edit, which, lambda at, w: at.h + forms.adapter(w("adapter"), at.h + at.res, act))


def gated(edit: str, which: str, act: str = "relu") -> Method:
    """g = mean σ(h w + b), h ← h + g f(h): one third of UniPELT."""
    return at_sublayers(
        edit, which, lambda at, w: at.h + forms.gate(w("gate"), at.h) * forms.adapter(w("adapter"), at.h, act)
    )


def gated_after(edit: str, which: str, norm: bool, act: str = "relu") -> Method:
    """g = mean σ(z w + b), h ← h + g f(z), z = h + res or, with `norm`, its norm: AdapterHub's
    third of UniPELT.
    """

    def equation(at: At, w: Callable[[str], dict[str, Tensor]]) -> Tensor:
        z = at.norm(at.h + at.res) if norm else at.h + at.res
        return at.h + forms.gate(w("gate"), z) * forms.adapter(w("adapter"), z, act)

    return at_sublayers(edit, which, equation)


def interpolated(edit: str, which: str, act: str = "relu") -> Method:
    """g = mean σ(x w + b), h ← (1 - g) h + g f(h)."""

    def equation(at: At, w: Callable[[str], dict[str, Tensor]]) -> Tensor:
        g = forms.gate(w("gate"), at.x)
        return (1 - g) * at.h + g * forms.adapter(w("adapter"), at.h, act)

    return at_sublayers(edit, which, equation)


def gate_x_adapter_h(edit: str, which: str, act: str = "relu") -> Method:
    """g = mean σ(x w + b), h ← h + g f(h)."""
    return at_sublayers(
        edit, which, lambda at, w: at.h + forms.gate(w("gate"), at.x) * forms.adapter(w("adapter"), at.h, act)
    )


def learned_scale(edit: str, which: str, act: str = "relu") -> Method:
    """h ← h + s f(x), s trained."""
    return at_sublayers(edit, which, lambda at, w: at.h + w("scalar")["scale"] * forms.adapter(w("adapter"), at.x, act))


def gamma(edit: str, which: str) -> Method:
    """h ← γ ⊙ h (DiffFit)."""
    return at_sublayers(edit, which, lambda at, w: at.h * w("vector")["scale"])


def twice(edit: str, which: str) -> Method:
    """Two equations in order: h ← h + f(x), then h ← h + f'(h), where f' reads the new h."""

    def equation(at: At, w: Callable[[str], dict[str, Tensor]]) -> Tensor:
        h = at.h + forms.adapter(w("adapter"), at.x, "relu")
        return h + forms.adapter(w("adapter_2"), h, "tanh")

    return at_sublayers(edit, which, equation)


def gated_lora(edit: str, roles: str, alpha: float) -> Method:
    """g = mean σ(x w + b), h ← h + g (α/r) B A x: another third of UniPELT."""

    def apply(ref: Reference, weights: Weights) -> None:
        for path, rows in linears(ref, roles):
            w, g = part(weights, edit, path, "lora"), part(weights, edit, path, "gate")
            ref.linear(rows, lambda h, x, w=w, g=g: h + forms.gate(g, x) * forms.lora(w, x, alpha))

    return apply


def after_norm(edit: str, act: str = "relu") -> Method:
    """h ← h + f(h) on the output of the ffn's norm: Pfeiffer's plain form in post-norm models."""

    def apply(ref: Reference, weights: Weights) -> None:
        for ffn in ref.ffns:
            w = part(weights, edit, f"{ffn.path}.norm", "adapter")
            ref.linear(Rows(ffn.norm), lambda h, x, w=w: h + forms.adapter(w, h, act))

    return apply


# Inside attention
# --------------------------------------------------------------------------------------------------


def prefix(edit: str, which: str = "attn", form: str = "concat") -> Method:
    """K ← [P_k; K], V ← [P_v; V] (Eq. 5), or its gated form (Eq. 7)."""

    def apply(ref: Reference, weights: Weights) -> None:
        for site in sublayers(ref, which):
            assert isinstance(site, Attention)
            w = part(weights, edit, site.path, "prefix")
            ref.prefix(site, lambda w=w: forms.prefix(w))
            ref.inside(site).form = form  # type: ignore[assignment]

    return apply


def prefix_mlp(edit: str, which: str = "attn", gated: bool = False) -> Method:
    """The reparametrised prefix: one MLP for each group (encoder self, decoder self, decoder
    cross).

    `gated`: keys and values times a gate of each attention, g = mean σ(x w + b): the last third of
    UniPELT.
    """

    def apply(ref: Reference, weights: Weights) -> None:
        for layer in ref.layers:
            for site in layer.attentions:
                group = f"{layer.stack}.{site.slot}"
                keys = {k.rpartition(".")[2]: v for k, v in weights.items() if k.startswith(f"{edit}/") and group in k}
                core = ref.model.get_submodule(site.core)
                d_kv = ref.w(site.k)[0].shape[0]
                d_head = next(d for d in (getattr(core, n, None) for n in HEAD_DIM_NAMES) if d)

                def prefix(
                    w: Weights = keys, i: int = layer.index, n: int = d_kv // d_head, d: int = d_head
                ) -> tuple[Tensor, Tensor]:
                    return forms.prefix_group(w, i, n, d)

                ref.prefix(site, _gated(ref, site, part(weights, edit, site.path, "gate"), prefix) if gated else prefix)

    return apply


def _gated(ref: Reference, site: Attention, gate: dict[str, Tensor], prefix: Prefix) -> Prefix:
    """The prefix of an attention times its gate: (batch, heads, l, d_head)."""
    attention_input: dict[str, Tensor] = {}

    def before(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        attention_input["x"] = args[0] if args else kwargs["hidden_states"]

    ref.model.get_submodule(site.core).register_forward_pre_hook(before, with_kwargs=True)

    def times_gate() -> tuple[Tensor, Tensor]:
        g, (key, value) = forms.gate(gate, attention_input["x"]).unsqueeze(-1), prefix()
        return g * key, g * value

    return times_gate


def multi_head(edit: str, which: str = "attn", act: str = "relu", s: float = 1.0) -> Method:
    """head ← head + s act(q P_kᵀ) P_v."""

    def apply(ref: Reference, weights: Weights) -> None:
        for site in sublayers(ref, which):
            assert isinstance(site, Attention)
            w = part(weights, edit, f"{site.path}.heads", "bottleneck")
            ref.heads(site, lambda h, q, w=w: h + s * forms.bottleneck(w, q, act))

    return apply


def scaled_states(edit: str, states: str) -> Method:
    """q, k, v as attention sees them, (batch, heads, tokens, d_head), times (heads, d_head)."""

    def apply(ref: Reference, weights: Weights) -> None:
        for site in ref.attentions:
            for i, state in enumerate(states.split()):
                w = part(weights, edit, site.path, "vector" if i == 0 else f"vector_{i + 1}")
                getattr(ref.inside(site), state).append(lambda z, w=w: z * w["scale"].unsqueeze(-2))

    return apply


def for_one_task(method: Method) -> Method:
    """An edit `per task` with one task: its weights, by their names without tasks."""

    def apply(ref: Reference, weights: Weights) -> None:
        method(ref, {name.replace(".tasks.default.", "."): value for name, value in weights.items()})

    return apply


def together(*methods: Method) -> Method:
    def apply(ref: Reference, weights: Weights) -> None:
        for method in methods:
            method(ref, weights)

    return apply


def mam(ref: Reference, weights: Weights) -> None:
    """He et al. 2022, section 4.6: prefixes on every attention and scaled parallel adapters (s = 4)
    on every ffn.
    """
    together(prefix("prefix"), parallel("ffn", "ffn", s=4.0))(ref, weights)
